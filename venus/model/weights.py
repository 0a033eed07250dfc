"""Hugging Face safetensors <-> Qwen3: strict in both directions, streaming, the tied head
absent from the file.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from venus.files import write_json
from venus.model.qwen3 import Qwen3, Qwen3Config

SHARD_BYTES = 5 * 10**9
FINGERPRINT_BYTES = 1 << 20
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_model(
    directory: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Qwen3:
    """Build the Qwen3 of a Hugging Face directory and read its weights tensor by tensor (peak
    memory: the model and one tensor).

    dtype None keeps the file's. ValueError: as `read_weights`.
    """
    model = meta_model(directory)
    for name, tensor in read_weights(directory, model):
        _assign(model, name, tensor.to(device=device, dtype=dtype or tensor.dtype))
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def meta_model(directory: str | Path) -> Qwen3:
    """The Qwen3 of a directory's config.json, without storage."""
    with torch.device("meta"):
        return Qwen3(Qwen3Config.read(directory))


def read_weights(
    directory: str | Path, model: Qwen3, rows_of: Callable[[str], slice] = lambda name: slice(None)
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for every parameter of `model`, a tied head once: of each only the rows
    (first dimension) that `rows_of` names are read.

    ValueError, before anything is read, lists missing, unexpected and wrong-shape tensors, or
    names a broken file.
    """
    directory = Path(directory)
    files = weight_files(directory)
    # a tied lm_head is not listed twice
    wanted = {name: parameter.shape for name, parameter in model.named_parameters()}
    found = _read_shapes(files)
    if (
        model.config.tie_word_embeddings
        and found.get("lm_head.weight") == wanted["model.embed_tokens.weight"]
    ):
        del found["lm_head.weight"]  # some writers store the tied head as well
    _check_names(directory, wanted, found)
    for path in files:
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (a safe_open is not iterable)
                if name in found:
                    yield name, shard.get_slice(name)[rows_of(name)]


def load_for_inference(directory: str | Path) -> Qwen3:
    """`load_model` where it runs best: bf16 on the first CUDA device when there is one,
    else fp32 on the CPU.
    """
    if torch.cuda.is_available():
        return load_model(directory, dtype=torch.bfloat16, device="cuda")
    return load_model(directory, dtype=torch.float32)


def save_model(
    model: Qwen3,
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config.json and safetensors (an index when more than one shard is needed) so that
    transformers loads the directory.

    Every file appears by rename, the index last. dtype None keeps the model's.
    """
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_weights(
        model.config,
        named.items(),
        directory,
        dtype=dtype or next(iter(named.values())).dtype,
        shard_bytes=shard_bytes,
    )


def write_weights(
    config: Qwen3Config,
    tensors,
    directory: str | Path,
    *,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """`save_model` for an iterable of (name, tensor) that is read once: peak memory
    is one shard.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shards, weight_map = [], {}
    shard, size = {}, 0
    for name, tensor in tensors:
        tensor = tensor.to(device="cpu", dtype=dtype).contiguous()
        num_bytes = tensor.numel() * tensor.element_size()
        if shard and size + num_bytes > shard_bytes:
            shards.append(_write_shard(shard, directory, len(shards)))
            shard, size = {}, 0
        shard[name] = tensor
        size += num_bytes
        weight_map[name] = len(shards)
    shards.append(_write_shard(shard, directory, len(shards)))
    total = len(shards)
    names = (
        ["model.safetensors"]
        if total == 1
        else [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    )
    for old in directory.glob("model*.safetensors*"):
        if old not in shards:
            # a stale shard or index of an earlier save would be read with the new ones
            old.unlink()
    for temporary, name in zip(shards, names, strict=True):
        os.replace(temporary, directory / name)
    name = {torch_dtype: key for key, torch_dtype in DTYPES.items()}[dtype]
    write_json(directory / "config.json", config.to_dict() | {"dtype": name, "torch_dtype": name})
    if total > 1:
        write_json(
            directory / "model.safetensors.index.json",
            {"metadata": {}, "weight_map": {k: names[i] for k, i in weight_map.items()}},
        )


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def copy_tokenizer_files(source: str | Path, directory: str | Path) -> None:
    """Copy the tokenizer files, generation config and chat template that `source`
    has, unchanged.
    """
    for name in TOKENIZER_FILES:
        if (Path(source) / name).is_file() and Path(source).resolve() != Path(directory).resolve():
            shutil.copyfile(Path(source) / name, Path(directory) / name)


def is_export_file(path: Path) -> bool:
    """Whether `write_weights` or `copy_tokenizer_files` write files of this name."""
    return path.name in (*TOKENIZER_FILES, "config.json") or path.match("model*.safetensors*")


def fingerprint(directory: str | Path) -> str:
    """16 hex digits that change with the weights: sizes, beginnings and ends of the safetensors
    files, not every byte of them.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in weight_files(Path(directory)):
        size = path.stat().st_size
        with path.open("rb") as handle:
            digest.update(f"{path.name} {size}\n".encode() + handle.read(FINGERPRINT_BYTES))
            handle.seek(max(0, size - FINGERPRINT_BYTES))
            digest.update(handle.read())
    return digest.hexdigest()


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory, by its index when there is one. ValueError
    when a file is missing.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index}: not a safetensors index ({error!r})") from None
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ValueError(
                f"{directory}: the index names {', '.join(missing)}, absent: copy the "
                "missing shards"
            )
        return [directory / name for name in names]
    if not (directory / "model.safetensors").is_file():
        raise ValueError(f"{directory}: no model.safetensors and no model.safetensors.index.json")
    return [directory / "model.safetensors"]


def _read_shapes(files: list[Path]) -> dict[str, torch.Size]:
    shapes = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118
                    tensor = shard.get_slice(name)
                    if tensor.get_dtype() not in ("BF16", "F16", "F32"):
                        raise ValueError(
                            f"{path}: {name} is {tensor.get_dtype()}; Venus reads bf16, fp16 "
                            "and fp32 weights"
                        )
                    shapes[name] = torch.Size(tensor.get_shape())
        except SafetensorError as error:
            raise ValueError(f"{path}: truncated or not a safetensors file ({error})") from None
    return shapes


def _check_names(
    directory: Path, wanted: dict[str, torch.Size], found: dict[str, torch.Size]
) -> None:
    problems = [f"missing {name}" for name in sorted(wanted.keys() - found.keys())]
    problems += [f"unexpected {name}" for name in sorted(found.keys() - wanted.keys())]
    problems += [
        f"{n} is {list(found[n])}, not {list(wanted[n])}"
        for n in sorted(wanted.keys() & found.keys())
        if wanted[n] != found[n]
    ]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(
            f"{directory}: the weights do not fit config.json: {'; '.join(problems[:8])}{more}"
        )


def _assign(model: Qwen3, name: str, tensor: Tensor) -> None:
    module_name, _, parameter_name = name.rpartition(".")
    setattr(model.get_submodule(module_name), parameter_name, torch.nn.Parameter(tensor))


def _write_shard(shard: dict[str, Tensor], directory: Path, index: int) -> Path:
    path = directory / f".venus-shard-{index}.tmp"
    save_file(shard, path, metadata={"format": "pt"})
    return path
