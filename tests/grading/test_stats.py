"""Evaluation statistics against hand-computed values; intervals against known quantiles and
against their own coverage.
"""

import numpy as np
import pytest

from venus.grading.stats import (
    Interval,
    ToolUse,
    any_of_first_k,
    majority_vote,
    mean_ci,
    mean_pass_at_k,
    paired_difference_ci,
    pass_at_k,
    pass_ks,
    tool_use,
)

# ---- mean and interval


def test_mean_is_over_questions():
    """Question a lost two of its samples: (1 + (1 + 0 + 0) / 3) / 2, so that an exclusion does not
    change a question's weight.
    """
    assert mean_ci([1, 1, 0, 0], ["a", "b", "b", "b"], seed=0).mean == pytest.approx(
        2 / 3, abs=1e-12
    )


def test_two_questions_give_the_binomial_interval():
    """Means of two draws from {0, 1} are 0, .5, 1 with chances 1/4, 1/2, 1/4: the 95 % interval is
    [0, 1], the 40 % one [.5, .5].
    """
    values, questions = [0, 1], ["a", "b"]
    assert mean_ci(values, questions, seed=0) == Interval(0.5, 0.0, 1.0, 2)
    assert mean_ci(values, questions, seed=0, level=0.4) == Interval(0.5, 0.5, 0.5, 2)


def test_interval_has_the_width_of_the_normal_one_for_many_questions():
    """400 questions, half right: 1.96 sqrt(.25 / 400) = .0490 each way. Tolerance .0025: a grid of
    1/400, and noise of the quantile.
    """
    interval = mean_ci([i % 2 for i in range(400)], range(400), seed=1)
    assert [interval.mean, interval.low, interval.high] == pytest.approx(
        [0.5, 0.451, 0.549], abs=2.5e-3
    )


def test_rows_in_any_order_give_one_interval():
    values, questions = [n**0.5 for n in range(20)], [*"hgfedcbahgfedcbahgfe"]
    assert mean_ci(values[::-1], questions[::-1], seed=3) == mean_ci(values, questions, seed=3)


def test_samples_of_one_question_are_not_independent():
    """Each question eight times over is no new information: the interval does
    not shrink by sqrt(8).
    """
    once = mean_ci([i % 2 for i in range(40)], range(40), seed=0)
    assert mean_ci([i // 8 % 2 for i in range(320)], [i // 8 for i in range(320)], seed=0) == once


def test_interval_covers_the_truth_as_often_as_it_says():
    """300 worlds of 60 questions x 4 samples with a chance of their own, true mean .5.

    By question: 95 % nominal; 300 trials have a standard error of 1.3 points, 60 questions cost the
    percentile bootstrap about one. Taking the samples as independent covers far less: that is the
    mistake the clustering avoids.
    """
    rng = np.random.default_rng(0)
    by_question = by_sample = 0
    for world in range(300):
        chance = rng.beta(0.5, 0.5, size=60)
        values = (rng.random((60, 4)) < chance[:, None]).astype(float).ravel().tolist()
        interval = mean_ci(values, [i // 4 for i in range(240)], seed=world, resamples=500)
        by_question += interval.low <= 0.5 <= interval.high
        interval = mean_ci(values, range(240), seed=world, resamples=500)
        by_sample += interval.low <= 0.5 <= interval.high
    assert 0.91 <= by_question / 300 <= 0.98
    assert by_sample / 300 < 0.85


WORLDS, QUESTIONS = 200, 40
# 95 % in 200 trials has a standard error of 1.5 points; 40 questions cost the percentile
# bootstrap one or two
NOMINAL = (0.90, 0.985)


def chances(rng):
    """Each question's own chance of success, most of them near 0 or 1."""
    return rng.beta(0.5, 0.5, size=(WORLDS, QUESTIONS))


def samples_of(rng, chance, n):
    return (
        (rng.random((*chance.shape, n)) < chance[..., None])
        .astype(int)
        .reshape(len(chance), -1)
        .tolist()
    )


def covered(intervals, truth):
    return np.mean([interval.low <= truth <= interval.high for interval in intervals])


def test_pass_at_k_interval_covers_the_truth_as_often_as_it_says():
    """4 samples, k 2: truth 1 - E(1 - p)^2 = 1 - 3/8 for p of Beta(1/2, 1/2)."""
    rng = np.random.default_rng(1)
    ids = np.repeat(np.arange(QUESTIONS), 4).tolist()
    intervals = [
        mean_pass_at_k(row, ids, 2, seed=k, resamples=400)
        for k, row in enumerate(samples_of(rng, chances(rng), 4))
    ]
    assert NOMINAL[0] <= covered(intervals, 5 / 8) <= NOMINAL[1]


def test_paired_interval_covers_the_truth_and_is_narrower_than_an_unpaired_one():
    """The second model succeeds where the first does and in .3 of the rest: truth .3 (1 - 1/2).
    Both answer the same questions, 3 and 5 times.
    """
    rng = np.random.default_rng(2)
    first = chances(rng)
    here, there = samples_of(rng, first + 0.3 * (1 - first), 5), samples_of(rng, first, 3)
    ids, other_ids = (np.repeat(np.arange(QUESTIONS), n).tolist() for n in (5, 3))
    paired = [
        paired_difference_ci(
            a, ids, baseline_values=b, baseline_questions=other_ids, seed=k, resamples=400
        )
        for k, (a, b) in enumerate(zip(here, there, strict=True))
    ]
    assert NOMINAL[0] <= covered(paired, 0.15) <= NOMINAL[1]
    alone = [
        [mean_ci(row, which, seed=k, resamples=400) for k, row in enumerate(rows)]
        for rows, which in ((here, ids), (there, other_ids))
    ]
    widths = [
        np.mean([interval.high - interval.low for interval in intervals])
        for intervals in (paired, *alone)
    ]
    assert widths[0] < 0.6 * np.hypot(*widths[1:])  # of two samples that have nothing in common


def test_many_resamples_are_drawn_in_chunks_from_one_stream(monkeypatch):
    """The memory bound must not change a number."""
    whole = mean_ci([0, 1, 1, 0, 1], range(5), seed=0)
    monkeypatch.setattr("venus.grading.stats.CHUNK", 64)
    assert mean_ci([0, 1, 1, 0, 1], range(5), seed=0) == whole


@pytest.mark.parametrize(
    ("values", "questions"), [([], []), ([1.0], ["a", "b"]), ([float("nan")], ["a"])]
)
def test_values_that_make_no_mean_are_refused(values, questions):
    with pytest.raises(ValueError, match="need equally many, at least one, all finite"):
        mean_ci(values, questions, seed=0)


# ---- pass@k


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),
        (4, 2, 2, 5 / 6),
        (4, 0, 4, 0.0),
        (4, 1, 4, 1.0),
        (4, 3, 2, 1.0),
        (10, 3, 5, 1 - 21 / 252),
    ],
)
def test_unbiased_pass_at_k(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_mean_over_all_subsets():
    """Any-of-the-first-k depends on the order of the samples; over all orders it
    averages to the estimator.
    """
    rng = np.random.default_rng(0)
    correct = np.array([1, 1, 0, 0, 0, 0, 0])
    first_three = [rng.permutation(correct)[:3].any() for _ in range(20_000)]
    # standard error .0032
    assert np.mean(first_three) == pytest.approx(pass_at_k(7, 2, 3), abs=0.015)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_without_enough_samples_is_refused(n, c, k):
    with pytest.raises(ValueError, match="need 1 <= k <= samples"):
        pass_at_k(n, c, k)


def test_mean_pass_at_k_averages_questions():
    correct, questions = [1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0], [*"aaaa", *"bbbb", *"cccc"]
    assert mean_pass_at_k(correct, questions, 2, seed=0).mean == pytest.approx(
        (0.5 + 0 + 5 / 6) / 3, abs=1e-12
    )


def test_pass_at_one_is_the_success_rate():
    correct, questions = [1, 0, 0, 1, 1], [*"aaabb"]
    assert mean_pass_at_k(correct, questions, 1, seed=5) == mean_ci(correct, questions, seed=5)


def test_question_with_too_few_samples_is_named():
    with pytest.raises(ValueError, match="pass@3: question 'b' has 2 samples"):
        mean_pass_at_k([1, 1, 0, 1, 0], [*"aaabb"], 3, seed=0)


def test_partial_credit_has_no_pass_at_k():
    with pytest.raises(
        ValueError, match=r"question 'b' has 2 samples \[0.5, 1\]; need at least k, each 0 or 1"
    ):
        mean_pass_at_k([1, 0, 0.5, 1], [*"aabb"], 2, seed=0)


@pytest.mark.parametrize(
    ("n", "ks"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (4, [1, 2, 4]),
        (6, [1, 2, 4, 6]),
        (16, [1, 2, 4, 8, 16]),
    ],
)
def test_a_pass_at_k_curve_doubles_k_and_ends_at_n(n, ks):
    assert pass_ks(n) == ks


def test_any_of_first_k_looks_at_the_first_k_only():
    """a: 0 1 0, b: 0 0 1, c: 1 0 0, d: none. Any of the first 2: a and c; pass@2 sees that a, b
    and c are equally good.
    """
    correct, questions = [0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0], [*"aaabbbcccddd"]
    assert [any_of_first_k(correct, questions, k, seed=0).mean for k in (1, 2, 3)] == [
        0.25,
        0.5,
        0.75,
    ]
    assert mean_pass_at_k(correct, questions, 2, seed=0).mean == pytest.approx(3 * (2 / 3) / 4)
    with pytest.raises(ValueError, match="pass@4: question 'a' has 3 samples"):
        any_of_first_k(correct, questions, 4, seed=0)


# ---- majority vote


def vote(answers, correct, questions=None, seed=0):
    return majority_vote(answers, correct, questions or ["q"] * len(answers), seed=seed).mean


def test_the_most_frequent_answer_is_graded():
    """Two of four say `x`, which is wrong; pass@1 would be 1/4, any of them 1."""
    assert vote(["x", "y", "x", "z"], [0, 1, 0, 0]) == 0.0
    assert vote(["x", "y", "y", "z"], [0, 1, 1, 0]) == 1.0


def test_no_answer_abstains_and_a_question_without_answers_is_wrong():
    assert vote([None, None, None, "y"], [0, 0, 0, 1]) == 1.0
    assert vote([None, None], [0, 0]) == 0.0


def test_a_candidate_is_as_right_as_its_first_sample():
    """A judge that contradicts itself on one answer must not make it half right."""
    assert vote(["y", "y", "x"], [1, 0, 0]) == 1.0
    assert vote(["y", "y", "x"], [0, 1, 1]) == 0.0


def test_ties_are_broken_by_the_seed_alike_in_any_order_and_both_ways():
    """Two candidates a question, one right: over 400 questions about half are won;
    standard error .025.
    """
    answers, correct, questions = ["x", "y"] * 400, [0, 1] * 400, [k // 2 for k in range(800)]
    won = vote(answers, correct, questions)
    assert won == vote(answers[::-1], correct[::-1], questions[::-1])
    assert won == pytest.approx(0.5, abs=0.1)
    assert won != vote(answers, correct, questions, seed=1)


# ---- paired difference


def test_paired_difference_of_equal_gains_has_no_width():
    """Each question gains exactly .5, however far the questions lie apart: unpaired
    intervals would overlap.
    """
    result = paired_difference_ci(
        [0.5, 1.0], ["a", "b"], baseline_values=[0.5, 0.0], baseline_questions=["b", "a"], seed=0
    )
    assert result == Interval(0.5, 0.5, 0.5, 2)


def test_paired_difference_by_hand():
    """Differences a: 1 - .5, b: 0 - .5, c: 1 - 0 -> mean 1/3; three draws lie between all b (-.5)
    and all c (1), 1/27 each > 2.5 %.
    """
    result = paired_difference_ci(
        [1, 1, 0, 0, 1, 1],
        [*"aabbcc"],
        baseline_values=[1, 0, 0, 1, 0, 0],
        baseline_questions=[*"aabbcc"],
        seed=0,
    )
    assert result == Interval(pytest.approx(1 / 3, abs=1e-12), -0.5, 1.0, 3)


def test_swapping_the_sides_mirrors_the_mean():
    first, second = ([0.2, 0.9, 0.4], [*"abc"]), ([0.1, 0.3, 0.8], [*"abc"])
    forward = paired_difference_ci(
        *first, baseline_values=second[0], baseline_questions=second[1], seed=0
    )
    backward = paired_difference_ci(
        *second, baseline_values=first[0], baseline_questions=first[1], seed=0
    )
    assert forward.mean == -backward.mean


def test_question_on_one_side_only_is_named():
    with pytest.raises(ValueError, match="1 questions are on one side only, 'b' among them"):
        paired_difference_ci(
            [1, 0], ["a", "b"], baseline_values=[1], baseline_questions=["a"], seed=0
        )


# ---- tool use


def calls(searches, visits):
    return (
        [("search", 1)] * searches + [("malformed", 0)] + [("visit", 1)] * visits + [("answer", 0)]
    )


def test_browse_ratio_of_the_ten_published_rl_rollouts():
    """Their call counts; ratio of sums .140 (95 of 681 calls), mean of ratios .151."""
    searches, visits = [44, 42, 45, 65, 45, 34, 68, 65, 81, 97], [8, 10, 7, 16, 10, 12, 13, 7, 7, 5]
    result = tool_use([calls(s, v) for s, v in zip(searches, visits, strict=True)], [None] * 10)[
        "overall"
    ]
    assert [result.searches, result.visits] == [586, 95]
    assert result.browse == pytest.approx(95 / 681, abs=1e-12)
    assert result.browse_macro == pytest.approx(0.151, abs=5e-4)


def test_browse_ratio_by_verdict():
    """A trajectory without a verdict counts overall only; it is not wrong."""
    result = tool_use([calls(1, 1), calls(3, 1), calls(0, 4)], [True, False, None])
    assert {name: use.browse for name, use in result.items()} == {
        "overall": 6 / 10,
        "correct": 1 / 2,
        "wrong": 1 / 4,
    }


def test_trajectory_without_calls_is_counted_and_has_no_ratio():
    result = tool_use([calls(0, 0), calls(1, 1)], [True, True])
    assert (result["correct"].without_calls, result["correct"].browse_macro) == (1, 0.5)


def test_no_calls_at_all_have_no_ratio():
    nothing = {
        "searches": 0,
        "visits": 0,
        "browse": None,
        "browse_macro": None,
        "queries": 0,
        "urls": 0,
        "browse_items": None,
        "browse_items_macro": None,
    }
    assert tool_use([calls(0, 0)], [False])["wrong"] == ToolUse(1, 1, **nothing)
    assert tool_use([calls(0, 0)], [False])["correct"] == ToolUse(0, 0, **nothing)


def test_items_of_batched_calls_are_counted_apart():
    """One search with three queries and one visit: half of the calls are visits, a quarter of the
    items. Then two single calls, all visits.
    """
    first, second = [("search", 3), ("visit", 1)], [("visit", 1), ("visit", 1)]
    result = tool_use([first], [None])["overall"]
    assert (result.browse, result.browse_items, result.queries, result.urls) == (0.5, 0.25, 3, 1)
    result = tool_use([first, second], [None, None])["overall"]
    assert (result.browse, result.browse_macro) == (3 / 4, (1 / 2 + 1) / 2)
    assert (result.browse_items, result.browse_items_macro) == (3 / 6, (1 / 4 + 1) / 2)


def test_verdicts_must_match_trajectories():
    with pytest.raises(ValueError, match="1 verdicts for 2 trajectories"):
        tool_use([calls(1, 1), calls(1, 1)], [True])
