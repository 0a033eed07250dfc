"""The ground truth scored at every cut in one packed forward, against plain
forwards written out here.

Shapes: N packed tokens  T trunk tokens  V vocab.
"""

import json
from math import exp, log
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_runs
import torch

from venus.curation.formats import from_messages
from venus.files import write_jsonl
from venus.model.attention import Layout, Span
from venus.model.qwen3 import Qwen3, Qwen3Config
from venus.model.weights import load_model, save_model
from venus.rl.info_gain import (
    Cuts,
    GainRule,
    cuts_of,
    score_cached,
    score_ground_truth,
    score_turns,
    score_uncached,
)
from venus.tokenizer import ChatTokenizer
from venus.trajectory import Outcome, Trajectory, Turn

GOLDEN = Path(__file__).parents[1] / "golden"
FP32 = 1e-5  # two layers, sums of a hundred terms in another order; 2e-6 seen


@pytest.fixture(scope="module")
def model():
    """Two layers and RoPE: one layer cannot see wrong positions, a bigram sees
    neither those nor a leak.
    """
    return load_model(GOLDEN / "untied_tf4").requires_grad_(False)


def tokens(count, seed=0):
    return torch.randint(64, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def written_out(model, item):
    """v at every cut from one full forward pass and one full log-softmax each; only the rows that
    predict the answer are averaged.
    """
    values = []
    for cut in item.cuts:
        ids = [*item.ids[:cut], *item.prefix, *item.answer]
        log_softmax = model.logits(model(torch.tensor([ids]))[0]).log_softmax(-1)
        first = len(ids) - len(item.answer)
        values.append(
            sum(log_softmax[first - 1 + j, token].item() for j, token in enumerate(item.answer))
            / len(item.answer)
        )
    return values


class Lookup:
    """A stand-in for the model whose log-probs are a bigram table: row r predicts from
    its own token alone.
    """

    def __init__(self, probs_VV):
        self.lm_head = SimpleNamespace(weight=torch.zeros(1))
        self.log_probs_VV = torch.tensor(probs_VV).log()

    def token_log_probs(self, ids_BS, targets_BS, mask_BS, *, positions_BS=None, layout=None, **_):
        return torch.where(mask_BS, self.log_probs_VV[ids_BS, targets_BS], 0.0)


class Tampered:
    """The model with one fault put into every packed forward: tamper(ids, targets, mask, positions,
    layout) -> the same, changed.
    """

    def __init__(self, model, tamper):
        self.lm_head, self.model, self.tamper = model.lm_head, model, tamper

    def token_log_probs(self, ids_BS, targets_BS, mask_BS, *, positions_BS, layout, **how):
        ids, targets, mask, positions, layout = self.tamper(
            ids_BS, targets_BS, mask_BS, positions_BS, layout
        )
        return self.model.token_log_probs(
            ids, targets, mask, positions_BS=positions, layout=layout, **how
        )


# One pass against passes of their own

CASES = {
    "three cuts": Cuts(tokens(30), [4, 17, 30], tokens(5, 1), tokens(4, 2)),
    "cut at 1, a cut twice, decreasing": Cuts(
        tokens(20), [1, 9, 9, 20, 3], tokens(3, 1), tokens(2, 2)
    ),
    "empty prefix": Cuts(tokens(20), [1, 8, 8, 20], [], tokens(3, 2)),
    "answer of one token": Cuts(tokens(20), [2, 11, 20], tokens(4, 1), [7]),
    "answer of one token, empty prefix: no branch at all": Cuts(tokens(20), [1, 11, 20], [], [7]),
    "trunk goes on after the last cut": Cuts(tokens(40), [5, 6], tokens(2, 1), tokens(2, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_packed_uncached_and_cached_values_equal_written_out_forwards(model, name):
    expected = pytest.approx(written_out(model, CASES[name]), abs=FP32)
    assert score_ground_truth(model, [CASES[name]])[0] == expected
    assert score_uncached(model, CASES[name]) == expected
    assert score_cached(model, CASES[name]) == expected


def test_first_answer_token_is_predicted_by_the_trunk_row_before_the_cut():
    """Trap 8. A head that reads the row before the branch takes the last token of the branch
    before: .447214 and .223607, the gain's sign flips.
    """
    bigram = Lookup(
        [[0.1, 0.2, 0.4, 0.3], [0.4, 0.3, 0.2, 0.1], [0.05, 0.15, 0.3, 0.5], [0.7, 0.1, 0.1, 0.1]]
    )
    [(v0, v1)] = score_ground_truth(bigram, [Cuts([0, 1, 3, 0], [2, 4], [], [2, 3])])
    assert exp(v0) == pytest.approx(0.316228, abs=1e-6)
    assert exp(v1) == pytest.approx(0.447214, abs=1e-6)
    assert exp(v1) - exp(v0) == pytest.approx(0.130986, abs=1e-6)
    assert v1 - v0 == pytest.approx(0.346574, abs=1e-6) == pytest.approx(log(2) / 2, abs=1e-6)


def test_how_items_are_split_into_packs_changes_no_value(model):
    items = list(CASES.values())
    whole = score_ground_truth(model, items)
    for max_tokens in (1, 60, 120):
        for split, together in zip(
            score_ground_truth(model, items, max_tokens=max_tokens), whole, strict=True
        ):
            assert split == pytest.approx(together, abs=FP32)


def test_items_without_cuts_have_no_values_and_shift_no_others(model):
    item, empty = CASES["three cuts"], Cuts(tokens(5), [], [1], [2])
    assert score_ground_truth(model, [empty]) == [[]]
    assert score_ground_truth(model, [empty, item, empty]) == [
        [],
        pytest.approx(written_out(model, item), abs=FP32),
        [],
    ]


def test_a_change_of_the_trunk_after_a_cut_leaves_the_value_at_the_cut_exactly_as_it_was(model):
    """Exactly: the packed shapes are the same, so not even the rounding may differ."""
    item = Cuts(tokens(12), [4, 8, 12], tokens(2, 1), tokens(3, 2))
    edited = Cuts(
        [*item.ids[:9], (item.ids[9] + 1) % 64, *item.ids[10:]], item.cuts, item.prefix, item.answer
    )
    [before], [after] = score_ground_truth(model, [item]), score_ground_truth(model, [edited])
    assert after[:2] == before[:2]
    assert abs(after[2] - before[2]) > 1e-3


# Negative controls: a fault that the comparison above could not see would make it worthless. Seen,
# in nats: positions run on .10 to .44, branches see each other .70 and 1.06, the trunk's future .50
# and .89, heads a row off .33 to 1.66; where nothing may change, 3e-7.


def fault_sizes(model, item, tamper):
    [wrong] = score_ground_truth(Tampered(model, tamper), [item])
    return [abs(a - b) for a, b in zip(wrong, written_out(model, item), strict=True)]


def test_positions_that_run_on_are_visible(model):
    def run_on(ids, targets, mask, positions, layout):
        return ids, targets, mask, torch.arange(ids.shape[1])[None], layout

    assert (
        min(fault_sizes(model, Cuts(tokens(12), [4, 8, 11], tokens(2, 1), tokens(3, 2)), run_on))
        > 0.05
    )


def test_branches_that_see_each_other_are_visible_from_the_second_on(model):
    """All three cuts at the end of the trunk, so that the other branches are all that leaks;
    branch 0 cannot detect it.
    """

    def leak(ids, targets, mask, positions, layout):
        return (
            ids,
            targets,
            mask,
            positions,
            Layout(tuple(Span(start, end, doc, start) for start, end, doc, _ in layout.spans)),
        )

    sizes = fault_sizes(model, Cuts(tokens(12), [12, 12, 12], tokens(2, 1), tokens(3, 2)), leak)
    assert sizes[0] <= FP32 and min(sizes[1:]) > 0.05


def test_a_branch_that_sees_the_trunk_after_its_cut_is_visible(model):
    def future(ids, targets, mask, positions, layout):
        return (
            ids,
            targets,
            mask,
            positions,
            Layout(
                tuple(s if s.pre == s.doc else s._replace(pre=s.doc + 12) for s in layout.spans)
            ),
        )

    sizes = fault_sizes(model, Cuts(tokens(12), [4, 8, 12], tokens(2, 1), tokens(3, 2)), future)
    assert sizes[2] <= FP32 and min(sizes[:2]) > 0.05


@pytest.mark.parametrize("shift", [-1, 1])
def test_targets_read_a_row_off_are_visible(model, shift):
    class OneRowOff(Tampered):
        def token_log_probs(self, *args, **kwargs):
            return super().token_log_probs(*args, **kwargs).roll(-shift, dims=1)

    def roll(ids, targets, mask, positions, layout):
        return ids, targets.roll(shift, 1), mask.roll(shift, 1), positions, layout

    item = Cuts(tokens(12), [4, 8, 11], tokens(2, 1), tokens(3, 2))
    [wrong] = score_ground_truth(OneRowOff(model, roll), [item])
    assert min(abs(a - b) for a, b in zip(wrong, written_out(model, item), strict=True)) > 0.05


# Bad items


@pytest.mark.parametrize(
    ("cuts", "answer", "message"),
    [([0], [1], "outside 1..5"), ([6], [1], "outside 1..5"), ([2], [], "no tokens")],
)
def test_cuts_outside_the_trunk_and_empty_answers_are_refused(cuts, answer, message):
    with pytest.raises(ValueError, match=message):
        Cuts([1, 2, 3, 4, 5], cuts, [], answer)


# Trajectories

PREFIX = [50, 51, 52]
CHATS = SimpleNamespace(
    answer_prefix_ids=PREFIX, ground_truth_ids=lambda text: [ord(c) % 64 for c in text]
)
ALIASES = ("abc", "zz")


def trajectory(turns, seed=0, aliases=ALIASES):
    """A trajectory of (action, tool_status) turns of random ids: prompt 5, then 3 sampled and 4
    observed tokens a turn.
    """
    spans = [
        Turn(
            5 + 7 * k,
            8 + 7 * k,
            12 + 7 * k if k + 1 < len(turns) else 8 + 7 * k,
            action,
            status,
            None,
            format_ok=action != "malformed",
        )
        for k, (action, status) in enumerate(turns)
    ]
    ids = tokens(spans[-1].obs_end, seed)
    return Trajectory(
        run="r",
        question_id=f"q{seed}",
        sample=0,
        seed=0,
        question="?",
        ground_truth=aliases,
        prompt_len=5,
        token_ids=ids,
        log_probs=[],
        turns=spans,
        prediction=None,
        outcome=Outcome(None, "ok"),
        stop_reason="no_answer",
        seconds={"model": 0.0, "tool": 0.0},
        manifest={},
    )


MIXED = [
    ("search", "ok"),
    ("visit", "error"),
    ("visit", "ok"),
    ("malformed", None),
    ("visit", "timeout"),
    ("visit", "empty"),
    ("visit", "ok"),
]


def values_at(model, one, ends, alias):
    return written_out(model, Cuts(one.token_ids, ends, PREFIX, CHATS.ground_truth_ids(alias)))


def test_cuts_stand_after_the_prompt_and_after_the_observations_of_scored_turns():
    one = trajectory(MIXED)
    item = cuts_of(one, [True, False, True, False, False, False, False], CHATS)
    assert item.cuts == [5, 12, 26] and one.turns[2].obs_end == 26
    assert item.prefix == PREFIX and item.answer == CHATS.ground_truth_ids("abc")
    assert cuts_of(one, [False] * 7, CHATS, "zz").answer == CHATS.ground_truth_ids("zz")
    with pytest.raises(ValueError, match="trajectory q0/0: no ground truth"):
        cuts_of(trajectory(MIXED, aliases=()), [False] * 7, CHATS)


def test_visit_gains_are_differences_between_answered_visits(model):
    """Trap 15: a visit that failed or timed out brought no evidence; it is None, and the next gain
    is over the value before it.
    """
    one = trajectory(MIXED)
    score_turns(model, CHATS, [one], GainRule("visit", "log_prob", "first"))
    v = values_at(model, one, [5, 26, 47], "abc")
    expected = [None, None, v[1] - v[0], None, None, v[2] - v[1], None]
    for turn, gain in zip(one.turns, expected, strict=True):
        assert turn.info_gain == (None if gain is None else pytest.approx(gain, abs=FP32))


def test_all_scores_every_well_formed_turn_but_the_last(model):
    one = trajectory(MIXED)
    score_turns(model, CHATS, [one], GainRule("all", "log_prob", "first"))
    v = values_at(model, one, [5, 12, 19, 26, 40, 47], "abc")
    expected = [v[1] - v[0], v[2] - v[1], v[3] - v[2], None, v[4] - v[3], v[5] - v[4], None]
    for turn, gain in zip(one.turns, expected, strict=True):
        assert turn.info_gain == (None if gain is None else pytest.approx(gain, abs=FP32))


def test_gains_in_probability_are_differences_of_exp(model):
    one = trajectory(MIXED)
    score_turns(model, CHATS, [one], GainRule("visit", "prob", "first"))
    v = values_at(model, one, [5, 26, 47], "abc")
    assert one.turns[2].info_gain == pytest.approx(exp(v[1]) - exp(v[0]), abs=FP32)


def test_alias_max_takes_the_best_alias_at_every_cut(model):
    """Of 20 seeds some change the best alias between two cuts: then neither
    alias alone has the gain.
    """
    changed = 0
    for seed in range(20):
        one = trajectory([("visit", "ok"), ("answer", None)], seed)
        score_turns(model, CHATS, [one], GainRule("visit", "log_prob", "max"))
        first, second = (values_at(model, one, [5, 12], alias) for alias in ALIASES)
        best = [max(pair) for pair in zip(first, second, strict=True)]
        assert one.turns[0].info_gain == pytest.approx(best[1] - best[0], abs=FP32)
        changed += (first[0] > second[0]) != (first[1] > second[1])
    assert changed


def test_gains_go_to_their_own_trajectories_whatever_stands_between(model):
    """One without anything to score, one with another number of turns: no list is
    shifted, with any packing.
    """
    kinds = [
        MIXED,
        [("search", "ok"), ("answer", None)],
        [("visit", "ok"), ("visit", "ok"), ("answer", None)],
        [("answer", None)],
    ]
    alone = [trajectory(kind, seed) for seed, kind in enumerate(kinds)]
    rule = GainRule("visit", "log_prob", "first")
    for one in alone:
        score_turns(model, CHATS, [one], rule)
    for max_tokens in (1, 100, 10000):
        batch = [trajectory(kind, seed) for seed, kind in enumerate(kinds)]
        score_turns(model, CHATS, batch, rule, max_tokens=max_tokens)
        for one, other in zip(batch, alone, strict=True):
            gains, expected = ([turn.info_gain for turn in t.turns] for t in (one, other))
            assert [g is None for g in gains] == [g is None for g in expected]
            assert [g for g in gains if g is not None] == pytest.approx(
                [g for g in expected if g is not None], abs=FP32
            )


def test_zero_gain_is_zero_and_not_absent():
    """Trap 11: under a model that ignores its context every gain is exactly 0.0, a value like any
    other; an unscored turn is None.
    """
    one = trajectory([("search", "ok"), ("visit", "ok"), ("answer", None)])
    score_turns(Lookup([[1 / 64] * 64] * 64), CHATS, [one], GainRule("visit", "log_prob", "first"))
    assert [turn.info_gain for turn in one.turns] == [None, 0.0, None]


def test_scoring_again_under_other_rules_leaves_no_gain_of_the_first_time(model):
    one = trajectory(MIXED)
    score_turns(model, CHATS, [one], GainRule("all", "log_prob", "first"))
    score_turns(model, CHATS, [one], GainRule("none", "log_prob", "first"))
    assert [turn.info_gain for turn in one.turns] == [None] * 7


# The command line


@pytest.mark.slow
def test_score_prints_the_value_and_gain_of_every_turn_and_one_line_for_bad_input(
    tmp_path, tmp_path_factory
):
    """One process for all of it. The printed figures are those of the written-out forwards, to
    the four digits shown.
    """
    world = tiny_runs.tiny_world(tmp_path_factory)
    directory, tokenizer = world / "model", ChatTokenizer(world / "model")
    tiny = Qwen3(Qwen3Config.read(directory))
    tiny.init_weights(0)
    save_model(tiny, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    one = from_messages(
        json.loads((world / "sft" / "few.jsonl").read_text().splitlines()[0]), tokenizer
    )
    write_jsonl(tmp_path / "t.jsonl", [one.to_json()])
    write_jsonl(tmp_path / "unlabelled.jsonl", [one.to_json() | {"ground_truth": []}])
    item = Cuts(
        one.token_ids,
        [one.prompt_len, *(turn.obs_end for turn in one.turns[:-1])],
        tokenizer.answer_prefix_ids,
        tokenizer.ground_truth_ids(one.ground_truth[0]),
    )
    with torch.no_grad():
        v = written_out(tiny, item)

    def score(*words):
        return ["venus.info_gain", "score", *words, "--model", tmp_path / "model"]

    good, flag, missing, unlabelled, usage = tiny_runs.run_all(
        score(tmp_path / "t.jsonl"),
        score("--trajectories", tmp_path / "t.jsonl"),
        score(tmp_path / "none.jsonl"),
        score(tmp_path / "unlabelled.jsonl"),
        ["venus.info_gain", "show"],
    )
    assert (good["code"], good["out"]) == (0, flag["out"])
    title, question, *turns = good["out"].splitlines()
    assert one.id in title and repr(one.ground_truth[0]) in title
    assert question.split()[-1] == f"{v[0]:.4f}"
    assert [line.split()[2:7] for line in turns] == [
        [turn.action, "v", f"{v[k + 1]:.4f}", "gain", f"{v[k + 1] - v[k]:+.4f}"]
        for k, turn in enumerate(one.turns[:-1])
    ]
    for result, what in (
        (missing, "none.jsonl: no such file"),
        (unlabelled, "no ground truth"),
        (usage, "no command 'show'; choose one of score"),
    ):
        assert result["code"] == 2
        assert (
            result["err"].count("\n") == 1
            and result["err"].startswith("error: ")
            and what in result["err"]
        )
