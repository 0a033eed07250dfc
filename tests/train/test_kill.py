"""kill -9 at any moment: while loading, rolling out, updating, writing a checkpoint, between its
renames, exporting. The next start goes on, and what comes out is what an undisturbed run gives.

The moments are drawn from a seed, over the processor time (the clock depends on what else is
running) of the undisturbed run. SFT saves every step, so that many of them hit a checkpoint.
"""

import contextlib
import functools
import math
import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_runs
from tiny_runs import ROLLOUT, read_rows

from venus.model.weights import load_model
from venus.trajectory import read_trajectories

pytestmark = pytest.mark.slow
STEPS = 12  # of SFT
# gains scored in the rollout differ in their last bit with the rollouts beside,
# and so after a resume
PACKED = ("--info-gain", "packed")


def sft(world, output, *more):
    words = [
        "train_sft.py",
        "--model",
        world / "model",
        "--data",
        world / "sft" / "few.jsonl",
        "--output",
        output,
        "--init",
        "random",
    ]
    return [
        *words,
        "--epochs",
        "40",
        "--batch-size",
        "6",
        "--lr",
        "0.02",
        "--save-every",
        "20",
        "--recompute",
        "off",
        *more,
    ]


def short_sft(world, model, output):
    """From a trained model, so that a wrong resume shows in the weights."""
    words = [
        "train_sft.py",
        "--model",
        model,
        "--data",
        world / "sft" / "few.jsonl",
        "--output",
        output,
        "--recompute",
        "off",
    ]
    return [
        *words,
        "--epochs",
        str(STEPS // 3),
        "--batch-size",
        "2",
        "--lr",
        "1e-3",
        "--save-every",
        "1",
    ]


def igpo(world, model, output):
    words = [
        "train_igpo.py",
        "--model",
        model,
        "--questions",
        world / "questions" / "few.jsonl",
        "--output",
        output,
        *ROLLOUT,
        "--recompute",
        "off",
    ]
    return [
        *words,
        "--questions-per-step",
        "2",
        "--group-size",
        "3",
        "--steps",
        "4",
        "--updates",
        "2",
        "--lr",
        "1e-3",
        "--save-every",
        "2",
        *PACKED,
    ]


def cpu_seconds(process):
    """Processor time that a process has used, None when it is gone."""
    try:
        user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return None
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def run_until(forked, command, moment):
    """Run a script and kill it hard at this much processor time; return its exit code
    and the time it had.
    """
    process, used = forked.start(command), 0.0
    while (now := cpu_seconds(process)) is not None:
        used = now
        if used >= moment:
            with contextlib.suppress(ProcessLookupError):  # it ended this instant
                os.kill(process, signal.SIGKILL)
            break
        time.sleep(0.001)
    return forked.wait(), used


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A server of processes, and an undisturbed run of either script with the
    processor time it took.
    """
    world, base = tiny_runs.tiny_world(tmp_path_factory), tmp_path_factory.mktemp("kill")
    with tiny_runs.Forked(base) as forked:
        forked.run(sft(world, base / "start"))
        commands = {
            name: functools.partial(command, world, base / "start" / "model")
            for name, command in (("sft", short_sft), ("igpo", igpo))
        }
        seconds = {}
        for name, command in commands.items():
            code, seconds[name] = run_until(forked, command(base / name / "run"), math.inf)
            assert code == 0, forked.log.read_text()[-3000:]
        yield SimpleNamespace(forked=forked, base=base, commands=commands, seconds=seconds)


def killed(ran, name, directory, kills, seed):
    """Run a script, killed `kills` times at random moments, in fresh directories until so many were
    met; return the outputs of the runs.
    """
    draw, outputs = random.Random(f"{name} {seed}"), []
    while kills:
        outputs.append(directory / str(len(outputs)) / "run")
        code = None
        while code != 0:
            code, _ = run_until(
                ran.forked,
                ran.commands[name](outputs[-1]),
                draw.uniform(0, ran.seconds[name]) if kills else math.inf,
            )
            assert code in (0, -signal.SIGKILL), ran.forked.log.read_text()[-3000:]
            kills -= code == -signal.SIGKILL
    return outputs


def same_weights(ours, theirs):
    """To 1e-6, though they should be equal to the bit: the same sums in the same order."""
    for a, b in zip(
        load_model(ours / "model").parameters(),
        load_model(theirs / "model").parameters(),
        strict=True,
    ):
        assert (a - b).abs().max() <= 1e-6


def check_sft(ran, directory, kills, seed):
    for output in killed(ran, "sft", directory, kills, seed):
        same_weights(output, ran.base / "sft" / "run")
        ours = read_rows(output / "metrics.jsonl")
        theirs = read_rows(ran.base / "sft" / "run" / "metrics.jsonl")
        assert [(row["step"], row["loss"]) for row in ours] == [
            (row["step"], row["loss"]) for row in theirs
        ]
        assert len(ours) == STEPS
        assert sorted(path.name for path in (output / "checkpoints").iterdir()) == [
            "latest",
            f"step_{STEPS - 1}",
            f"step_{STEPS}",
        ]


def check_igpo(ran, directory, kills, seed):
    for output in killed(ran, "igpo", directory, kills, seed):
        same_weights(output, ran.base / "igpo" / "run")
        for step in range(4):
            name = f"step_{step:05d}.jsonl"
            ours, theirs = (
                read_trajectories(path / "rollouts" / name)
                for path in (output, ran.base / "igpo" / "run")
            )
            assert [(t.key, t.token_ids, t.outcome, t.turns) for t in ours] == [
                (t.key, t.token_ids, t.outcome, t.turns) for t in theirs
            ]
            assert len(ours) == 6
        assert len(list((output / "rollouts").iterdir())) == 4


def test_sft_killed_three_times_ends_with_the_same_weights(ran, tmp_path):
    check_sft(ran, tmp_path, kills=3, seed=0)


def test_igpo_killed_three_times_ends_with_the_same_trajectories_and_weights(ran, tmp_path):
    check_igpo(ran, tmp_path, kills=3, seed=0)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_sft_killed_ten_times_ends_with_the_same_weights(ran, tmp_path, seed):
    check_sft(ran, tmp_path, kills=10, seed=seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_igpo_killed_ten_times_ends_with_the_same_trajectories_and_weights(ran, tmp_path, seed):
    check_igpo(ran, tmp_path, kills=10, seed=seed)
