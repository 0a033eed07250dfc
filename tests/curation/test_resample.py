"""train_sft.py --resample: how often a row stands in an epoch, and what happens to copies. By dry
runs: they print rows and steps.
"""

import json

import pytest
import tiny_runs
from clean_samples import conversation, final


def plan(done):
    """(rows, steps) of a dry run's output."""
    lines = {
        line.split()[0]: line.split() for line in done["out"].partition("plan\n")[2].splitlines()
    }
    return int(lines["rows"][1]), int(lines["steps"][1])


def write(path, *rows):
    path.write_text(
        "".join(
            json.dumps({"messages": conversation(final(answer)), **more}) + "\n"
            for answer, more in rows
        )
    )
    return path


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """Dry runs over four files, with and without resampling, in one process."""
    world, base = tiny_runs.tiny_world(tmp_path_factory), tmp_path_factory.mktemp("resample")
    weights = (2, 3, 1, 1, 1)
    written = [
        (str(k), {"copy": copy}) for k, weight in enumerate(weights) for copy in range(weight)
    ]
    files = {
        "weights": write(
            base / "weights.jsonl",
            *((str(k), {"weight": weight}) for k, weight in enumerate(weights)),
        ),
        "copies": write(base / "copies.jsonl", *sorted(written, key=lambda row: row[1]["copy"])),
        "meeting": write(base / "meeting.jsonl", ("0", {"weight": 5}), ("1", {"weight": 1})),
    }

    def command(name, *more):
        return [
            "train_sft.py",
            "--model",
            world / "model",
            "--init",
            "random",
            "--data",
            files[name],
            "--output",
            base / "out",
            "--dry-run",
            *more,
        ]

    runs = [(name, mode) for name in files for mode in ("on", "off")]
    done = tiny_runs.run_all(
        *(command(name, "--batch-size", "2", "--resample", mode) for name, mode in runs)
    )
    return dict(zip(runs, done, strict=True))


@pytest.mark.parametrize("name", ["weights", "copies"])
def test_a_row_stands_in_an_epoch_as_often_as_its_weight_says_or_once(dry, name):
    """Copies written into the file are the same as a weight: equal rows become one, so that they
    cannot share a batch.
    """
    assert plan(dry[name, "on"]) == (5, 8 // 2) and plan(dry[name, "off"]) == (5, 5 // 2)


def test_copies_that_must_meet_in_a_batch_are_an_error_before_anything_is_loaded(dry):
    done = dry["meeting", "on"]
    assert done["code"] == 2 and done["err"].splitlines()[-1].startswith(
        "error: copies of a row must meet in a batch: 2 rows, 3 batches of 2"
    )
    assert plan(dry["meeting", "off"]) == (2, 1)
