"""Checkpoints that appear whole or not at all: torch.distributed.checkpoint into step_N.tmp, a rename, then the `latest` file."""

import os
import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from venus.model import Qwen3
from venus.parallel import World
from venus.weights import copy_tokenizer_files, write_weights


class _TrainState(Stateful):
    def __init__(self, model: Qwen3, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def save_checkpoint(directory: str | Path, step: int, model: Qwen3, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Write the state after `step` optimizer steps to directory/step_N and point `latest` at it; older ones go afterwards. A collective."""
    directory, name = Path(directory), f"step_{step}"
    temporary = directory / f"{name}.tmp"
    if world.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        directory.mkdir(parents=True, exist_ok=True)
    world.barrier()
    dcp.save({"train": _TrainState(model, optimizer)}, checkpoint_id=temporary)
    world.barrier()
    if world.is_main:
        shutil.rmtree(directory / name, ignore_errors=True)
        os.replace(temporary, directory / name)
        (directory / "latest.tmp").write_text(name + "\n", encoding="utf-8")
        os.replace(directory / "latest.tmp", directory / "latest")
        for old in directory.glob("step_*"):
            if old.name != name:
                shutil.rmtree(old)
    world.barrier()


def load_checkpoint(directory: str | Path, model: Qwen3, optimizer: torch.optim.Optimizer) -> int:
    """Restore model and optimizer in place from `latest`, at any world size, and return the number of steps done; 0 when there is none.

    ValueError when `latest` names a checkpoint that is not there, that is damaged, or that is of a model of another shape.
    """
    latest = Path(directory) / "latest"
    if not latest.is_file():
        return 0
    path = Path(directory) / latest.read_text(encoding="utf-8").strip()
    if not (path / ".metadata").is_file():
        raise ValueError(f"{latest}: names {path.name}, which is not a whole checkpoint; remove {latest} to start anew")
    try:
        dcp.load({"train": _TrainState(model, optimizer)}, checkpoint_id=path)
    except CheckpointException as error:  # on every rank
        reason = next(iter(error.failures.values()))[0]
        raise ValueError(f"{path}: damaged, or the state of another model ({reason!r}); give another --output or remove {path.parent}") from None
    return int(path.name.removeprefix("step_"))


def export_model(model: Qwen3, source: str | Path, directory: str | Path, *, dtype: torch.dtype, world: World) -> None:
    """Write a Hugging Face directory: weights gathered tensor by tensor, config, and the source's tokenizer files unchanged. A collective."""
    tensors = ((name, p.full_tensor() if isinstance(p, DTensor) else p) for name, p in ((n, p.detach()) for n, p in model.named_parameters()))
    if world.is_main:
        write_weights(model.config, tensors, directory, dtype=dtype)
        copy_tokenizer_files(source, directory)
    else:
        for _ in tensors:
            pass
    world.barrier()
