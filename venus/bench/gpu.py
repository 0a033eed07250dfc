"""`python -m venus.bench gpu`: a 4B-shaped model with random weights on one GPU: training steps
against the plan, decoding against the memory's limit.

`--shape tiny` runs the same code anywhere, for its own sake. Results go to a JSON file as
well. Shapes: S sequence.
"""

import gc
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from venus.cli import Options, option
from venus.model.attention import Layout
from venus.model.costs import (
    BANDWIDTH,
    Training,
    kv_bytes,
    mfu,
    num_parameters,
    training_flops,
    training_memory,
)
from venus.model.qwen3 import QWEN3_4B, Qwen3, Qwen3Config, WeightedNLL, set_recompute
from venus.rollout.sampler import Generation, Sampler, SamplingParams
from venus.runlog import machine
from venus.train.backward import backward, with_weights
from venus.train.batches import Document
from venus.train.parallel import World, clip_gradients, shard

LOSS_SHARE = 0.24  # of the released SFT tokens
STEPS = 3  # of training at every size; the first compiles
WARM_UP = 8  # decode steps before the clock starts: compilation and the graph's capture


@dataclass(frozen=True)
class GpuShape:
    """The model, tokens of the training steps, rows, context and new tokens of the decoding."""

    config: Qwen3Config
    training: tuple[int, ...]
    rows: int
    context: int
    new_tokens: int


GPU_SHAPES = {
    "4b": GpuShape(QWEN3_4B, (8192, 32_768), 16, 30_000, 72),
    "tiny": GpuShape(
        Qwen3Config(512, 64, 160, 2, 4, 2, 16, 1e-6, 1e4, 4096, True, "float32"),
        (64, 128),
        4,
        40,
        12,
    ),
}


@dataclass(frozen=True)
class GpuConfig(Options):
    """What is measured and where it goes."""

    shape: str = option(
        "4b", group="measurement", help="model and sizes", choices=tuple(GPU_SHAPES)
    )
    json: str | None = option(None, help="file of the results")


def gpu(cfg: GpuConfig) -> None:
    """Train, then decode; print and save every figure as it comes."""
    if cfg.shape == "4b" and not torch.cuda.is_available():
        raise ValueError("shape 4b needs a CUDA device; --shape tiny runs anywhere")
    shape = GPU_SHAPES[cfg.shape]
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(f"{machine()}; {name}")
    world, found = World(), {"machine": machine(), "device": name, "shape": cfg.shape, "rows": []}
    for row in chain(train(shape, world, name), decode(shape, world, name)):
        print(row, flush=True)
        found["rows"].append(row)
        if cfg.json:
            Path(cfg.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    world.close()


def random_weights(config: Qwen3Config, device: torch.device, dtype: torch.dtype) -> Qwen3:
    """Made on the device, where four billion numbers take no time."""
    with torch.device(device):
        model = Qwen3(config).to(dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1) if "norm" in name else parameter.normal_(
                std=parameter.shape[1] ** -0.5
            )
    return model


def synchronised(device: torch.device) -> float:
    """The time, once the device has caught up."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def train(shape: GpuShape, world: World, name: str) -> Iterator[dict]:
    """Whole optimizer steps with recomputation on one document of each size: tokens/s, MFU, and the
    memory's peak beside the plan's.
    """
    is_cuda = world.device.type == "cuda"
    model = shard(random_weights(shape.config, world.device, torch.float32), world, bf16=is_cuda)
    set_recompute(model, "on")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=is_cuda)
    for tokens in shape.training:
        ids = torch.randint(
            shape.config.vocab_size, (tokens + 1,), generator=torch.Generator().manual_seed(0)
        ).tolist()
        mask = (torch.arange(tokens + 1) % 100 < 100 * LOSS_SHARE).float()
        documents = with_weights([Document(ids, {"mask": mask})], "token")
        seconds = []
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(STEPS):
            started = synchronised(world.device)
            backward(
                model,
                documents,
                lambda fields: WeightedNLL(fields["weights"]),
                max_tokens=tokens + 1,
                world=world,
            )
            clip_gradients(model, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seconds.append(synchronised(world.device) - started)
        flops = training_flops(shape.config, [tokens], int(mask[1:].sum()))
        setting = Training(
            world_size=1,
            sp=1,
            max_tokens=tokens,
            longest=tokens,
            recompute="on",
            reference=False,
            bf16=is_cuda,
        )
        yield {
            "part": "train",
            "tokens": tokens,
            "seconds": median(seconds[1:]),
            "tokens_per_second": tokens / median(seconds[1:]),
            "mfu": mfu(flops, median(seconds[1:]), world_size=1, device_name=name),
            "planned_bytes": sum(training_memory(shape.config, setting).values()),
            "peak_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
        }


def decode(shape: GpuShape, world: World, name: str) -> Iterator[dict]:
    """Rows with pages of their own decode at a long context: tokens/s, the share of what the
    memory's bandwidth allows, the gap to the trainer.
    """
    is_cuda = world.device.type == "cuda"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    if is_cuda:
        gc.collect()  # wrapped modules refer to each other; a KV pool takes what is free
        torch.cuda.empty_cache()
    model = random_weights(shape.config, world.device, dtype).requires_grad_(False)
    generator, size = torch.Generator().manual_seed(0), (shape.rows, shape.context)
    prompts_BS = torch.randint(shape.config.vocab_size, size, generator=generator)
    for kernel in ("triton", "varlen") if is_cuda else ("torch",):
        sampler = Sampler(
            model,
            SamplingParams(()),
            num_slots=shape.rows,
            capacity=shape.context + shape.new_tokens,
            kv_cache="paged",
            decode_kernel=kernel,
            cuda_graph=is_cuda,
        )
        done, seconds = time_decoding(sampler, prompts_BS, shape.new_tokens, world.device)
        step = median(seconds[WARM_UP:])
        weights_read = num_parameters(shape.config) * dtype.itemsize
        read = weights_read + shape.rows * kv_bytes(shape.config, shape.context, is_cuda)
        limits = [read / bandwidth for gpu, bandwidth in BANDWIDTH.items() if gpu in name]
        first = min(done, key=lambda generation: generation.slot)
        gap = trainer_gap(model, prompts_BS[first.slot].tolist(), first, world.device)
        yield {
            "part": "decode",
            "kernel": kernel,
            "rows": shape.rows,
            "context": shape.context,
            "step_seconds": step,
            "tokens_per_second": shape.rows / step,
            "share_of_limit": limits[0] / step if limits else None,
            "gap_mean": gap.mean().item(),
            "gap_max": gap.max().item(),
        }


def time_decoding(
    sampler: Sampler, prompts_BS: Tensor, new_tokens: int, device: torch.device
) -> tuple[list[Generation], list[float]]:
    """Decode all rows to the end; return what was sampled and the seconds of every step."""
    for prompt in prompts_BS.tolist():
        slot = sampler.open()
        sampler.prefill(slot, prompt[:-1])
        sampler.feed(slot, prompt[-1:], budget=new_tokens, key=slot)
    done, seconds = [], []
    while sampler.rows:
        started = synchronised(device)
        done += sampler.step()
        seconds.append(synchronised(device) - started)
    assert sampler.num_decoded == len(prompts_BS) * len(seconds), (
        f"{sampler.num_decoded} tokens in {len(seconds)} steps: rows waited"
    )
    return done, seconds


def trainer_gap(
    model: Qwen3, prompt: list[int], generation: Generation, device: torch.device
) -> Tensor:
    """Return |log-prob when sampled - log-prob of a forward over the packed row| by token [L]."""
    ids_1S = torch.tensor([[*prompt, *generation.ids]], device=device)
    num_targets = ids_1S.shape[1] - 1
    sampled_1S = torch.arange(1, num_targets + 1, device=device)[None] >= len(prompt)
    layout = Layout.documents([num_targets])  # as a trainer packs it
    log_probs_1S = model.token_log_probs(ids_1S[:, :-1], ids_1S[:, 1:], sampled_1S, layout=layout)
    return (log_probs_1S[sampled_1S].cpu() - torch.tensor(generation.log_probs)).abs()
