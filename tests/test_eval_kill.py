"""kill -9 during an evaluation, at seeded random moments: the same command ends as if nothing had
happened, and does nothing twice.
"""

import json
import os
import random
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agent_fakes import answer, tiny_tokenizer
from stub_server import completion, serve
from tiny_runs import ROOT, environment, tiny_world

from venus.files import read_jsonl, write_jsonl
from venus.model.qwen3 import Qwen3, Qwen3Config
from venus.model.weights import copy_tokenizer_files, save_model
from venus.trajectory import read_trajectories

SMALL = [
    *(
        "--system-prompt",
        "short",
        "--max-turns",
        "3",
        "--max-turn-tokens",
        "24",
        "--max-observation-tokens",
        "64",
        "--max-context",
        "600",
    ),
    *("--slots", "4", "--threads", "1", "--resamples", "100"),
]


@pytest.fixture
def finish(monkeypatch, capsys):
    """Run eval.py to its end in this process; return its summary."""

    def call(argv, output):
        monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, argv)])
        runpy.run_path(str(ROOT / "eval.py"), run_name="__main__")
        capsys.readouterr()
        return json.loads((output / "summary.json").read_text(encoding="utf-8"))

    return call


def kill_when(argv, path, size, delay):
    """Start eval.py and kill -9 it `delay` seconds after `path` has reached `size` bytes; it must
    not have ended by then.
    """
    process = subprocess.Popen(
        [sys.executable, "eval.py", *map(str, argv)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and size_of(path) < size and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(delay)
    process.kill()
    _, stderr = process.communicate()
    assert process.returncode == -9, (
        f"it ended by itself, before {path} had {size} bytes: {stderr.decode()[-2000:]}"
    )


def size_of(path):
    return path.stat().st_size if path.exists() else 0


def moments(seed, count, total):
    """Sizes at which to kill, in rising order, with the seconds to wait then; the last fifth is
    left, so that the process cannot have ended.
    """
    rng = random.Random(seed)
    return [
        (size, rng.uniform(0, 0.02))
        for size in sorted(rng.uniform(0, 0.8) * total for _ in range(count))
    ]


def tear(path):
    """Cut the file inside its last row, as a crash of the machine would."""
    if size_of(path) > 9:
        os.truncate(path, size_of(path) - 9)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, pytest.param(12, marks=pytest.mark.soak)])
def test_a_killed_evaluation_ends_with_the_rollouts_of_an_undisturbed_one(
    tmp_path_factory, tmp_path, finish, kills
):
    """Each key once, finished rows kept as they stood, the same ids; after the second kill the last
    row is torn as well.
    """
    world, model = tiny_world(tmp_path_factory), tmp_path / "model"
    untrained = Qwen3(Qwen3Config.read(world / "model"))
    untrained.init_weights(0)
    save_model(untrained, model)
    copy_tokenizer_files(world / "model", model)
    flags = [
        "--model",
        model,
        "--questions",
        world / "questions" / "few.jsonl",
        "--samples",
        10,
        *SMALL,
    ]
    whole, torn = tmp_path / "whole" / "e", tmp_path / "killed" / "e"
    expected = finish([*flags, "--output", whole], whole)
    path, finished = torn / "trajectories.jsonl", []
    for number, (size, delay) in enumerate(moments(kills, kills, size_of(whole / path.name))):
        kill_when([*flags, "--output", torn], path, size, delay)
        if number == 1:
            tear(path)  # which may cost a row that had stood since the first kill
            finished.clear()
        if path.exists():
            finished.append([json.dumps(row) for _, row in read_jsonl(path, torn_tail=True)])
    got = finish([*flags, "--output", torn], torn)
    rows = [json.dumps(row) for _, row in read_jsonl(path)]
    assert all(rows[: len(before)] == before for before in finished) and any(finished)
    ids, wanted = (
        {t.key: t.token_ids for t in read_trajectories(file)} for file in (path, whole / path.name)
    )
    assert len(rows) == len(ids) == 60
    assert ids == wanted
    assert [row["verdict"] for _, row in read_jsonl(torn / "verdicts.jsonl")] == [
        row["verdict"] for _, row in read_jsonl(whole / "verdicts.jsonl")
    ]
    assert {name: got[name] for name in ("success", "turns", "stop_reasons")} == {
        name: expected[name] for name in ("success", "turns", "stop_reasons")
    }


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.soak)])
def test_a_killed_judge_pays_for_no_verdict_twice(tmp_path, finish, kills):
    """Asked again is at most what was under way at a kill, 8 calls, and the row that was torn."""
    tiny_tokenizer(tmp_path)
    talk = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": ""}]
    rows = [
        {
            "question": "Who?",
            "answer": "Ada",
            "messages": [talk[0], talk[1] | {"content": answer(f"number {k}")}],
        }
        for k in range(80)
    ]
    write_jsonl(tmp_path / "rows.jsonl", rows)

    def reply(body, _):
        time.sleep(0.03)
        return (
            200,
            completion(
                f"correct: {'yes' if 'number 7' in body['messages'][0]['content'] else 'no'}"
            ),
            {},
        )

    with serve(reply) as stub:
        output = tmp_path / "e"
        flags = [
            "--trajectories",
            tmp_path / "rows.jsonl",
            "--tokenizer",
            tmp_path,
            "--judge",
            f"openai:{stub.url}:m",
            "--judge-calls",
            8,
        ]
        flags += ["--resamples", 100, "--output", output]
        for size, delay in moments(kills, kills, 80 * 240):
            kill_when(flags, output / "judge.jsonl", size, delay)
            tear(output / "judge.jsonl")
        summary = finish(flags, output)
        assert len(stub.requests) <= 80 + 9 * kills
    cached = [row for _, row in read_jsonl(output / "judge.jsonl")]
    assert len({row["key"] for row in cached}) == len(cached) == 80
    assert (summary["trajectories"], summary["graded"], summary["success"]["mean"]) == (
        80,
        80,
        11 / 80,
    )
    assert Path(output / "verdicts.jsonl").exists()
