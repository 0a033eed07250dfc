"""Two processes read, save, resume and export what one does.

Starting a process costs seconds, so one pair of processes does everything, beside what this process
does alone, and the tests read the numbers.
"""

import dataclasses
import json
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import tiny_runs
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from venus.cli import RunFailed
from venus.model.qwen3 import Qwen3, Qwen3Config, WeightedNLL
from venus.model.weights import load_model, save_model
from venus.train import checkpoint
from venus.train.backward import backward, with_weights
from venus.train.batches import Document
from venus.train.checkpoint import (
    check_shared,
    export_model,
    load_checkpoint,
    load_sharded,
    save_checkpoint,
)
from venus.train.loop import OptimizerOptions, TrainingOptions, TrainingRun
from venus.train.parallel import World

pytestmark = [pytest.mark.dist, pytest.mark.slow]
GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = ("tied_tf5", "untied_tf4")
FP32 = 2e-6  # relative to losses of about 4: the same sums in another order
BEFORE, AFTER = 3, 3  # steps on either side of the resume


@dataclass(frozen=True)
class Config(OptimizerOptions, TrainingOptions):
    """The fields of a script's config that a run asks for."""

    output: str
    model: str = str(GOLDEN / "tied_tf5")
    lr: float = 1e-3
    beta2: float = 0.95
    save_every: int = 100


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def gradient(model, number, world):
    """The gradient of the data of step `number`, two documents so that each of two ranks has one;
    the loss over all ranks.
    """
    draw = torch.Generator().manual_seed(number)
    batch = [
        Document(torch.randint(64, (length,), generator=draw).tolist(), {"mask": [1.0] * length})
        for length in (12, 9)
    ]
    results = backward(
        model,
        with_weights(batch, "token"),
        lambda fields: WeightedNLL(fields["weights"]),
        max_tokens=12,
        world=world,
    )
    return results, world.sum(sum(result.loss.item() for result, _ in results))


def losses(model, optimizer, numbers, world):
    seen = []
    for number in numbers:
        seen.append(gradient(model, number, world)[1])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return seen


def odd_model(directory):
    """A model none of whose sizes two ranks share evenly: the first holds one row more."""
    config = dataclasses.replace(
        Qwen3Config.read(GOLDEN / "untied_tf4"), vocab_size=61, hidden_size=27, intermediate_size=35
    )
    model = Qwen3(config)
    model.init_weights(0)
    save_model(model, directory)


def loads(directory, world):
    """Elements this rank reads and in all, and the largest difference from the
    model loaded whole.
    """
    whole, read, reading = load_model(directory, dtype=torch.float32), [], checkpoint.read_weights

    def counted(*args):
        for parameter, tensor in reading(*args):
            read.append(tensor.numel())
            yield parameter, tensor

    checkpoint.read_weights = counted
    sharded = load_sharded(directory, world, dtype=torch.float32, bf16=False)
    checkpoint.read_weights = reading
    pairs = zip(sharded.parameters(), whole.parameters(), strict=True)
    difference = max((ours.full_tensor() - theirs).abs().max().item() for ours, theirs in pairs)
    return [sum(read), sum(p.numel() for p in whole.parameters()), difference]


def continued(directory, world):
    """Losses of a fresh model and optimizer that go on from the checkpoint in the directory, and a
    random number after the resume.
    """
    model = load_sharded(GOLDEN / "tied_tf5", world, dtype=torch.float32, bf16=False)
    optimizer = optimizer_of(model)
    step, extra = load_checkpoint(directory, model, optimizer, world)
    assert (step, extra) == (BEFORE, {"place": 5})
    drawn = torch.rand(1).item()
    return losses(model, optimizer, range(BEFORE, BEFORE + AFTER), world), drawn


def saved(directory, world):
    """Train, save, and go on: the losses after the save, the random number drawn
    after it, and the model.
    """
    model = load_sharded(GOLDEN / "tied_tf5", world, dtype=torch.float32, bf16=False)
    optimizer = optimizer_of(model)
    losses(model, optimizer, range(BEFORE), world)
    torch.manual_seed(100 + world.rank)
    save_checkpoint(directory, BEFORE, model, optimizer, world, keep=1, extra={"place": 5})
    drawn = torch.rand(1).item()
    return losses(model, optimizer, range(BEFORE, BEFORE + AFTER), world), drawn, model


def training_run(directory, world):
    cfg = Config(str(directory), max_skipped=2)
    model = load_sharded(GOLDEN / "tied_tf5", world, dtype=torch.float32, bf16=False)
    return TrainingRun(
        cfg, model, world, settings={}, num_steps=9, spread=None, console=(), extra={}
    )


def stopped(directory):
    """The steps of this rank when rank 1 is asked to stop in step 2, and rank 0 can only hear of it
    where all meet: the store is each rank's own.
    """
    world, steps = World(), []
    world._store = dist.HashStore()
    for step in training_run(directory / "stopped", world).steps("test"):
        steps.append(step)
        if step == 2 and world.rank == 1:
            world.request_stop()
    return steps


def poisoned(directory, world):
    """A NaN in the gradient of rank 1 alone: what the ranks do about it, and
    whether any weight moved.
    """
    run = training_run(directory / "poisoned", world)
    model, counts = run.model, []
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    try:
        for number in range(3):
            results, _ = gradient(model, number, world)
            if world.rank == 1:
                model.model.norm.weight.grad.to_local()[0] = float("nan")
            run.update(results, 1e-3, ["row 1"])
            counts.append(run.extra["skipped"])
    except RunFailed as error:
        counts.append(str(error))
    return [
        counts,
        all(
            torch.equal(ours.to_local(), old)
            for ours, old in zip(model.parameters(), before, strict=True)
        ),
    ]


def measure(rank, directory, source):
    store = dist.FileStore(str(directory / "store"), 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    world = World()
    models = {name: GOLDEN / name for name in MODELS} | {"odd": directory / "odd"}
    seen = {
        "loads": {name: loads(path, world) for name, path in models.items()},
        "poisoned": poisoned(directory, world),
    }
    seen["two to two"], seen["drawn after two"], model = saved(directory / "by two", world)
    seen["resumed"], seen["drawn resumed"] = continued(directory / "by two", world)
    seen["one to two"], seen["drawn new"] = continued(directory / "by one", world)
    seen["other sp"], seen["stopped"] = (
        continued(directory / "by two", World(sp=2))[0],
        stopped(directory),
    )
    export_model(model, source, directory / "export", dtype=torch.float32, world=world)
    try:
        check_shared(directory / f"scratch of {rank}", world)
    except ValueError as error:
        seen["not shared"] = str(error)
    (directory / f"rank{rank}.json").write_text(json.dumps(seen))
    world.barrier()
    world.close()


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """`ranks`: what each of two processes saw; `one`: what this process, alone, saw;
    `directory` of the files.
    """
    directory = tmp_path_factory.mktemp("sharded")
    source = tiny_runs.tiny_world(tmp_path_factory) / "model"
    odd_model(directory / "odd")
    world = World()
    one = dict(
        zip(("one to one", "drawn after one"), saved(directory / "by one", world)[:2], strict=True)
    )
    mp.spawn(measure, args=(directory, source), nprocs=2)
    one["two to one"], one["drawn resumed"] = continued(directory / "by two", world)
    world.close()
    return {
        "ranks": [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(2)],
        "one": one,
        "directory": directory,
    }


@pytest.mark.parametrize("name", [*MODELS, "odd"])
def test_each_rank_reads_its_own_rows_and_nothing_else(seen, name):
    """Of an 8 GB checkpoint eight ranks read 8 GB together, not 64. 27 rows over two
    ranks are 14 and 13.
    """
    reads = [rank["loads"][name] for rank in seen["ranks"]]
    assert [difference for _, _, difference in reads] == [0.0, 0.0]
    assert sum(read for read, _, _ in reads) == reads[0][1]
    assert max(read for read, _, _ in reads) <= 0.52 * reads[0][1]


def test_a_resume_by_as_many_processes_has_the_losses_bit_for_bit(seen):
    for rank in seen["ranks"]:
        assert rank["resumed"] == rank["two to two"]
        assert rank["drawn resumed"] == rank["drawn after two"]
    assert seen["ranks"][0]["drawn resumed"] != seen["ranks"][1]["drawn resumed"]


def test_what_two_processes_saved_one_takes_up_and_the_other_way_round(seen):
    assert seen["one"]["two to one"] == pytest.approx(seen["ranks"][0]["two to two"], rel=FP32)
    for rank in seen["ranks"]:
        assert rank["one to two"] == pytest.approx(seen["one"]["one to one"], rel=FP32)
        # two ranks that shared no sequence now share each one
        assert rank["other sp"] == pytest.approx(rank["two to two"], rel=FP32)
    assert len(set(seen["one"]["one to one"])) == AFTER


def test_a_stop_asked_of_one_rank_ends_both_after_the_same_step(seen):
    """Had rank 0 gone by what it knows alone, it would have begun a step that rank
    1 never joins.
    """
    assert [rank["stopped"] for rank in seen["ranks"]] == [[0, 1, 2]] * 2


def test_random_numbers_go_on_where_the_rank_was_there_before(seen):
    assert seen["one"]["drawn resumed"] == seen["ranks"][0]["drawn after two"]
    assert (
        seen["ranks"][0]["drawn new"]
        == seen["one"]["drawn after one"]
        != seen["ranks"][1]["drawn new"]
    )


def test_a_nan_on_one_rank_is_skipped_by_both_together(seen):
    for rank in seen["ranks"]:
        counts, is_unchanged = rank["poisoned"]
        assert (
            counts[0] == 1
            and "2 updates in a row" in counts[1]
            and "row 1" in counts[1]
            and is_unchanged
        )


def test_two_processes_export_what_transformers_loads_with_equal_log_probs(seen):
    """The exported weights in transformers against the checkpoint of the same run, resumed here.
    fp32: 1e-5, two small layers of large weights.
    """
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        seen["directory"] / "export", dtype=torch.float32
    )
    ours = load_model(seen["directory"] / "export", dtype=torch.float32)
    ids = torch.randint(64, (2, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        log_probs = ours.logits(ours(ids).flatten(0, 1)).log_softmax(-1).view(2, 30, -1)
        assert (theirs(ids).logits.log_softmax(-1) - log_probs).abs().max() <= 1e-5
    world = World()
    model = load_sharded(GOLDEN / "tied_tf5", world, dtype=torch.float32, bf16=False)
    optimizer = optimizer_of(model)
    load_checkpoint(seen["directory"] / "by two", model, optimizer, world)
    losses(model, optimizer, range(BEFORE, BEFORE + AFTER), world)
    difference = max(
        (a.full_tensor() - b).abs().max().item()
        for a, b in zip(model.parameters(), ours.parameters(), strict=True)
    )
    world.close()
    assert difference <= 1e-5  # weights of two processes and of one after six steps of Adam


def test_nodes_that_share_no_folder_are_told(seen):
    """Each process has a folder of its own, as with a scratch disk of the same name
    on each node.
    """
    for rank in seen["ranks"]:
        assert (
            "ranks [1] do not see" in rank["not shared"]
            and "one shared folder" in rank["not shared"]
        )
