"""Process groups and FSDP2: one code path for every world size, one process included.

The ranks form a grid (dp, sp). The sp ranks of a row hold neighbouring parts of one packed
sequence (`ulysses`); the dp rows hold different ones. FSDP shards the weights over all of them.
"""

import contextlib
import functools
import signal
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store

from venus.cli import RunFailed
from venus.model.costs import check_heads
from venus.model.qwen3 import Qwen3

if TYPE_CHECKING:  # slow to import: only those who shard need it
    from torch.distributed.fsdp import FSDPModule

TIMEOUT = timedelta(minutes=20)
# rollouts of one rank may take hours longer than those of another
HOST_TIMEOUT = timedelta(hours=24)
STOP = "stop"  # the store's key that says a rank was asked to stop


class World:
    """This process's place: rank, size, device, and a host group for long waits. Under torchrun it
    is one of many, else it is alone.

    sp ranks share a sequence: rank = dp_rank * sp + sp_rank. ValueError when sp does not divide the
    number of processes.
    """

    def __init__(self, sp: int = 1):
        if torch.cuda.is_available():
            self.device = torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            if dist.is_torchelastic_launched():
                dist.init_process_group(backend, timeout=TIMEOUT)
            else:
                store = dist.HashStore()
                dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=0, world_size=1)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.sp = sp
        if sp < 1 or self.size % sp:
            raise ValueError(
                f"sp {sp}: does not divide the {self.size} process(es); start a multiple of "
                "sp with torchrun --nproc_per_node"
            )
        self.dp_rank, self.sp_rank = divmod(self.rank, sp)
        self.dp_size = self.size // sp
        self.mesh = init_device_mesh(self.device.type, (self.size,))  # (dp, sp) flattened
        self.sp_group = dist.new_subgroups(sp, timeout=TIMEOUT)[0] if sp > 1 else None
        self.host_group = dist.new_group(backend="gloo", timeout=HOST_TIMEOUT)
        self._store = _get_default_store()
        self._asked_to_stop = self._stopping = False

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, value: float) -> float:
        """The sum over all ranks, in fp64. A collective."""
        return self._reduce(value, dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        """The largest of all ranks, in fp64. A collective."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def _reduce(self, value: float, operation: dist.ReduceOp) -> float:
        result = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(result, operation, group=self.host_group)
        return result.item()

    def gather(self, items: list) -> list:
        """The lists of all ranks joined in the order of ranks, on every rank. A collective
        with a long timeout.
        """
        parts = [None] * self.size
        dist.all_gather_object(parts, items, group=self.host_group)
        return [item for part in parts for item in part]

    def barrier(self) -> None:
        dist.barrier(group=self.host_group)

    def check_alive(self, where: str, timeout: timedelta = TIMEOUT) -> None:
        """Meet all other ranks. RunFailed on rank 0 names those that did not come in time, and
        `where`. A collective.
        """
        try:
            dist.monitored_barrier(self.host_group, timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise RunFailed(f"{where}: a rank is dead or hung: {error}") from None

    def request_stop(self) -> None:
        """Ask every rank to stop at its next chance. Only sets a flag, so a signal
        handler may call it.
        """
        self._asked_to_stop = True

    def stop_requested(self) -> bool:
        """Whether any rank was asked to stop, as far as this one knows by now: not a collective,
        ranks may differ for a moment.
        """
        if self._asked_to_stop and not self._stopping:
            self._store.set(STOP, "")
        self._stopping = self._stopping or self._asked_to_stop or self._store.check([STOP])
        return self._stopping

    def stop_agreed(self) -> bool:
        """`stop_requested` on any rank, the same answer on all: what may decide about a
        collective. A collective.
        """
        return self.max(self.stop_requested()) > 0

    @contextlib.contextmanager
    def catch_signals(self) -> Iterator[None]:
        """Let SIGTERM and SIGINT request a stop; a second SIGINT interrupts at once, as usual.
        For the main thread.
        """

        def request(number, _frame):
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            self.request_stop()

        before = {
            number: signal.signal(number, request) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        dist.destroy_process_group()


def recorded(main):
    """torch's `record`, by which torchrun shows what a rank died of, around `main`; imported when
    that is called, so that --help does not pay for it.
    """

    @functools.wraps(main)
    def call(*args, **kwargs):
        from torch.distributed.elastic.multiprocessing.errors import record

        return record(main)(*args, **kwargs)

    return call


def shard(model: Qwen3, world: World, *, bf16: bool) -> Qwen3:
    """Wrap every block, then the root, in FSDP2, in place. Build the optimizer afterwards: one
    built before would update nothing.

    Gradients are SUMmed over ranks (the losses are already divided by global counts). bf16: bf16
    compute over fp32 masters, fp32 reduction. A model on the meta device stays there: `to_empty` it
    and fill in this rank's rows. ValueError: as `costs.check_heads`.
    """
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    check_heads(model.config, world.sp)
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        if bf16
        else MixedPrecisionPolicy()
    )
    for unit in [*model.model.layers, model]:
        # resharding the root too: its default keeps it gathered after a no-grad pass, and the next
        # forward then reads stale weights
        fully_shard(unit, mesh=world.mesh, mp_policy=policy, reshard_after_forward=True)
    for unit in fsdp_units(model):
        unit.set_gradient_divide_factor(1.0)
        # the factor alone asks gloo for a reduction that it does not have
        unit.set_force_sum_reduction_for_comms(True)
    for door in ("token_stats", "token_log_probs", "token_loss"):
        register_fsdp_forward_method(model, door)
    return model


def fsdp_units(model: torch.nn.Module) -> "list[FSDPModule]":
    """The wrapped modules, the root first."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextlib.contextmanager
def unsharded(model: Qwen3) -> Iterator[Qwen3]:
    """Gather all weights once and keep them, so that ranks may run forwards of different number and
    length without a collective.

    No collective at the end either: it is safe when one rank has raised. Works on an
    unwrapped model too.
    """
    units = fsdp_units(model)
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        with torch.no_grad():
            yield model
    finally:
        for unit in units:
            unit.reshard()
            unit.set_reshard_after_forward(True, recurse=False)


def clip_gradients(model: Qwen3, max_norm: float) -> float:
    """Scale the gradients to a global norm of at most `max_norm`, in place; return the norm before.
    A collective; NaN is NaN on all ranks.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
