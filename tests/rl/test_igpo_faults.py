"""IGPO while a tenth of the judge's cases and of the searches fail: who stays in the statistics and
the loss, who leaves, and what is counted.
"""

import json
import random
import subprocess
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import tiny_runs
from stub_server import completion, serve
from tiny_runs import DRIVER, ROLLOUT, ROOT, read_rows

from venus.grading.verdicts import PROMPTS
from venus.trajectory import read_trajectories

pytestmark = pytest.mark.slow
STEPS, QUESTIONS, GROUP = 3, 4, 6
KEY = "sk-of-the-judge"

# In the process of the scripts: of every ten searches, one at a random place gets no answer. How
# many, goes into a file.
FLAKY_SEARCH = """
import atexit, itertools, pathlib, random
from venus.tools import offline
from venus.tools.base import ToolResult

answer, calls, failed = offline.OfflineSearch.__call__, itertools.count(), []
atexit.register(lambda: pathlib.Path({path!r}).write_text(str(len(failed))))

def flaky(self, arguments, **how):
    number = next(calls)
    if number % 10 == random.Random(number // 10).randrange(10):
        failed.append(arguments)
        return ToolResult("the search service did not answer", "error")
    return answer(self, arguments, **how)

offline.OfflineSearch.__call__ = flaky
"""


class FlakyJudge:
    """Of every ten cases (prompts), one at a random place never gets a verdict: the service is down
    for it, or what it says cannot be read.

    Besides, one call of ten is answered 503 once; that passes.
    """

    def __init__(self):
        self.cases, self.verdicts, self.lock = {}, {}, threading.Lock()

    def __call__(self, body, number):
        prompt = body["messages"][0]["content"]
        with self.lock:
            place = self.cases.setdefault(prompt, len(self.cases))
        if place % 10 == random.Random(place // 10).randrange(10):
            return (
                (500, "down", {"Retry-After": "0.01"})
                if place // 10 % 2
                else (200, completion("Hard to say."), {})
            )
        if number % 10 == 3:
            return 503, "busy", {"Retry-After": "0.01"}
        self.verdicts[prompt] = "yes" if place % 3 else "no"
        return (
            200,
            completion(
                "extracted: it\nreasoning: none\ncorrect: "
                f"{self.verdicts[prompt]}\nconfidence: None"
            ),
            {},
        )


def prompt_for(trajectory):
    reference = " or ".join(trajectory.ground_truth)
    return PROMPTS["browsecomp"].text.format(
        question=trajectory.question, prediction=trajectory.prediction, reference=reference
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """SFT until the model searches and answers, then three steps of IGPO: metrics rows,
    trajectories by step, the judge, failed searches.
    """
    world, base = tiny_runs.tiny_world(tmp_path_factory), tmp_path_factory.mktemp("faults")
    sft = [
        "train_sft.py",
        "--model",
        world / "model",
        "--data",
        world / "sft" / "few.jsonl",
        "--output",
        base / "sft",
        "--init",
        "random",
    ]
    sft += [
        "--epochs",
        "60",
        "--batch-size",
        "6",
        "--lr",
        "0.02",
        "--max-length",
        "1000",
        "--save-every",
        "60",
    ]
    igpo = [
        "train_igpo.py",
        "--model",
        base / "sft" / "model",
        "--questions",
        world / "questions" / "few.jsonl",
        "--output",
        base / "igpo",
        *ROLLOUT,
    ]
    igpo += [
        "--questions-per-step",
        str(QUESTIONS),
        "--group-size",
        str(GROUP),
        "--steps",
        str(STEPS),
        "--lr",
        "1e-3",
        "--kl-beta",
        "0",
    ]
    with serve(judge := FlakyJudge()) as stub:
        commands = [
            sft,
            [*igpo, "--reward", "judge", "--judge", f"openai:{stub.url}:m", "--temperature", "1.0"],
            [*igpo, "--reward", "judge"],
        ]
        done = subprocess.run(
            [sys.executable, "-c", FLAKY_SEARCH.format(path=str(base / "failed")) + DRIVER],
            input=json.dumps([[str(w) for w in c] for c in commands]),
            cwd=ROOT,
            env=tiny_runs.environment() | {"JUDGE_API_KEY": KEY},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    assert [result["code"] for result in results] == [0, 0, 2], results[1]["err"][-2000:]
    steps = [
        read_trajectories(base / "igpo" / "rollouts" / f"step_{step:05d}.jsonl")
        for step in range(STEPS)
    ]
    return SimpleNamespace(
        steps=steps,
        metrics=read_rows(base / "igpo" / "metrics.jsonl"),
        judge=judge,
        base=base,
        requests=stub.requests,
        failed_searches=int((base / "failed").read_text()),
        without_judge=results[2]["err"],
    )


def test_a_rollout_without_a_verdict_is_a_judge_error_and_none_is_rewarded_zero_for_it(ran):
    """The released trainer gives an unreadable verdict, an outage among them, the reward 0: a right
    answer is then pushed away from.
    """
    statuses = Counter()
    for trajectory in (t for step in ran.steps for t in step):
        prompt = prompt_for(trajectory)
        if prompt in ran.judge.cases and prompt not in ran.judge.verdicts:
            expected = (None, "judge_error")
        elif prompt in ran.judge.verdicts:
            expected = (float(ran.judge.verdicts[prompt] == "yes"), "ok")
        else:  # no model was asked: no answer, or the words of the ground truth
            expected = (float(trajectory.prediction is not None), "ok")
        assert (trajectory.outcome.value, trajectory.outcome.status) == expected
        statuses[expected] += 1
    assert statuses[None, "judge_error"] >= 2 and statuses[1.0, "ok"] and statuses[0.0, "ok"]


def test_a_rollout_without_a_verdict_leaves_statistics_and_loss(ran):
    for row, trajectories in zip(ran.metrics, ran.steps, strict=True):
        left = Counter(t.question_id for t in trajectories if t.kept)
        kept = [t for t in trajectories if t.kept and left[t.question_id] >= 2]
        assert all(turn.advantage is None for t in trajectories if not t.kept for turn in t.turns)
        assert all(turn.advantage is not None for t in kept for turn in t.turns)
        assert row["outcome"] == pytest.approx(sum(t.outcome.value for t in kept) / len(kept))
        assert row["trained_tokens"] == sum(t.num_sampled for t in kept)


def test_a_rollout_with_a_failed_search_stays_in(ran):
    """Told to the agent and recorded in the turn, it is no reason to leave."""
    failed = [
        t
        for step in ran.steps
        for t in step
        if any(turn.tool_status == "error" for turn in t.turns)
    ]
    assert len(failed) >= 2
    assert all(t.outcome.status in ("ok", "judge_error") for t in failed) and any(
        t.turns[-1].advantage is not None for t in failed
    )


def test_the_counts_are_right(ran):
    """By reason and by step in the metrics, against the records and against what
    was made to fail.
    """
    for row, trajectories in zip(ran.metrics, ran.steps, strict=True):
        left = Counter(t.question_id for t in trajectories if t.kept)
        reasons = Counter(
            "small_group" if t.kept else t.outcome.status
            for t in trajectories
            if not t.kept or left[t.question_id] < 2
        )
        assert (
            row["trajectories"] == QUESTIONS * GROUP
            and row["excluded_by"] == dict(reasons)
            and row["excluded"] == reasons.total()
        )
        assert row["failed_calls"] == sum(
            turn.tool_status == "error" for t in trajectories for turn in t.turns
        )
    assert sum(row["failed_calls"] for row in ran.metrics) == ran.failed_searches


def test_verdicts_are_kept_under_the_run_and_errors_are_not_among_them(ran):
    rows = read_rows(ran.base / "igpo" / "verdicts" / "rank0.jsonl")
    assert Counter(row["verdict"] for row in rows) == Counter(
        {"yes": "correct", "no": "incorrect"}[word] for word in ran.judge.verdicts.values()
    )


def test_the_key_reaches_the_judge_and_no_file(ran):
    assert all(request["headers"]["Authorization"] == f"Bearer {KEY}" for request in ran.requests)
    files = [path for path in (ran.base / "igpo").rglob("*") if path.is_file()]
    assert len(files) > 5 and not any(KEY.encode() in path.read_bytes() for path in files)


def test_a_judge_as_reward_must_be_named(ran):
    assert (
        "--reward judge needs a --judge" in ran.without_judge and ran.without_judge.count("\n") == 1
    )
