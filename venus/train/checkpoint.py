"""Checkpoints that appear whole or not at all, and models that are read and written in shards, no
process holding more than its own and a tensor.

A checkpoint is torch.distributed.checkpoint into step_N.tmp, a rename, then the `latest` file: a
run killed at any moment finds the one before. The directory must be shared by all processes, on
every node.
"""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from venus.cli import RunFailed
from venus.files import replacing, write_json
from venus.model.qwen3 import Qwen3
from venus.model.weights import (
    copy_tokenizer_files,
    is_export_file,
    meta_model,
    read_weights,
    write_weights,
)
from venus.train.parallel import World, shard

if TYPE_CHECKING:  # slow to import: a function that needs more than the name does it itself
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.tensor import DTensor

TIED_HEAD = "lm_head.weight"
SAMPLE_TOKENS = 33
# mean |difference|, nats: rounding the weights moves it so much
LOG_PROB_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.01}


def save_checkpoint(
    directory: str | Path,
    step: int,
    model: Qwen3,
    optimizer: torch.optim.Optimizer,
    world: World,
    *,
    keep: int,
    extra: dict,
) -> None:
    """Write the state after `step` batches to directory/step_N and point `latest` at it; all but
    the last `keep` go afterwards. A collective.

    Saved are weights, optimizer, every rank's random state and `extra` (plain JSON). RunFailed when
    it cannot be written.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    directory = Path(directory)
    name = f"step_{step}"
    temporary = directory / f"{name}.tmp"
    if world.is_main:
        directory.mkdir(parents=True, exist_ok=True)
        for half_written in directory.glob("step_*.tmp"):  # by a run that was killed
            shutil.rmtree(half_written)
    world.barrier()
    state = _state_of(model, optimizer)
    if model.config.tie_word_embeddings:
        del state["model"][TIED_HEAD]  # the embedding under a second name
    state[f"rng_{world.rank}"] = _random_state(world)
    try:
        dcp.save(state, checkpoint_id=temporary)
    except CheckpointException as error:  # on every rank
        raise RunFailed(
            f"{temporary}: {_reason(error)!r}; the checkpoint before is unharmed"
        ) from None
    world.barrier()
    if world.is_main:
        write_json(temporary / "extra.json", extra)
        shutil.rmtree(directory / name, ignore_errors=True)
        os.replace(temporary, directory / name)
        with replacing(directory / "latest") as latest:
            latest.write_text(name + "\n", encoding="utf-8")
        _remove_old(directory, step, keep)
    world.barrier()


def load_checkpoint(
    directory: str | Path,
    model: Qwen3,
    optimizer: torch.optim.Optimizer | None,
    world: World,
    *,
    settings: dict | None = None,
) -> tuple[int, dict]:
    """Restore weights, optimizer and random state in place, at any world size; return the number of
    batches done and the `extra` saved with them.

    (0, {}) when there is no checkpoint. optimizer None restores the weights only. settings: what
    must equal extra["settings"]. ValueError when `latest` names a checkpoint that is not there,
    that is damaged, or that is of other settings (the field is named) or another model.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict

    directory = Path(directory)
    path = _latest(directory)
    if path is None:
        return 0, {}
    try:
        extra = json.loads((path / "extra.json").read_text(encoding="utf-8"))
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except (ValueError, EOFError, pickle.UnpicklingError) as error:
        raise _damaged(path, error) from None
    if settings is not None:
        # JSON has no tuples
        _check_settings(directory, extra.get("settings", {}), json.loads(json.dumps(settings)))
    step = int(path.name.removeprefix("step_"))
    if optimizer is None:
        state = {"model": state_dict.get_model_state_dict(model)}
        _read_state(path, state, model)
        state_dict.set_model_state_dict(model, state["model"])
        return step, extra
    state = _state_of(model, optimizer)
    mine = f"rng_{world.rank}"
    rng = {name: x for name, x in _random_state(world).items() if f"{mine}.{name}" in saved}
    if rng:
        state[mine] = rng
    _read_state(path, state, model)
    state_dict.set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    _set_random_state(rng, step, world)
    return step, extra


def load_sharded(directory: str | Path, world: World, *, dtype: torch.dtype, bf16: bool) -> Qwen3:
    """The model of a Hugging Face directory, sharded: each rank reads its own rows only, and nobody
    ever holds the whole.

    bf16: see `shard`. ValueError: as `read_weights`.
    """
    model = empty_sharded(directory, world, dtype=dtype, bf16=bf16)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, rows in read_weights(directory, model, lambda name: _own_rows(parameters[name])):
            parameters[name].to_local().copy_(rows)
    return model


def empty_sharded(directory: str | Path, world: World, *, dtype: torch.dtype, bf16: bool) -> Qwen3:
    """The sharded model of a directory's config.json, its weights allocated and not set."""
    model = shard(meta_model(directory).to(dtype), world, bf16=bf16).to_empty(device=world.device)
    assert (
        not model.config.tie_word_embeddings
        or model.lm_head.weight is model.model.embed_tokens.weight
    ), "the tied head came apart"
    return model


def export_model(
    model: Qwen3, source: str | Path, directory: str | Path, *, dtype: torch.dtype, world: World
) -> None:
    """Write a Hugging Face directory: weights gathered tensor by tensor, config, and the source's
    tokenizer files unchanged. A collective.

    It is written beside, read back, and takes the place of `directory` when it gives the log-probs
    of `model`; RunFailed when it does not. ValueError for a directory that holds something else, or
    the source.
    """
    from torch.distributed.tensor import DTensor

    directory = Path(directory)
    check_export(source, directory)
    temporary = directory.with_name(directory.name + ".tmp")
    tensors = (
        (name, p.full_tensor() if isinstance(p, DTensor) else p)
        for name, p in ((n, p.detach()) for n, p in model.named_parameters())
    )
    if world.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        write_weights(model.config, tensors, temporary, dtype=dtype)
        copy_tokenizer_files(source, temporary)
    else:
        for _ in tensors:
            pass
    world.barrier()
    exported = load_sharded(temporary, world, dtype=dtype, bf16=False)
    differences = _sample_log_probs(model, world) - _sample_log_probs(exported, world)
    difference = world.sum(differences.abs().mean().item()) / world.size
    if not difference <= LOG_PROB_TOLERANCE[dtype]:  # NaN is an error as well
        raise RunFailed(
            f"{temporary}: the exported model's log-probs differ by {difference:.3g} nats "
            "from those of the model in training"
        )
    if world.is_main:
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(temporary, directory)
    world.barrier()


def check_export(source: str | Path, directory: Path) -> None:
    """ValueError when an export to `directory` would replace the source, or files
    that no export wrote.
    """
    if directory.resolve() == Path(source).resolve():
        raise ValueError(
            f"{directory}: is the model that the run starts from; export to another directory"
        )
    foreign = (
        [path.name for path in directory.iterdir() if not is_export_file(path)]
        if directory.exists()
        else []
    )
    if foreign:
        raise ValueError(
            f"{directory}: holds {foreign[0]}, which no export wrote; export to another directory"
        )


def check_shared(directory: str | Path, world: World) -> None:
    """ValueError on all ranks, naming those that do not see the files of rank 0 under `directory`,
    which is made. A collective.
    """
    token = Path(directory) / f".shared-{world.gather([os.urandom(8).hex()])[0]}"
    if world.is_main:
        token.parent.mkdir(parents=True, exist_ok=True)
        token.touch()
    world.barrier()
    blind = world.gather([] if token.exists() else [world.rank])
    if world.is_main:
        token.unlink()
    if blind:
        raise ValueError(
            f"{directory}: ranks {blind} do not see what rank 0 writes there; all nodes need "
            "one shared folder"
        )


def _latest(directory: Path) -> Path | None:
    """The checkpoint to resume from: the one `latest` names, or the newest when the first save was
    cut off before `latest` was there.
    """
    latest = directory / "latest"
    if not latest.is_file():
        return max(_whole(directory), default=(0, None))[1]
    path = directory / latest.read_text(encoding="utf-8").strip()
    if path not in (whole for _, whole in _whole(directory)):
        raise ValueError(
            f"{latest}: names {path.name}, which is not a whole checkpoint; remove {latest} "
            "to resume from the newest one that is"
        )
    return path


def _state_of(model: Qwen3, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def _read_state(path: Path, state: dict, model: Qwen3) -> None:
    """Read a checkpoint into the tensors of `state`, in place. A collective."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    if model.config.tie_word_embeddings:
        head = state["model"].pop(TIED_HEAD)
    try:
        dcp.load(state, checkpoint_id=path)
    except CheckpointException as error:  # on every rank
        raise _damaged(path, _reason(error)) from None
    if model.config.tie_word_embeddings:
        # shares the embedding's storage, which has just been read into
        state["model"][TIED_HEAD] = head


def _remove_old(directory: Path, step: int, keep: int) -> None:
    """Remove all checkpoints but the last `keep` up to `step`; later ones are of a run that went
    back.
    """
    whole = _whole(directory)
    kept = sorted(item for item in whole if item[0] <= step)[-keep:]
    for _, path in set(whole) - set(kept):
        shutil.rmtree(path)


def _whole(directory: Path) -> list[tuple[int, Path]]:
    """(number, path) of the whole checkpoints, in no order."""
    paths = [
        path
        for path in directory.glob("step_*")
        if (path / ".metadata").is_file() and (path / "extra.json").is_file()
    ]
    named = [(path.name.removeprefix("step_"), path) for path in paths]
    # neither step_9.tmp nor a copy kept as step_9.good
    return [(int(number), path) for number, path in named if number.isdecimal()]


def _check_settings(directory: Path, saved: dict, settings: dict) -> None:
    for name in saved | settings:
        before, now = saved.get(name), settings.get(name)
        if before != now:
            raise ValueError(
                f"{directory}: made with {name} {before!r}, not {now!r}; resume with the "
                "same settings or give another --output"
            )


def _random_state(world: World) -> dict[str, torch.Tensor]:
    return {"cpu": torch.get_rng_state()} | (
        {"cuda": torch.cuda.get_rng_state()} if world.device.type == "cuda" else {}
    )


def _set_random_state(state: dict[str, torch.Tensor], step: int, world: World) -> None:
    """Go on with the saved noise; a rank that was not there before starts its own."""
    if not state:
        torch.manual_seed(1_000_003 * step + world.rank)
        return
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _own_rows(parameter: "DTensor") -> slice:
    """The rows of this rank's shard: FSDP cuts the first dimension into ceil(rows / ranks) each, so
    that the last ranks have fewer or none.
    """
    size = -(-parameter.shape[0] // parameter.device_mesh.size())
    rank = parameter.device_mesh.get_local_rank()
    return slice(min(rank * size, parameter.shape[0]), min((rank + 1) * size, parameter.shape[0]))


def _sample_log_probs(model: Qwen3, world: World) -> torch.Tensor:
    """fp32 log-probs of a fixed short sequence. A collective."""
    ids = (
        torch.arange(SAMPLE_TOKENS, device=world.device)[None] * 997 + 1
    ) % model.config.vocab_size
    with torch.no_grad():
        return model.token_log_probs(ids[:, :-1], ids[:, 1:], torch.ones_like(ids[:, 1:]))


def _damaged(path: Path, reason: BaseException) -> ValueError:
    return ValueError(
        f"{path}: damaged, or the state of another model ({reason!r}); give another "
        "--output, or remove it to resume from the one before"
    )


def _reason(error: "CheckpointException") -> BaseException:
    return next(iter(error.failures.values()))[0]
