"""The demo in its smoke size: every stage runs, the summary has the promised keys, and a second run
makes nothing again.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def smoke(output):
    return subprocess.run(
        [sys.executable, "-m", "venus.demo", "--smoke", "--output", str(output)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_smoke_demo_runs_every_stage_and_keeps_finished_work(tmp_path):
    first = smoke(tmp_path / "demo")
    assert first.returncode == 0, first.stderr[-2000:]
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    for name in ("random", "sft", "igpo"):
        assert {"success", "success_ci", "greedy", "pass_at_4"} <= summary[name].keys()
        low, high = summary[name]["success_ci"]
        assert 0 <= low <= summary[name]["success"] <= high <= 1
    assert {"paired_gain", "paired_gain_ci", "questions", "seconds"} <= summary.keys()
    assert summary["questions"] == 8
    curve = (tmp_path / "demo" / "reward_curve.svg").read_text()
    assert curve.startswith("<svg") or "<svg" in curve[:200]
    report = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert all(
        words in report
        for words in (
            "eval_igpo: 32 trajectories",
            "eval_sft: 32 trajectories",
            "training: 48 trajectories",
            'id="comparison"',
        )
    )
    for words in ("success T=1", "after SFT", "after IGPO", "paired by question"):
        assert words in first.stdout

    assert [path.name for path in (tmp_path / "demo").iterdir() if path.is_dir()] == [
        "smoke_seed_0"
    ], "a demo would take these stages for its own"
    made = {path: path.read_bytes() for path in tmp_path.rglob("trajectories.jsonl")} | {
        p: p.read_bytes() for p in tmp_path.rglob("metrics.jsonl")
    }
    assert len(made) == 8  # six evaluations, two trainings
    second = smoke(tmp_path / "demo")
    assert second.returncode == 0, second.stderr[-2000:]
    assert {path: path.read_bytes() for path in made} == made, "a finished stage was made again"
