"""Who sees whom: packed documents and answer branches against separate sequences.

Shapes: B rows  S sequence  N tokens  H query heads  K kv heads  E head_dim.
"""

from pathlib import Path

import pytest
import torch

from venus.model import qwen3
from venus.model.attention import Layout, Span, attend
from venus.model.weights import load_model

GOLDEN = Path(__file__).parents[1] / "golden"
FP32 = dict(rtol=0, atol=1e-5)  # sums of a few dozen terms of order 1


@pytest.fixture(scope="module")
def model():
    """Two layers with RoPE: one layer, or none of RoPE, misses wrong positions (spec: a
    bigram misses leaks too).
    """
    return load_model(GOLDEN / "untied_tf4").requires_grad_(False)


def visibility(layout, num_tokens):
    """[N, N] booleans: which rows reach which output. Equal scores make the output the mean of the
    visible one-hot values.
    """
    zeros = torch.zeros(1, num_tokens, 1, num_tokens)
    return (
        attend(zeros, zeros, torch.eye(num_tokens).view(1, num_tokens, 1, num_tokens), layout)[
            0, :, 0
        ]
        > 0
    )


def rows(text):
    return torch.tensor([[c == "1" for c in row] for row in text.split()])


def dense_attend(visible_NN):
    """Attention written out with an explicit [N, N] mask, in place of `attend`."""

    def dense(q_BSHE, k_BSKE, v_BSKE, layout=None, cache=None, layer=0):
        group = q_BSHE.shape[2] // k_BSKE.shape[2]
        k_NHE, v_NHE = (x[0].repeat_interleave(group, dim=1) for x in (k_BSKE, v_BSKE))
        scores_HNN = torch.einsum("qhe,khe->hqk", q_BSHE[0], k_NHE) * q_BSHE.shape[-1] ** -0.5
        return torch.einsum(
            "hqk,khe->qhe", scores_HNN.masked_fill(~visible_NN, float("-inf")).softmax(-1), v_NHE
        )[None]

    return dense


# Visibility


def test_documents_see_themselves_causally_and_nothing_else():
    want = rows("100000 010000 011000 011100 000010 000011")
    assert torch.equal(visibility(Layout.documents([1, 3, 2]), 6), want)


def test_branches_see_the_trunk_up_to_their_cut_and_themselves():
    """The toy of four trunk tokens, cuts 2 and 4, two tokens a branch: rows 4-7 = 11001000 /
    11001100 / 11110010 / 11110011.
    """
    layout = Layout((Span(0, 4, 0, 0), Span(4, 6, 0, 2), Span(6, 8, 0, 4)))
    want = rows("10000000 11000000 11100000 11110000 11001000 11001100 11110010 11110011")
    assert torch.equal(visibility(layout, 8), want)


def test_branches_of_a_second_document_see_that_document():
    layout = Layout((Span(0, 2, 0, 0), Span(2, 5, 2, 2), Span(5, 6, 0, 1), Span(6, 8, 2, 4)))
    want = rows("10000000 11000000 00100000 00110000 00111000 10000100 00110010 00110011")
    assert torch.equal(visibility(layout, 8), want)


def test_without_a_layout_each_row_of_the_batch_is_one_causal_document():
    x_BSHE = torch.zeros(2, 3, 1, 6)
    out = attend(x_BSHE, x_BSHE, torch.eye(6).view(2, 3, 1, 6), None)[:, :, 0] > 0
    assert torch.equal(out, rows("100000 110000 111000 000100 000110 000111").view(2, 3, 6))


@pytest.mark.parametrize(
    "layout", [None, Layout.documents([4, 5]), Layout((Span(0, 5, 0, 0), Span(5, 9, 0, 3)))]
)
def test_grouped_heads_read_their_own_kv_head(layout):
    """Values, not only visibility: six query heads over two kv heads against attention written out
    with an explicit mask.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 9, heads, 8, generator=generator) for heads in (6, 2, 2))
    want = dense_attend(visibility(layout, 9))(q, k, v)
    torch.testing.assert_close(attend(q, k, v, layout), want, rtol=0, atol=2e-6)


# Packed documents == separate


def test_packed_documents_equal_separate_ones(model):
    lengths = [5, 1, 12, 7]
    tokens = [
        torch.randint(64, (n + 1,), generator=torch.Generator().manual_seed(n)) for n in lengths
    ]
    ids = torch.cat([t[:-1] for t in tokens])[None]
    targets = torch.cat([t[1:] for t in tokens])[None]
    positions, mask = torch.cat([torch.arange(n) for n in lengths])[None], torch.ones(ids.shape)
    separate = [
        model.token_stats(t[None, :-1], t[None, 1:], torch.ones(1, len(t) - 1)) for t in tokens
    ]
    want = [torch.cat(parts, dim=1) for parts in zip(*separate, strict=True)]
    got = model.token_stats(
        ids, targets, mask, positions_BS=positions, layout=Layout.documents(lengths)
    )
    torch.testing.assert_close(got, tuple(want), **FP32)
    # one document instead of four
    leaking = model.token_log_probs(ids, targets, mask, positions_BS=positions)
    assert (leaking - want[0]).abs().max() > 0.5


# Answer branches == each branch as its own sequence

TRUNK, ANSWER, CUTS = 12, 3, (4, 8, 12)
MAIN = torch.randint(64, (TRUNK,), generator=torch.Generator().manual_seed(11))
G = torch.randint(64, (ANSWER,), generator=torch.Generator().manual_seed(12))


def packed(cuts=CUTS, positions_run_on=False):
    """ids, positions and Layout of the trunk with one copy of G per cut."""
    spans, positions = [Span(0, TRUNK, 0, 0)], [torch.arange(TRUNK)]
    for i, cut in enumerate(cuts):
        start = TRUNK + i * ANSWER
        spans.append(Span(start, start + ANSWER, 0, cut))
        positions.append(torch.arange(ANSWER) + (start if positions_run_on else cut))
    return (
        torch.cat([MAIN, *[G] * len(cuts)])[None],
        torch.cat(positions)[None],
        Layout(tuple(spans)),
    )


def branch_log_probs(model, ids, positions, layout, head=-1):
    """[branches, 3]: G's token 0 is predicted by trunk row cut + head (head -1 is right), the
    others by their branch's rows.
    """
    hidden_ND = model(ids, positions, layout)[0]
    spans = packed()[2].spans[1:]
    predictors = [
        row for span in spans for row in (span.pre + head, *range(span.start, span.end - 1))
    ]
    log_softmax = model.logits(hidden_ND[predictors]).log_softmax(-1)
    return log_softmax.gather(-1, G.repeat(len(spans))[:, None]).view(len(spans), ANSWER)


def one_by_one(model):
    """The reference: trunk[:cut] + G as an ordinary sequence, for every cut."""
    result = []
    for cut in CUTS:
        log_softmax = model.logits(
            model(torch.cat([MAIN[:cut], G])[None])[0, cut - 1 : -1]
        ).log_softmax(-1)
        result.append(log_softmax.gather(-1, G[:, None])[:, 0])
    return torch.stack(result)


def test_branches_in_one_pass_equal_one_sequence_each(model):
    torch.testing.assert_close(branch_log_probs(model, *packed()), one_by_one(model), **FP32)


def test_the_hidden_states_of_branches_equal_those_of_their_sequences(model):
    hidden_ND = model(*packed())[0]
    for i, cut in enumerate(CUTS):
        want = model(torch.cat([MAIN[:cut], G])[None])[0]
        start = TRUNK + i * ANSWER
        torch.testing.assert_close(
            torch.cat([hidden_ND[:cut], hidden_ND[start : start + ANSWER]]), want, **FP32
        )


def test_token_log_probs_score_every_branch_through_targets_mask_and_positions(model):
    """The door that scoring uses: G's token 0 is the target of trunk row cut - 1, where documents
    alone would not show a position ignored.
    """
    ids, positions, layout = packed()
    targets, mask, order = torch.zeros_like(ids), torch.zeros_like(ids), []
    for span in layout.spans[1:]:
        predictors = [span.pre - 1, *range(span.start, span.end - 1)]
        targets[0, predictors], mask[0, predictors] = G, 1
        order += predictors
    got = model.token_log_probs(ids, targets, mask, positions_BS=positions, layout=layout)[
        0, order
    ].view(len(CUTS), ANSWER)
    torch.testing.assert_close(got, one_by_one(model), **FP32)


def test_positions_that_run_on_are_seen(model):
    """Negative control: every branch must notice, the first included."""
    error = (
        (branch_log_probs(model, *packed(positions_run_on=True)) - one_by_one(model)).abs().amax(1)
    )
    assert (error > 0.1).all()


def test_a_branch_that_sees_another_is_seen(model, monkeypatch):
    """Negative control: the first branch has nothing to leak from, so at least two are needed;
    the others must notice.
    """
    ids, positions, layout = packed()
    visible = visibility(layout, ids.shape[1])
    monkeypatch.setattr(qwen3, "attend", dense_attend(visible))
    torch.testing.assert_close(
        branch_log_probs(model, ids, positions, layout),
        one_by_one_without(monkeypatch, model),
        **FP32,
    )
    leaking = visible.clone()
    for span in layout.spans[1:]:
        leaking[span.start : span.end, TRUNK : span.start] = True
    monkeypatch.setattr(qwen3, "attend", dense_attend(leaking))
    got = branch_log_probs(model, ids, positions, layout)
    error = (got - one_by_one_without(monkeypatch, model)).abs().amax(1)
    assert error[0] < 1e-5 and (error[1:] > 0.1).all()


def one_by_one_without(monkeypatch, model):
    """`one_by_one` under the real `attend`, whatever stands in for it at the moment."""
    with monkeypatch.context() as real:
        real.setattr(qwen3, "attend", attend)
        return one_by_one(model)


def test_the_wrong_head_row_is_seen(model):
    """Negative control: token 0 read one row early (trap 8) moves it and only it."""
    error = (branch_log_probs(model, *packed(), head=-2) - one_by_one(model)).abs()
    assert (error[:, 0] > 0.1).all() and (error[:, 1:] < 1e-5).all()


def test_editing_the_trunk_after_a_cut_leaves_its_branch_exactly_unchanged(model):
    """Trunk token 9: the branches cut at 4 and 8 keep every bit, the one cut at 12 changes."""
    ids, positions, layout = packed()
    edited = ids.clone()
    edited[0, 9] = (edited[0, 9] + 1) % 64
    before = branch_log_probs(model, ids, positions, layout)
    after = branch_log_probs(model, edited, positions, layout)
    assert torch.equal(before[:2], after[:2])
    assert (before[2] != after[2]).any()


def test_trajectories_with_branches_pack_side_by_side(model):
    """Two trunks, each with its branches, in one sequence: the second trunk's spans are those
    of the first, moved.
    """
    ids, positions, layout = packed()
    size = ids.shape[1]
    both = Layout((*layout.spans, *(Span(*(x + size for x in span)) for span in layout.spans)))
    other = (ids * 7 + 3) % 64
    hidden = model(torch.cat([other, ids], dim=1), positions.repeat(1, 2), both)[0]
    torch.testing.assert_close(hidden[size:], model(ids, positions, layout)[0], **FP32)
    torch.testing.assert_close(hidden[:size], model(other, positions, layout)[0], **FP32)


def test_gradients_through_branches_equal_those_of_separate_sequences():
    """The trunk's keys and values collect gradient from every branch that reads
    them; values reach 10.
    """
    model = load_model(GOLDEN / "untied_tf4")
    parameters = list(model.parameters())
    got = torch.autograd.grad(branch_log_probs(model, *packed()).sum(), parameters)
    want = torch.autograd.grad(one_by_one(model).sum(), parameters)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
