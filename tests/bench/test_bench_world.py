"""`python -m venus.bench world`: this tree beside itself, beside one that cannot play, and beside
one that samples other ids.
"""

import json
import shutil
import subprocess

import pytest
from tiny_runs import ROOT, tiny_world

from venus.bench.world import WorldConfig, world
from venus.model.qwen3 import Qwen3, Qwen3Config
from venus.model.weights import save_model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    source, directory = tiny_world(tmp_path_factory), tmp_path_factory.mktemp("bench-world")
    model = Qwen3(Qwen3Config.read(source / "model"))
    model.init_weights(0)
    save_model(model, directory)
    shutil.copy(source / "model" / "tokenizer.json", directory)
    return {"model": str(directory), "questions": str(source / "questions" / "few.jsonl")}


def test_the_same_tree_samples_the_same_ids(made, capfd):
    world(
        WorldConfig(
            **made, before=str(ROOT), num_questions=2, samples=2, slots=4, latency=0.0, repeats=1
        )
    )
    first, second, ratio, verdict = capfd.readouterr().out.splitlines()
    counts = [line.split() for line in (first, second)]
    assert counts[0][:2] == ["this", "tree"] and counts[1][0] == "before"
    assert counts[0][2:-2] == counts[1][1:-2] and counts[0][2:4] == ["4", "rollouts"]
    assert (
        ratio.startswith("this tree over before: ")
        and "goal 1.5x: " in ratio
        and verdict == "the ids are equal"
    )


def test_a_tree_that_cannot_play_is_named(made, tmp_path, capfd):
    (tmp_path / "venus").mkdir()
    (tmp_path / "venus" / "collect.py").touch()
    with pytest.raises(SystemExit, match=f"the rollouts of {tmp_path} ended with exit code 1"):
        world(
            WorldConfig(
                **made,
                before=str(tmp_path),
                num_questions=1,
                samples=1,
                slots=1,
                latency=0.0,
                repeats=1,
            )
        )
    assert "Error" in capfd.readouterr().err
    with pytest.raises(ValueError, match="no venus/collect.py there"):
        WorldConfig(**made, before=str(tmp_path / "venus")).validate()
    # rollouts would wait for a slot for ever
    with pytest.raises(ValueError, match="slots.* at least 1"):
        WorldConfig(**made, slots=0).validate()


def test_other_ids_are_an_error_and_speed_is_none(monkeypatch, capsys):
    """Runs that are told, not made: 3, 2, 4 and 2 seconds in the order this tree,
    before, this tree, before.
    """
    told = [
        {"seconds": s, "rollouts": 1, "tokens": 9, "ids": ids}
        for s, ids in ((3, "a"), (2, "a"), (4, "a"), (2, "b"))
    ]
    monkeypatch.setattr(
        "venus.bench.world.subprocess.run",
        lambda *_, **__: subprocess.CompletedProcess([], 0, json.dumps(told.pop(0))),
    )
    with pytest.raises(SystemExit, match="other ids"):
        world(WorldConfig(model="m", questions="q", before=str(ROOT), repeats=2))
    assert (
        "this tree over before: 0.58x (goal 1.5x: missed), 0.50 to 0.67; of the fastest runs 0.67x"
        in capsys.readouterr().out
    )
