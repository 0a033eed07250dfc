"""Process groups and FSDP2: one code path for every world size, one process included."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from venus.model import Qwen3

TIMEOUT = timedelta(minutes=20)
HOST_TIMEOUT = timedelta(hours=24)  # rollouts of one rank may take hours longer than those of another


class World:
    """This process's place: rank, size, device, and a host group for long waits. Under torchrun it is one of many, else it is alone."""

    def __init__(self):
        if torch.cuda.is_available():
            self.device = torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
            dist.init_process_group(backend, timeout=TIMEOUT, **alone)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.host_group = dist.new_group(backend="gloo", timeout=HOST_TIMEOUT)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, value: float) -> float:
        """The sum over all ranks, in fp64. A collective."""
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total, group=self.host_group)
        return total.item()

    def gather(self, items: list) -> list:
        """The lists of all ranks joined in the order of ranks, on every rank. A collective with a long timeout."""
        parts = [None] * self.size
        dist.all_gather_object(parts, items, group=self.host_group)
        return [item for part in parts for item in part]

    def barrier(self) -> None:
        dist.barrier(group=self.host_group)

    def close(self) -> None:
        dist.destroy_process_group()


def shard(model: Qwen3, *, bf16: bool) -> Qwen3:
    """Wrap every block, then the root, in FSDP2, in place. Build the optimizer afterwards: one built before would update nothing.

    Gradients are SUMmed over ranks (the losses are already divided by global counts). bf16: bf16 compute over fp32 masters, fp32 reduction.
    """
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False) if bf16 else MixedPrecisionPolicy()
    for unit in [*model.model.layers, model]:
        # resharding the root too: its default keeps it gathered after a no-grad pass, and the next forward then reads stale weights
        fully_shard(unit, mp_policy=policy, reshard_after_forward=True)
    for unit in fsdp_units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # the factor alone asks gloo for a reduction that it does not have
    for door in ("token_stats", "token_log_probs", "token_loss"):
        register_fsdp_forward_method(model, door)
    return model


def fsdp_units(model: torch.nn.Module) -> list[FSDPModule]:
    """The wrapped modules, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextlib.contextmanager
def unsharded(model: Qwen3) -> Iterator[Qwen3]:
    """Gather all weights once and keep them, so that ranks may run forwards of different number and length without a collective.

    No collective at the end either: it is safe when one rank has raised. Works on an unwrapped model too.
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
    """Scale the gradients to a global norm of at most `max_norm`, in place; return the norm before. A collective; NaN is NaN on all ranks."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
