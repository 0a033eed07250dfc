"""Two nodes of one process each, on loopback, with homes and scratch folders of their own: the
folder of the run is all that they share.

What they write is compared with one process.
"""

import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tiny_runs
from tiny_runs import ROLLOUT, ROOT, read_rows

from venus.model.weights import load_model
from venus.trajectory import read_trajectories

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def sft(world, output, epochs):
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
        str(epochs),
        "--batch-size",
        "6",
        "--lr",
        "0.02",
        "--save-every",
        "20",
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
    ]
    return [
        *words,
        "--questions-per-step",
        "3",
        "--group-size",
        "4",
        "--steps",
        "2",
        "--lr",
        "1e-3",
        "--save-every",
        "1",
    ]


def on_two_nodes(command, scratch):
    """Run a script under two launchers, as on two machines; [(exit code, what the node wrote)]."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = []
    for rank in range(2):
        local = scratch / f"node{rank}"
        local.mkdir(parents=True)
        words = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc-per-node=1",
            f"--node-rank={rank}",
            "--master-addr=127.0.0.1",
            f"--master-port={port}",
            ROOT / command[0],
            *command[1:],
        ]
        nodes.append(
            subprocess.Popen(
                list(map(str, words)),
                cwd=local,
                env=tiny_runs.environment() | {"TMPDIR": str(local), "HOME": str(local)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [node.communicate(timeout=240)[0] for node in nodes]
    return [(node.returncode, output) for node, output in zip(nodes, outputs, strict=True)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The outputs of one process under `one`, of two nodes under `two`: sft of two steps and igpo
    of two steps from a model trained for longer.
    """
    world, base = tiny_runs.tiny_world(tmp_path_factory), tmp_path_factory.mktemp("nodes")
    with tiny_runs.Forked(base) as forked:
        model = base / "start" / "model"
        forked.run(sft(world, base / "start", 40))
        forked.run(sft(world, base / "one" / "sft", 2))
        forked.run(igpo(world, model, base / "one" / "igpo"))
        for name, command in (
            ("sft", sft(world, base / "two" / "sft", 2)),
            ("igpo", igpo(world, model, base / "two" / "igpo")),
        ):
            for code, output in on_two_nodes(command, base / f"scratch-{name}"):
                assert code == 0, output[-3000:]
            forked.run([*command, "--export", base / "exported" / name])
        yield SimpleNamespace(
            one=base / "one", two=base / "two", exported=base / "exported", world=world
        )


@pytest.mark.parametrize("name", ["sft", "igpo"])
def test_two_nodes_have_the_gradient_of_one_process(ran, name):
    """Loss and norm of both steps, the second of which follows from the whole of the first
    gradient. 1e-5: the same sums in another order.
    """
    one, two = (read_rows(base / name / "metrics.jsonl") for base in (ran.one, ran.two))
    assert len(one) == len(two) == 2
    for a, b in zip(two, one, strict=True):
        assert [a["loss"], a["grad_norm"]] == pytest.approx(
            [b["loss"], b["grad_norm"]], rel=1e-5, abs=1e-5
        )


def test_the_trajectories_of_both_nodes_are_there_once_and_in_order(ran):
    for step in range(2):
        one, two = (
            read_trajectories(base / "igpo" / "rollouts" / f"step_{step:05d}.jsonl")
            for base in (ran.one, ran.two)
        )
        assert [(t.key, t.token_ids, t.prediction) for t in two] == [
            (t.key, t.token_ids, t.prediction) for t in one
        ]
        assert len({t.key for t in two}) == 12
    assert sorted(path.name for path in (ran.two / "igpo" / "rollouts").iterdir()) == [
        "step_00000.jsonl",
        "step_00001.jsonl",
    ]


@pytest.mark.parametrize("name", ["sft", "igpo"])
def test_checkpoint_and_export_are_whole(ran, name):
    """Each node wrote its half of the checkpoint into the shared folder; one process
    has exported it since.
    """
    checkpoint = ran.two / name / "checkpoints" / "step_2"
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "extra.json"} <= {
        path.name for path in checkpoint.iterdir()
    }
    for a, b in zip(
        load_model(ran.exported / name).parameters(),
        load_model(ran.two / name / "model").parameters(),
        strict=True,
    ):
        assert (a == b).all()


@pytest.mark.soak
def test_nodes_without_a_shared_folder_are_stopped_in_one_line(ran, tmp_path):
    """A relative --output, and a scratch disk of its own below each node."""
    for code, output in on_two_nodes(sft(ran.world, "run", 2), tmp_path):
        assert (
            code != 0
            and (
                "error: run: ranks [1] do not see what rank 0 writes there; all nodes need one "
                "shared folder"
            )
            in output
        )
