"""Evaluation statistics on plain lists: bootstrap intervals clustered by question, pass@k, majority
vote, paired differences, tool use.

Samples of one question are not independent, so the question is what is resampled: every function
takes `questions`, the question id of each value, and reports the mean over questions of the
question's mean. With equally many samples per question that is the plain mean (avg@n); with unequal
numbers (excluded samples) no question counts more than another, and pass@1 equals the success rate.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import comb, fsum, isfinite

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
CHUNK = 1 << 20  # drawn indices held at once


@dataclass(frozen=True)
class Interval:
    """A mean over `questions` questions and its percentile-bootstrap interval; width 0: no spread
    was seen (as with one question).
    """

    mean: float
    low: float
    high: float
    questions: int


def mean_ci(
    values: Sequence[float],
    questions: Sequence[Hashable],
    *,
    seed: int,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
) -> Interval:
    """Return the mean of `values` over questions with its bootstrap interval, questions
    drawn with replacement.

    values[i] belongs to question questions[i]; their order does not matter. ValueError for no or
    non-finite values or unequal lengths.
    """
    return _bootstrap(list(question_means(values, questions).values()), seed, resamples, level)


def paired_difference_ci(
    values: Sequence[float],
    questions: Sequence[Hashable],
    *,
    baseline_values: Sequence[float],
    baseline_questions: Sequence[Hashable],
    seed: int,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return mean(values) - mean(baseline_values) over questions; each question's difference
    is drawn as one unit.

    Pairing removes what both share, a question's difficulty. The numbers of samples may differ; the
    questions may not: ValueError names one that is missing on either side.
    """
    first = question_means(values, questions)
    second = question_means(baseline_values, baseline_questions)
    unpaired = set(first) ^ set(second)
    if unpaired:
        raise ValueError(
            f"{len(unpaired)} questions are on one side only, {min(unpaired, key=str)!r} "
            "among them; drop them before pairing"
        )
    return _bootstrap([first[question] - second[question] for question in first], seed, resamples)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k), the unbiased estimate from n samples, c correct, that one
    of k is (Chen et al. 2021, Eq. 1).

    n 4, c 1, k 2 -> 1 - 3/6 = .5. ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(
            f"pass@{k} of {num_samples} samples with {num_correct} correct: need 1 <= k <= "
            "samples and correct <= samples"
        )
    subsets = comb(num_samples, k)
    # integers, rounded once: k = 1 is c / n to the last bit
    return (subsets - comb(num_samples - num_correct, k)) / subsets


def mean_pass_at_k(
    correct: Sequence[bool],
    questions: Sequence[Hashable],
    k: int,
    *,
    seed: int,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return the mean over questions of the unbiased pass@k, with its interval.

    correct[i]: 0 or 1. ValueError when a question has fewer than k samples.
    """
    return _bootstrap(
        [pass_at_k(len(values), int(sum(values)), k) for values in _samples(correct, questions, k)],
        seed,
        resamples,
    )


def any_of_first_k(
    correct: Sequence[bool],
    questions: Sequence[Hashable],
    k: int,
    *,
    seed: int,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return the share of questions of which one of the first k samples is right, in the order
    given, with its interval.

    What many papers report as pass@k. Its mean is that of pass@k when all n samples are used (k =
    n); for k < n it wastes the others and is noisier. [0, 1, 0] at k = 1 gives 0, pass@1 1/3.
    ValueError as `mean_pass_at_k`.
    """
    return _bootstrap(
        [float(any(values[:k])) for values in _samples(correct, questions, k)], seed, resamples
    )


def pass_ks(num_samples: int) -> list[int]:
    """Return the k of a pass@k curve: 1, 2, 4, .. below n, and n: 6 -> [1, 2, 4, 6]."""
    return sorted(
        {1 << k for k in range(num_samples.bit_length()) if 1 << k < num_samples} | {num_samples}
    )


def majority_vote(
    answers: Sequence[str | None],
    correct: Sequence[bool],
    questions: Sequence[Hashable],
    *,
    seed: int,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return the share of questions whose most frequent answer is right, with its interval.

    answers[i]: the answer in a normal form, so that equal ones are one candidate; None abstains,
    and a question without an answer is wrong. Ties are broken by a draw of their own (seed and the
    question's place in sorted order). A candidate is as right as its first sample: a judge may have
    said otherwise of a later one.
    """
    if len(answers) != len(correct):
        raise ValueError(f"{len(correct)} verdicts for {len(answers)} answers")
    by_question = _by_question(range(len(answers)), questions)
    votes = []
    for number, rows in enumerate(by_question.values()):
        counts = Counter(answers[row] for row in rows if answers[row] is not None)
        tied = sorted(answer for answer, count in counts.items() if count == max(counts.values()))
        winner = tied[np.random.default_rng([seed, number]).integers(len(tied))] if tied else None
        votes.append(
            float(
                winner is not None and next(correct[row] for row in rows if answers[row] == winner)
            )
        )
    return _bootstrap(votes, seed, resamples)


@dataclass(frozen=True)
class ToolUse:
    """Tool calls of a set of trajectories. browse = visits / (searches + visits), None
    where nothing was called.
    """

    trajectories: int
    without_calls: int  # left out of browse_macro
    searches: int
    visits: int
    browse: float | None  # of all calls together
    browse_macro: float | None  # mean of the trajectories' own ratios
    queries: int  # of all searches together; a call may hold several
    urls: int
    # as browse and browse_macro, counting queries and URLs instead of calls
    browse_items: float | None
    browse_items_macro: float | None


def tool_use(
    calls: Sequence[Sequence[tuple[str, int]]], correct: Sequence[bool | None]
) -> dict[str, ToolUse]:
    """Return the tool use "overall", on "correct" and on "wrong" trajectories.

    calls[i]: (action, number of queries or URLs) of each turn of trajectory i; actions other than
    search and visit are passed over. correct[i]: its verdict; None (no verdict) counts overall
    only.
    """
    if len(calls) != len(correct):
        raise ValueError(f"{len(correct)} verdicts for {len(calls)} trajectories")
    judged = {
        right: [turns for turns, verdict in zip(calls, correct, strict=True) if verdict == right]
        for right in (True, False)
    }
    return {
        "overall": _tool_use(calls),
        "correct": _tool_use(judged[True]),
        "wrong": _tool_use(judged[False]),
    }


def _tool_use(calls: Sequence[Sequence[tuple[str, int]]]) -> ToolUse:
    ones = [
        [(action, 1) for action, _ in turns if action in ("search", "visit")] for turns in calls
    ]
    return ToolUse(len(calls), ones.count([]), *_ratios(ones), *_ratios(calls))


def _ratios(
    calls: Sequence[Sequence[tuple[str, int]]],
) -> tuple[int, int, float | None, float | None]:
    """Return what all trajectories searched and visited, the share of visits in their sum, and the
    mean of the trajectories' own shares.
    """
    counts = [
        [sum(n for action, n in turns if action == kind) for kind in ("search", "visit")]
        for turns in calls
    ]
    searches, visits = (sum(count[k] for count in counts) for k in (0, 1))
    shares = [visit / (search + visit) for search, visit in counts if search + visit]
    return (
        searches,
        visits,
        visits / (searches + visits) if shares else None,
        fsum(shares) / len(shares) if shares else None,
    )


def _by_question(
    values: Sequence[float], questions: Sequence[Hashable]
) -> dict[Hashable, list[float]]:
    """Group values by question, in sorted order of the questions, so that a seed gives one interval
    whatever the order of the rows.
    """
    if not values or len(values) != len(questions) or not all(isfinite(value) for value in values):
        raise ValueError(
            f"{len(values)} values for {len(questions)} question ids: need equally many, at "
            "least one, all finite"
        )
    groups: dict[Hashable, list[float]] = {question: [] for question in sorted(set(questions))}
    for value, question in zip(values, questions, strict=True):
        groups[question].append(value)
    return groups


def _samples(correct: Sequence[bool], questions: Sequence[Hashable], k: int) -> list[list[bool]]:
    """Group verdicts by question; ValueError for one with fewer than k samples, or
    with partial credit.
    """
    by_question = _by_question(correct, questions)
    for question, values in by_question.items():
        if not set(values) <= {0, 1} or len(values) < k:
            raise ValueError(
                f"pass@{k}: question {question!r} has {len(values)} samples {values[:8]}; "
                "need at least k, each 0 or 1"
            )
    return list(by_question.values())


def question_means(values: Sequence[float], questions: Sequence[Hashable]) -> dict[Hashable, float]:
    """Return each question's mean, in sorted order of the questions. ValueError as `mean_ci`."""
    return {
        question: fsum(group) / len(group)
        for question, group in _by_question(values, questions).items()
    }


def _bootstrap(
    per_question: list[float], seed: int, resamples: int, level: float = LEVEL
) -> Interval:
    """Resample one number per question; the interval is [(1 - level) / 2, (1 + level) / 2] of
    the resampled means.
    """
    if resamples < 1 or not 0 < level < 1:
        raise ValueError(
            f"{resamples} resamples at level {level}: need at least one, and a level between "
            "0 and 1"
        )
    rng = np.random.default_rng(seed)
    numbers = np.array(per_question, dtype=np.float64)
    means = []
    rows = max(1, CHUNK // len(numbers))
    for start in range(0, resamples, rows):
        drawn = rng.integers(len(numbers), size=(min(rows, resamples - start), len(numbers)))
        means.append(numbers[drawn].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return Interval(
        fsum(per_question) / len(per_question), float(low), float(high), len(per_question)
    )
