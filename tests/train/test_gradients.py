"""One process: the gradient table's first column, a model that starts on the meta device, what
recomputation keeps, and how a run is told to stop.
"""

import math
import os
import signal
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from gradient_table import ALONE, CASES, GOLDEN, UNEVEN, check_case, gradient, measure_table, nll
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import distribute_tensor

from venus.model import qwen3
from venus.model.qwen3 import WeightedNLL, set_recompute
from venus.model.weights import load_model
from venus.train.backward import backward, with_weights
from venus.train.batches import pack
from venus.train.parallel import World, shard
from venus.train.ulysses import split_sequence


@pytest.fixture(scope="module")
def world():
    world = World()
    yield world
    world.close()


@pytest.fixture(scope="module")
def table(world):
    return measure_table(world)


@pytest.mark.parametrize("case", CASES)
def test_one_process_has_the_gradient_of_one_forward_pass(table, case):
    """Trap 16: micro-batches, recomputation and sharding over one rank change
    nothing, for either mean.
    """
    check_case(table, case)


def test_one_process_is_a_world_too(world):
    """No torchrun, no ports: the same code path, the gradients bit-equal to the plain model's."""
    assert (
        world.rank,
        world.size,
        world.is_main,
        world.sp,
        world.dp_rank,
        world.dp_size,
        world.sp_rank,
    ) == (0, 1, True, 1, 0, 1, 0)
    sharded = shard(load_model(GOLDEN / "tied_tf5"), world, bf16=False)
    plain = load_model(GOLDEN / "tied_tf5")
    for model, place in ((sharded, world), (plain, ALONE)):
        backward(model, with_weights(UNEVEN, "token"), nll, max_tokens=30, world=place)
    assert torch.equal(gradient(sharded), gradient(plain))


@pytest.mark.parametrize("name", ["tied_tf5", "untied_tf4"])
def test_a_model_sharded_on_the_meta_device_is_the_same_once_its_rows_are_read(world, name):
    """The tie of embedding and head must survive: two tensors would be trained apart."""
    plain = load_model(GOLDEN / name)
    with torch.device("meta"):
        model = type(plain)(plain.config)
    shard(model, world, bf16=False).to_empty(device="cpu")
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), plain.parameters(), strict=True):
            parameter.to_local().copy_(
                distribute_tensor(value, world.mesh, parameter.placements).to_local()
            )
    for each, place in ((model, world), (plain, ALONE)):
        backward(each, with_weights(UNEVEN, "token"), nll, max_tokens=1000, world=place)
    assert torch.equal(gradient(model), gradient(plain))


# Recomputation


def tensors_kept(model, recompute):
    """The shapes of what a forward pass keeps for its backward."""
    set_recompute(model, recompute)
    packed, kept = pack(with_weights(UNEVEN, "token")), []
    with saved_tensors_hooks(
        lambda tensor: kept.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor
    ):
        model.token_loss(
            packed.ids_1N,
            packed.targets_1N,
            loss=WeightedNLL(packed.fields["weights"]),
            positions_BS=packed.positions_1N,
            layout=packed.layout,
        )
    return kept


@pytest.mark.parametrize(("recompute", "numbers"), [("on", 95 * 24), ("off", 104_000)])
def test_recomputation_keeps_the_input_of_a_block_and_nothing_of_its_inside(recompute, numbers):
    """What a second block adds. Per token of Qwen3-4B it is 5 KiB instead of 167."""
    model = load_model(GOLDEN / "tied_tf5")
    both = Counter(tensors_kept(model, recompute))
    model.model.layers = model.model.layers[:1]
    added = sum(
        math.prod(shape) for shape in (both - Counter(tensors_kept(model, recompute))).elements()
    )
    assert added == pytest.approx(numbers, rel=0.1 * (recompute == "off"))


class Recorder(saved_tensors_hooks):
    """What goes to the host, in the place of torch's `save_on_cpu`, which on a CPU copies nothing
    and so shows nothing.
    """

    def __init__(self, *, pin_memory):
        assert not pin_memory  # there is no device to copy from
        super().__init__(
            lambda tensor: self.moved.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor
        )

    moved = []


def test_offloading_moves_the_input_of_every_block_and_not_the_angles(monkeypatch):
    """cos and sin are the same in all 36 layers: as tensor arguments of a block they would go
    to the host 36 times.
    """
    monkeypatch.setattr(qwen3, "save_on_cpu", Recorder)
    model = load_model(GOLDEN / "tied_tf5")
    set_recompute(model, "offload")
    backward(model, with_weights(UNEVEN, "token"), nll, max_tokens=1000, world=ALONE)
    # torch 2.11 also moves an empty one
    assert [shape for shape in Recorder.moved if 0 not in shape] == [(1, 95, 24)] * 2


def test_without_gradients_nothing_is_recomputed():
    """A rollout under no_grad must not pay for it, and `checkpoint` knows no cache."""
    model = load_model(GOLDEN / "tied_tf5")
    ids = torch.tensor([UNEVEN[0].ids])
    with torch.no_grad():
        before = model(ids)
        set_recompute(model, "offload")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(qwen3, "checkpoint", None)
            assert torch.equal(model(ids), before)


def test_an_unknown_way_to_recompute_is_refused():
    with pytest.raises(ValueError, match="recompute 'yes': choose one of off, on, offload"):
        set_recompute(load_model(GOLDEN / "tied_tf5"), "yes")


# Sequence parallelism


def test_a_sequence_is_split_after_its_labels_were_shifted():
    """Split first, the last token of each part but one would lose its target. Positions go on, and
    attention still spans the whole.
    """
    whole = pack(with_weights(UNEVEN, "token"), multiple_of=4)
    parts = [
        split_sequence(whole, SimpleNamespace(sp=4, sp_rank=rank, sp_group=None))
        for rank in range(4)
    ]
    for name in ("ids_1N", "targets_1N", "positions_1N"):
        assert torch.equal(
            torch.cat([getattr(part, name) for part in parts], dim=1), getattr(whole, name)
        )
    for name, values in whole.fields.items():
        assert torch.equal(torch.cat([part.fields[name] for part in parts], dim=1), values)
    assert {part.ids_1N.shape for part in parts} == {(1, 24)} and {
        part.layout.spans for part in parts
    } == {whole.layout.spans}


def test_ranks_that_do_not_divide_the_query_heads_are_refused(world):
    with pytest.raises(
        ValueError,
        match=r"sp 3: does not divide the model's 4 query heads; choose one of \[1, 2, 4\]",
    ):
        shard(load_model(GOLDEN / "tied_tf5"), SimpleNamespace(sp=3), bf16=False)


@pytest.mark.parametrize("sp", [2, 0])
def test_ranks_that_do_not_divide_the_processes_are_refused(world, sp):
    with pytest.raises(ValueError, match=f"sp {sp}: does not divide the 1 process"):
        World(sp)


# Stopping


def test_a_signal_asks_for_a_stop_and_a_second_ctrl_c_interrupts(world):
    """Afterwards the signals do what they did before."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    with world.catch_signals():
        assert not world.stop_requested() and not world.stop_agreed()
        os.kill(os.getpid(), signal.SIGTERM)
        assert world.stop_requested() and world.stop_agreed()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in numbers] == before
