"""Answer-branch attention under Triton's interpreter, against fp64 torch. Started by
test_processes.py in a process of its own.

The rule of interpreted_cross_entropy.py. Shapes: N tokens  H query heads  K kv heads  E head_dim.
"""

import os
import sys

assert "triton" not in sys.modules, "TRITON_INTERPRET is read when triton is imported"
os.environ["TRITON_INTERPRET"] = "1"

import random
from pathlib import Path

import pytest
import torch

from kernels import gt_score
from kernels.cross_entropy import linear_log_probs
from kernels.gt_score import Blocks, branch_attention, branch_attention_ref, plan_rows
from venus.model.weights import load_model
from venus.rl.info_gain import Cuts, score_ground_truth, score_uncached

CPU = torch.device("cpu")


@pytest.fixture(params=["pointers", "descriptors"])
def loads(request, monkeypatch):
    monkeypatch.setitem(
        gt_score.BLOCKS, "interpreter", Blocks(64, 32, 4, 1, request.param == "descriptors")
    )


def packing(trajectories):
    """Spans of trajectories given as (trunk length, cuts, branch length)."""
    spans, size = [], 0
    for trunk, cuts, length in trajectories:
        doc = size
        spans.append((doc, doc + trunk, doc, doc))
        size += trunk
        for cut in cuts:
            spans.append((size, size + length, doc, doc + cut))
            size += length
    return spans


def inputs(num_tokens, num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(num_tokens, heads, head_dim, generator=generator).to(dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    ]


def errors(spans, q, k, v):
    """(ours, torch in the same dtype): the largest errors of out and lse against fp64."""
    exact = branch_attention_ref(q.double(), k.double(), v.double(), spans)
    plain = branch_attention_ref(q, k, v, spans)
    got = branch_attention(q, k, v, plan_rows(spans, q.shape[1] // k.shape[1], CPU))
    return [
        max((x.double() - y).abs().max().item() for x, y in zip(found, exact, strict=True))
        for found in (got, plain)
    ]


TYPICAL = [(100, [17, 40, 40, 64, 100], 9), (30, [1, 30], 9), (5, [], 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 2), (4, 1), (5, 1)])
def test_no_worse_than_torch_in_the_same_dtype(loads, num_heads, num_kv_heads, dtype):
    """Three trajectories, duplicate cuts, a cut at the end; groups of 1, 2, 4 and 5 heads. Twice
    for bf16, whose rounding the interpreter truncates.
    """
    spans = packing(TYPICAL)
    ours, plain = errors(spans, *inputs(spans[-1][1], num_heads, num_kv_heads, dtype=dtype))
    assert ours <= (2 if dtype == torch.bfloat16 else 1) * plain + 2e-6


def test_real_head_shapes():
    """8 query heads on 2 kv heads of 128, tiles of 64 rows: 16 tokens."""
    spans = packing([(70, [10, 33], 20)])
    assert errors(spans, *inputs(spans[-1][1], 8, 2, 128))[0] < 5e-6


@pytest.mark.parametrize("seed", range(60))
def test_random_packings(monkeypatch, seed):
    """1-3 trajectories of up to 60 tokens, up to 5 cuts anywhere (0 and duplicates included),
    branches of 1-20 tokens, six block shapes.
    """
    choose = random.Random(seed)
    shape = choose.choice([(16, 16), (16, 32), (32, 16), (64, 16), (64, 64), (128, 32)])
    monkeypatch.setitem(gt_score.BLOCKS, "interpreter", Blocks(*shape, 4, 1, choose.random() < 0.5))
    trajectories = []
    for _ in range(choose.randint(1, 3)):
        trunk = choose.randint(1, 60)
        cuts = [choose.randint(0, trunk) for _ in range(choose.randint(0, 5))]
        trajectories.append((trunk, choose.choice([cuts, sorted(cuts)]), choose.randint(1, 20)))
    spans = packing(trajectories)
    assert (
        errors(
            spans,
            *inputs(spans[-1][1], *choose.choice([(1, 1), (2, 1), (4, 1), (4, 2)]), seed=seed),
        )[0]
        < 5e-6
    )


def test_a_tile_never_mixes_documents(monkeypatch):
    """A branch that ends where a short document starts: all rows see as much, but not the same. 60
    random packings did not notice.
    """
    monkeypatch.setitem(gt_score.BLOCKS, "interpreter", Blocks(64, 16, 4, 1, False))
    spans = [*packing([(20, [20], 3)]), (23, 28, 23, 23)]
    assert errors(spans, *inputs(28))[0] < 5e-6


def test_rows_may_come_in_chunks(loads):
    """A trunk longer than the token budget: rows 0..50, 50..51 and the rest, each over the keys so
    far, equal all at once up to the order of sums.
    """
    spans = packing(TYPICAL)
    q, k, v = inputs(spans[-1][1])
    whole = branch_attention(q, k, v, plan_rows(spans, 2, CPU))
    for first, stop in ((0, 50), (50, 51), (51, len(q))):
        part = branch_attention(
            q[first:stop],
            k[:stop],
            v[:stop],
            plan_rows(spans, 2, CPU, first_row=first, num_rows=stop - first),
        )
        torch.testing.assert_close(part, tuple(x[first:stop] for x in whole), rtol=1e-5, atol=1e-6)


def test_keys_and_values_may_lie_head_by_head(loads):
    """The layout of a KV cache, [K, T, E], with room behind the last key."""
    spans = packing(TYPICAL)
    q, k, v = inputs(spans[-1][1])
    room = [torch.full((2, len(q) + 7, 16), float("nan")) for _ in range(2)]
    for buffer, x in zip(room, (k, v), strict=True):
        buffer[:, : len(q)] = x.transpose(0, 1)
    views = [buffer[:, : len(q)].transpose(0, 1) for buffer in room]
    torch.testing.assert_close(
        branch_attention(q, *views, plan_rows(spans, 2, CPU)),
        branch_attention(q, k, v, plan_rows(spans, 2, CPU)),
        rtol=0,
        atol=0,
    )


def test_a_branch_sees_no_other_branch_and_nothing_behind_its_cut():
    """Change every key and value that a row must not see: its output keeps every bit."""
    spans = packing([(40, [11, 25], 6)])
    q, k, v = inputs(spans[-1][1])
    work = plan_rows(spans, 2, CPU)
    before = branch_attention(q, k, v, work)[0]
    hidden = torch.ones(len(q), dtype=torch.bool)
    hidden[:11] = hidden[40:46] = False
    k[hidden], v[hidden] = 1e4, -1e4
    after = branch_attention(q, k, v, work)[0]
    assert torch.equal(before[40:46], after[40:46])
    assert not torch.equal(before[46:], after[46:])


def test_key_offsets_pass_two_to_the_31(monkeypatch):
    """The last keys of this view start 2^31 elements into its buffer (4 GB of address space, 35
    pages of memory): 32-bit offsets would wrap.
    """
    monkeypatch.setitem(gt_score.BLOCKS, "interpreter", Blocks(16, 16, 4, 1, False))
    spans = packing([(30, [20], 5)])
    q, k, v = inputs(35, 1, 1, dtype=torch.bfloat16)
    far = torch.empty(34 * 2**26 + 16, dtype=torch.bfloat16).as_strided((35, 1, 16), (2**26, 16, 1))
    far.copy_(k)
    torch.testing.assert_close(
        branch_attention(q, far, v, plan_rows(spans, 1, CPU)),
        branch_attention(q, k, v, plan_rows(spans, 1, CPU)),
        rtol=0,
        atol=0,
    )


def test_what_the_kernel_could_not_read_is_an_error_beforehand():
    spans = packing([(10, [4], 2)])
    q, k, v = inputs(12)
    work = plan_rows(spans, 2, CPU)
    for change, message in [
        (lambda: branch_attention(q[:5], k, v, work), "shapes do not fit"),
        (lambda: branch_attention(q, k, v[:5], work), "shapes do not fit"),
        (lambda: branch_attention(q, k[:5], v[:5], work), "5 keys for rows up to 12"),
        (lambda: branch_attention(q, k.half(), v, work), "dtypes"),
        (lambda: branch_attention(*(x[..., :12] for x in (q, k, v)), work), "head_dim 12"),
        (lambda: plan_rows(spans, 65, CPU), "65 query heads"),
        (
            lambda: branch_attention(
                q, torch.empty(2**30 + 32).as_strided((12, 2, 16), (2**26, 16, 1)), v, work
            ),
            "spans 2.31 elements",
        ),
        (
            lambda: branch_attention(q.transpose(0, 2).contiguous().transpose(0, 2), k, v, work),
            "strides",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            change()


@pytest.mark.parametrize("max_tokens", [1000, 25])
def test_the_ground_truth_is_scored_through_both_kernels(monkeypatch, max_tokens):
    """Two items of four cuts, packed and, beyond a budget of 25 tokens, in chunks over a cache;
    every layer must have gone through the branch kernel.
    """
    model = load_model(Path(__file__).parents[1] / "golden" / "untied_tf4").requires_grad_(False)
    choose = random.Random(0)
    items = [
        Cuts([choose.randrange(64) for _ in range(30)], cuts, [1, 2, 3], [9, 8, 7])
        for cuts in ([3, 14, 14, 30], [1, 2, 29, 30])
    ]
    calls = []
    monkeypatch.setattr(
        "kernels.gt_score.branch_attention",
        lambda *args: calls.append(args[0].shape) or branch_attention(*args),
    )
    monkeypatch.setattr(
        "kernels.cross_entropy.linear_log_probs",
        lambda *args, **how: calls.append(how["kernel"]) or linear_log_probs(*args, **how),
    )
    got = score_ground_truth(model, items, max_tokens=max_tokens, kernel="triton")
    layers = model.config.num_hidden_layers
    # two items of 50 tokens in two chunks each
    assert len(calls) == (layers + 1) * (1 if max_tokens == 1000 else 4)
    assert set(calls[layers :: layers + 1]) == {"triton"}
    for values, item in zip(got, items, strict=True):
        assert values == pytest.approx(score_uncached(model, item), abs=1e-5)
