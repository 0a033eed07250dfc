"""What each trajectory is given: its verdict, why it failed, what looks leaked. The
rows of verdicts.jsonl.

A verdict row is {run, question_id, sample, verdict, extracted, raw, error, scores, judge,
prompt_hash, failure, leaks, manifest}: verdict is correct | incorrect | error; scores holds em, f1
and what else the judge measured; failure is one of FAILURES, None when correct or without ground
truth; leaks lists the strings of the leak guard that the tools showed to the agent (empty: none).
"""

import re
from collections.abc import Sequence

from venus.grading.judge import Case, Judge
from venus.grading.verdicts import Verdict
from venus.protocol import IM_END
from venus.rl.rewards import answer_seen, exact_match, f1_score
from venus.tokenizer import ChatTokenizer
from venus.trajectory import Trajectory, Turn

# Of a wrong trajectory, in order of precedence: the first that applies (`failure_of`).
FAILURES = (
    "infrastructure",
    "judge_error",
    "loop",
    "truncated",
    "format",
    "evidence_not_seen",
    "evidence_seen",
)
TRUNCATED = ("turn_limit", "context_limit", "token_limit", "time_limit", "straggler")
ADDRESS = re.compile(r"""https?://[^\s"'<>\\]+""")
# a loop: so many calls made before, or the last TAIL characters of a turn more than so often in it
MIN_DUPLICATES, MAX_REPEATS = 3, 5
TAIL = 50


def finished(trajectory: Trajectory) -> bool:
    """Whether the rollout came to its end: no service was down, no clock cut it off. What a
    judge said is no matter.
    """
    return trajectory.outcome.status in ("ok", "judge_error")


def is_call(turn: Turn) -> bool:
    """Whether a tool was asked: a call in the answering turn is not executed. In converted
    trajectories most statuses are unknown.
    """
    return turn.action in ("search", "visit") and (
        turn.tool_status is not None or turn.obs_end > turn.end
    )


def observations(trajectory: Trajectory, tokenizer: ChatTokenizer) -> str:
    """Return all that the agent was told after its turns, decoded."""
    return "\n".join(
        tokenizer.decode(trajectory.token_ids[turn.end : turn.obs_end]) for turn in trajectory.turns
    )


def failure_of(
    trajectory: Trajectory, verdict: str, text: str, tokenizer: ChatTokenizer
) -> str | None:
    """Return why a trajectory is wrong, one of FAILURES; None when it is correct or has no ground
    truth. text: its `observations`.

    infrastructure     a tool service or the model's endpoint was down, or none of its searches, or
                       of its visits, was answered
    judge_error        it ended and the judge gave no verdict
    loop               half of its calls or more (at least 3) repeat an earlier one, or the last
                       turn repeats its end more than 5 times
    truncated          a limit of turns, context, tokens or time cut it short: stop_reason, with the
                       forced answer that it may have given
    format             no answer could be read in its last turn, which it ended itself
    evidence_not_seen  it answered, and no observation held the ground truth (`answer_seen`)
    evidence_seen      it answered, and the ground truth had been before it
    """
    if verdict == "correct" or not trajectory.ground_truth:
        return None
    if verdict == "error" and finished(trajectory):
        return "judge_error"
    statuses = [
        {turn.tool_status for turn in trajectory.turns if turn.action == kind and is_call(turn)}
        for kind in ("search", "visit")
    ]
    if trajectory.outcome.status == "tool_error" or any(
        found and found <= {"error", "timeout"} for found in statuses
    ):
        return "infrastructure"
    if _loops(trajectory, tokenizer):
        return "loop"
    if trajectory.stop_reason in TRUNCATED:
        return "truncated"
    if trajectory.prediction is None:
        return "format"
    return "evidence_seen" if answer_seen(text, trajectory.ground_truth) else "evidence_not_seen"


def _loops(trajectory: Trajectory, tokenizer: ChatTokenizer) -> bool:
    calls = [turn.duplicate for turn in trajectory.turns if is_call(turn)]
    if sum(calls) >= MIN_DUPLICATES and 2 * sum(calls) >= len(calls):
        return True
    if not trajectory.turns:
        return False
    last = tokenizer.decode(
        trajectory.token_ids[trajectory.turns[-1].start : trajectory.turns[-1].end]
    ).removesuffix(IM_END)
    return len(last) >= TAIL and last.count(last[-TAIL:]) > MAX_REPEATS


def leaks_of(
    trajectory: Trajectory, text: str, addresses: Sequence[str], canary: str | None
) -> list[str]:
    """Return the signs that the agent met a copy of the benchmark: the canary in what it was told,
    parts of addresses it was shown or opened.
    """
    visited = [
        url for turn in trajectory.turns if turn.action == "visit" for url in turn.arguments["url"]
    ]
    met = "\n".join([*ADDRESS.findall(text), *visited]).lower()
    leaks = [part for part in addresses if part in met]
    if canary is not None and canary in text:
        leaks.append(canary)
    return leaks


def grade_trajectories(
    trajectories: Sequence[Trajectory],
    judge: Judge,
    tokenizer: ChatTokenizer,
    *,
    items: bool,
    addresses: Sequence[str],
    canaries: dict[str, str],
    manifest: dict,
) -> list[dict]:
    """Return the verdict row of each trajectory. Judged is what came to its end and has a ground
    truth; the rest has the verdict error and says why.

    items: the judge's f1 is that of a list's items, so that of the words would not stand in for it;
    addresses, canaries (by question id): as `leaks_of`; manifest: what decided the verdicts, added
    to that of the trajectory.
    """
    judged = [t for t in trajectories if finished(t) and t.ground_truth]
    found = judge([Case(t.question, t.ground_truth, t.prediction) for t in judged])
    verdicts = dict(zip((t.key for t in judged), found, strict=True))
    rows = []
    for t in trajectories:
        reason = t.stop_reason if t.ground_truth else "no ground truth"
        verdict = verdicts.get(t.key) or Verdict("error", t.prediction, error=reason)
        text = observations(t, tokenizer)
        rows.append(
            {
                "run": t.run,
                "question_id": t.question_id,
                "sample": t.sample,
                "verdict": verdict.verdict,
                "extracted": verdict.extracted,
                "raw": verdict.raw,
                "error": verdict.error,
                "scores": _scores(t, verdict, items) if t.key in verdicts else {},
                "judge": manifest["judge"],
                "prompt_hash": manifest["prompt_hash"],
                "failure": failure_of(t, verdict.verdict, text, tokenizer),
                "leaks": leaks_of(t, text, addresses, canaries.get(t.question_id)),
                "manifest": t.manifest | manifest,
            }
        )
    return rows


def _scores(trajectory: Trajectory, verdict: Verdict, items: bool) -> dict:
    scores = {"em": exact_match(trajectory.prediction, trajectory.ground_truth)}
    if not items:
        scores["f1"] = f1_score(trajectory.prediction, trajectory.ground_truth)
    return scores | (verdict.scores or {})
