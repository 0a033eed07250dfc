"""The figures of an evaluation, summary.json, and what may be compared with it. Verdict rows
are those of `grading`.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from venus.files import read_jsonl
from venus.grading import stats
from venus.grading.grade import FAILURES, finished, is_call
from venus.rl.rewards import format_valid_share, normalize_answer
from venus.tools.cassette import file_digest
from venus.trajectory import Question, Trajectory, Turn

# manifest fields in which compared evaluations may differ: they are what is compared
FREE = ("model", "policy")
# figures that need a ground truth
VERDICT_FIGURES = (
    *("success", "success_graded", "scores", "samples"),
    *("pass_at", "any_of_first", "majority", "leaks"),
)


# ---- figures


def summarise(
    questions: Sequence[Question],
    trajectories: Sequence[Trajectory],
    verdicts: Sequence[dict],
    *,
    seed: int,
    resamples: int,
) -> dict:
    """Return the figures of an evaluation. verdicts[i] is the row of trajectories[i]; ValueError
    when no rollout came to its end.

    An Interval is {mean, low, high, questions}: a mean over questions and its 95 % bootstrap
    interval, questions resampled. Rates are fractions of 1. Figures of verdicts are None when no
    trajectory has a ground truth.

    questions, trajectories    how many of each there are (of questions: those with a trajectory)
    graded                     trajectories with a verdict; judge_errors, cut_off, tool_error: how
                               many have none, and why; no_ground_truth: how many cannot have
                               one, and enter no figure of verdicts
    excluded                   cut_off + tool_error: rollouts that did not come to their end. They
                               are in counts, stop_reasons, seconds and, as wrong, in the figures
                               of verdicts
    success                    Interval of correct; whatever has no verdict is wrong
    success_graded             Interval of correct among those graded
    scores                     {name: Interval}: em, f1 and what the judge measured (precision,
                               recall, ..); whatever lacks the score has 0
    samples                    samples of the question that has fewest: the n of the next three
    pass_at                    {k: Interval}, unbiased; k = "1", "2", "4", .. and n
    any_of_first               {k: Interval}: one of the first k is correct. Another estimator:
                               never call it pass@k
    majority                   Interval: the most frequent answer is correct
    turns                      Interval of turns per trajectory; num_turns: in all; turn_histogram:
                               {number of turns: trajectories}
    tokens                     {"sampled", "context"}: {mean, median, most, total} over
                               trajectories; context: length at the end
    tool_use                   {"overall", "correct", "wrong"}: `stats.ToolUse`, with the browse
                               ratios by call and by item, micro and macro
    tool_status                {"search", "visit"}: {ok, empty, error, timeout, unknown: calls};
                               unknown: a converted trajectory does not say
    duplicate_calls            {calls, duplicates, share}: calls that repeat an earlier, successful
                               one of their trajectory
    format_valid_share         turns that the strict checker accepts
    reliable_share             visited URLs that the question file lists as reliable
                               (meta.reliable); None when it lists none
    stop_reasons               {stop_reason: trajectories}; seconds: {"model", "tool"}: in all
    failures                   {one of FAILURES: wrong trajectories}
    leaks                      {suspected: trajectories, strings: {string: trajectories}, success:
                               Interval without them}
    judge, prompt_hash         who graded; manifest: that of the rows; a field in which they differ
                               is {"several": its values, sorted}
    eval.py adds name (of the benchmark or question file), run (run.json) and, with --baseline,
    difference (`difference`)
    """
    ended = [t for t in trajectories if finished(t)]
    reasons = Counter(t.stop_reason for t in trajectories)
    if not ended:
        raise ValueError(
            f"all {len(trajectories)} rollouts are excluded from statistics "
            f"({dict(reasons)}): nothing to evaluate"
        )

    def interval(statistic: Callable, *values: object) -> dict:
        return asdict(statistic(*values, seed=seed, resamples=resamples))

    rows = list(zip(trajectories, verdicts, strict=True))
    statuses = Counter(t.outcome.status for t in trajectories)
    calls = [[(turn.action, num_items(turn)) for turn in t.turns if is_call(turn)] for t in ended]
    # an outage of the judge is no wrong answer
    right = [
        {"correct": True, "incorrect": False}.get(row["verdict"]) for t, row in rows if finished(t)
    ]
    turns = [turn for t in ended for turn in t.turns]
    made = [turn for turn in turns if is_call(turn)]
    duplicates = sum(turn.duplicate for turn in made)
    return {
        "questions": len({t.question_id for t in trajectories}),
        "trajectories": len(trajectories),
        "graded": sum(row["verdict"] != "error" for row in verdicts),
        "judge_errors": sum(row["failure"] == "judge_error" for row in verdicts),
        "no_ground_truth": sum(not t.ground_truth for t in trajectories),
        "cut_off": statuses["cut_off"],
        "tool_error": statuses["tool_error"],
        "excluded": len(trajectories) - len(ended),
        **_verdict_figures([(t, row) for t, row in rows if t.ground_truth], interval),
        "turns": interval(
            stats.mean_ci, [len(t.turns) for t in ended], [t.question_id for t in ended]
        ),
        "num_turns": len(turns),
        "turn_histogram": {
            str(n): count for n, count in sorted(Counter(len(t.turns) for t in ended).items())
        },
        "tokens": {
            "sampled": _spread([t.num_sampled for t in ended]),
            "context": _spread([len(t.token_ids) for t in ended]),
        },
        "tool_use": {name: asdict(use) for name, use in stats.tool_use(calls, right).items()},
        "tool_status": {
            kind: dict(
                Counter(turn.tool_status or "unknown" for turn in made if turn.action == kind)
            )
            for kind in ("search", "visit")
        },
        "duplicate_calls": {
            "calls": len(made),
            "duplicates": duplicates,
            "share": duplicates / len(made) if made else None,
        },
        "format_valid_share": format_valid_share(ended),
        "reliable_share": reliable_share(questions, ended),
        "stop_reasons": dict(reasons.most_common()),
        "seconds": {name: sum(t.seconds[name] for t in trajectories) for name in ("model", "tool")},
        "failures": {name: sum(row["failure"] == name for row in verdicts) for name in FAILURES},
        "judge": verdicts[0]["judge"],
        "prompt_hash": verdicts[0]["prompt_hash"],
        "manifest": shared_manifest(verdicts),
    }


def _verdict_figures(rows: list[tuple[Trajectory, dict]], interval: Callable) -> dict:
    """The VERDICT_FIGURES of summarise, each None without a row. interval: of a statistic and its
    values.
    """
    if not rows:
        return dict.fromkeys(VERDICT_FIGURES)
    ids = [t.question_id for t, _ in rows]
    correct = [row["verdict"] == "correct" for _, row in rows]
    scores = [row["scores"] for _, row in rows]
    graded = [n for n, (_, row) in enumerate(rows) if row["verdict"] != "error"]
    clean = [n for n, (_, row) in enumerate(rows) if not row["leaks"]]
    leaked = Counter(string for _, row in rows for string in row["leaks"])
    samples = min(Counter(ids).values())
    ks = stats.pass_ks(samples)

    def success(among: Sequence[int]) -> dict | None:
        values = [correct[n] for n in among]
        return interval(stats.mean_ci, values, [ids[n] for n in among]) if among else None

    return {
        "success": success(range(len(rows))),
        "success_graded": success(graded),
        "scores": {
            name: interval(stats.mean_ci, [row_scores.get(name, 0.0) for row_scores in scores], ids)
            for name in dict.fromkeys(name for row_scores in scores for name in row_scores)
        },
        "samples": samples,
        "pass_at": {str(k): interval(stats.mean_pass_at_k, correct, ids, k) for k in ks},
        "any_of_first": {str(k): interval(stats.any_of_first_k, correct, ids, k) for k in ks},
        "majority": interval(stats.majority_vote, [_vote(t) for t, _ in rows], correct, ids),
        "leaks": {
            "suspected": len(rows) - len(clean),
            "strings": dict(leaked.most_common()),
            "success": success(clean),
        },
    }


def _vote(trajectory: Trajectory) -> str | None:
    """The answer in a normal form; None where there is none, or the rollout did not end."""
    if not trajectory.prediction or not finished(trajectory):
        return None
    return normalize_answer(trajectory.prediction) or trajectory.prediction.strip()


def num_items(turn: Turn) -> int:
    """Queries or URLs of one call."""
    return len((turn.arguments or {}).get("query" if turn.action == "search" else "url", []))


def _spread(values: Sequence[int]) -> dict:
    ordered = sorted(values)
    return {
        "mean": sum(values) / len(values),
        "median": ordered[len(ordered) // 2],
        "most": ordered[-1],
        "total": sum(values),
    }


def reliable_share(
    questions: Sequence[Question], trajectories: Sequence[Trajectory]
) -> float | None:
    """Share of visited URLs that the question file lists as reliable (meta.reliable); None when it
    lists none or nothing was visited.
    """
    reliable = {
        question.id: set(question.meta["reliable"])
        for question in questions
        if "reliable" in question.meta
    }
    visited = [
        url in reliable[t.question_id]
        for t in trajectories
        if t.question_id in reliable
        for turn in t.turns
        if turn.action == "visit" and is_call(turn)
        for url in turn.arguments["url"]
    ]
    return sum(visited) / len(visited) if visited else None


# ---- comparison


def questions_manifest(questions: Sequence[Question]) -> dict:
    """Return hashes of what was asked, and of the pages it was asked over (None: no corpus, or it
    is no longer there).
    """
    asked = json.dumps(
        sorted([question.id, question.question, *question.ground_truth] for question in questions)
    )
    pages = sorted(
        file_digest(path)
        for path in {question.corpus for question in questions}
        if path and Path(path).exists()
    )
    return {"questions": _short(asked), "corpus": _short("".join(pages)) if pages else None}


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def unlike(first: dict, second: dict, free: Sequence[str] = FREE) -> list[str]:
    """Return the fields in which two manifests differ or that one of them lacks,
    but for the free ones.
    """
    return sorted(
        field
        for field in (first.keys() | second.keys()) - set(free)
        if first.get(field, ...) != second.get(field, ...)
    )


def check_alike(manifests: Sequence[tuple[str, dict]], free: Sequence[str] = FREE) -> None:
    """ValueError when a manifest of the (name, manifest) pairs is unlike the first: numbers made
    under them do not compare. It names the fields.
    """
    name, first = manifests[0]
    for other, manifest in manifests[1:]:
        if fields := unlike(first, manifest, free):
            sides = "; ".join(
                f"{field} {first.get(field, 'absent')!r} and {manifest.get(field, 'absent')!r}"
                for field in fields
            )
            raise ValueError(
                f"{name} and {other} were not made alike: {sides}. Their numbers do not "
                "compare; --allow-unlike does so all the same"
            )


def shared_manifest(rows: Sequence[dict]) -> dict:
    """Return the manifest of verdict rows; a field whose values differ among them is {"several":
    its values, sorted}.
    """
    values = {
        name: [row["manifest"].get(name) for row in rows]
        for name in dict.fromkeys(name for row in rows for name in row["manifest"])
    }
    return {
        name: {"several": sorted({repr(value) for value in seen})}
        if any(value != seen[0] for value in seen)
        else seen[0]
        for name, seen in values.items()
    }


def read_verdicts(directory: str | os.PathLike) -> list[dict]:
    """Read the verdicts.jsonl of an evaluation. ValueError for a file that is missing,
    empty or something else.
    """
    path = Path(directory) / "verdicts.jsonl"
    rows = dict(read_jsonl(path))
    for where, row in rows.items():
        if not {"question_id", "verdict", "failure", "manifest"} <= set(row):
            raise ValueError(
                f"{where}: not a verdict: question_id, verdict, failure or manifest is missing"
            )
    if not rows:
        raise ValueError(f"{path}: no verdicts in the file")
    return list(rows.values())


def check_same_questions(here: set[str], there: set[str], name: str) -> None:
    """ValueError when the questions with a ground truth here are not those of the baseline
    `name`, or there are none.
    """
    if not here | there:
        raise ValueError(
            f"{name}: no question has a ground truth, so there is no difference to speak of"
        )
    if here != there:
        raise ValueError(
            f"{name}: evaluated other questions, {min(here ^ there)!r} is on one side only; "
            "a paired difference needs the same"
        )


def has_truth(row: dict) -> bool:
    """Whether a verdict row had a ground truth to be held against."""
    return row["failure"] is not None or row["verdict"] == "correct"


def difference(
    verdicts: Sequence[dict], baseline: Sequence[dict], name: str, *, seed: int, resamples: int
) -> dict:
    """Return success here minus success in the baseline, paired by question: {baseline, mean, low,
    high, questions, graded, gained, lost}.

    As in `success`, what has no verdict is wrong; graded is the Interval over what has one on both
    sides (None: no question has), gained and lost list the ids of questions whose success rose or
    fell. Rows without ground truth are left out. ValueError when the sides asked different
    questions.
    """
    here, there = (list(filter(has_truth, rows)) for rows in (verdicts, baseline))
    check_same_questions(_ids(here), _ids(there), name)
    graded = [[row for row in rows if row["verdict"] != "error"] for rows in (here, there)]
    common = _ids(graded[0]) & _ids(graded[1])
    graded = [[row for row in rows if row["question_id"] in common] for rows in graded]

    def interval(rows: list[dict], others: list[dict]) -> dict:
        values, questions = _correct(others)
        return asdict(
            stats.paired_difference_ci(
                *_correct(rows),
                baseline_values=values,
                baseline_questions=questions,
                seed=seed,
                resamples=resamples,
            )
        )

    rates, before = (stats.question_means(*_correct(rows)) for rows in (here, there))
    return {
        "baseline": name,
        **interval(here, there),
        "graded": interval(*graded) if common else None,
        "gained": [question for question in rates if rates[question] > before[question]],
        "lost": [question for question in rates if rates[question] < before[question]],
    }


def _ids(rows: Sequence[dict]) -> set[str]:
    return {row["question_id"] for row in rows}


def _correct(rows: Sequence[dict]) -> tuple[list[bool], list[str]]:
    """Whether each row is correct, and its question."""
    return [row["verdict"] == "correct" for row in rows], [row["question_id"] for row in rows]
