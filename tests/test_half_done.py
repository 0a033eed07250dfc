"""Runs that the commit before the packages (d156f1f) left half done go on under today's code.

golden/half_done was made by that commit's own scripts: an SFT run of four steps, killed after the
second; a rollout and an evaluation of which two trajectories of four were there. Moved modules,
renamed classes and inherited options must not orphan what people have on their disks.
"""

import json
import shutil
from pathlib import Path

import pytest
from tiny_runs import read_rows, run_all

GOLDEN = Path(__file__).parent / "golden" / "half_done"
LIMITS = {"--max-turns": 3, "--max-turn-tokens": 12, "--max-observation-tokens": 64}
LIMITS |= {"--max-context": 512, "--system-prompt": "short", "--slots": 8, "--threads": 1}
ROLLOUT = [str(word) for pair in LIMITS.items() for word in pair]


def sft(place, *more):
    given = ["--model", place / "model", "--data", place / "rows.jsonl", "--output", place / "sft"]
    how = ["--init", "random", "--epochs", "4", "--batch-size", "6", "--lr", "1e-2"]
    return ["train_sft.py", *given, *how, "--save-every", "2", "--max-length", "1000", *more]


@pytest.fixture(scope="module")
def gone_on(tmp_path_factory):
    """The runs after today's scripts: (directory, {name: {code, out, err}})."""
    place = tmp_path_factory.mktemp("half") / "done"
    shutil.copytree(GOLDEN, place)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(place / "model" / name, place / "sft_model")
    asked = ["--model", place / "sft_model", "--questions", place / "questions.jsonl", *ROLLOUT]
    igpo = ["--questions-per-step", "2", "--group-size", "2", "--steps", "1", "--lr", "1e-3"]
    commands = {
        "refused": sft(place, "--lr", "2e-2"),
        "sft": sft(place),
        "rollout": ["rollout.py", *asked, "--samples", "2", "--output", place / "rollout.jsonl"],
        "eval": ["eval.py", *asked, "--samples", "2", "--resamples", "100"],
        "igpo": ["train_igpo.py", *asked, *igpo, "--output", place / "igpo"],
    }
    commands["eval"] += ["--output", place / "eval"]
    return place, dict(zip(commands, run_all(*commands.values()), strict=True))


def test_half_done_training_resumes_after_its_checkpoint(gone_on):
    """The losses of the four steps are those that the old code had in one go."""
    place, runs = gone_on
    assert runs["sft"]["code"] == 0, runs["sft"]["err"]
    rows = read_rows(place / "sft" / "metrics.jsonl")
    expected = json.loads((GOLDEN / "expected.json").read_text())["losses"]
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-4)
    assert rows[:2] == read_rows(GOLDEN / "sft" / "metrics.jsonl")


def test_half_done_training_with_another_setting_is_refused_by_name(gone_on):
    refused = gone_on[1]["refused"]
    assert refused["code"] == 2 and "lr" in refused["err"]


@pytest.mark.parametrize(
    ("name", "file"), [("rollout", "rollout.jsonl"), ("eval", "eval/trajectories.jsonl")]
)
def test_half_done_rollouts_keep_what_is_there_and_make_the_rest(gone_on, name, file):
    place, runs = gone_on
    assert runs[name]["code"] == 0, runs[name]["err"]
    rows = read_rows(place / file)
    assert rows[:2] == read_rows(GOLDEN / file)
    assert sorted((row["question_id"], row["sample"]) for row in rows) == [
        (question, sample) for question in ("q0", "q1") for sample in (0, 1)
    ]


def test_what_decides_an_igpo_run_is_named_and_valued_as_before(gone_on):
    """The settings that a checkpoint is compared with, but for the content of other models."""
    place, runs = gone_on
    assert runs["igpo"]["code"] == 0, runs["igpo"]["err"]
    saved = json.loads((place / "igpo" / "checkpoints" / "step_1" / "extra.json").read_text())
    expected = json.loads((GOLDEN / "expected.json").read_text())["igpo_settings"]
    assert saved["settings"] == expected
