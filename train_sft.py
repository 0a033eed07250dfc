"""Supervised fine-tuning on agent trajectories: the negative log-likelihood of the agent's own tokens (Eq. 1), environment tokens masked.

    python train_sft.py --model QWEN3_DIR --data ROWS.jsonl --output runs/sft
    torchrun --nproc_per_node=8 train_sft.py ...
"""

import hashlib
import math
import time
from array import array
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm

from kernels.launch import KERNELS, choose_kernel
from venus.batches import Document, batch_items, steps_per_epoch
from venus.checkpoint import export_model, load_checkpoint, save_checkpoint
from venus.cli import option, run
from venus.data import encode_rows
from venus.metrics import MetricsLogger
from venus.model import Qwen3, Qwen3Config, WeightedNLL
from venus.parallel import World, clip_gradients, shard
from venus.plan import readable_bytes, training_bytes, training_flops
from venus.record import print_plan, save_run
from venus.tokenizer import ChatTokenizer
from venus.updates import backward, with_weights
from venus.weights import load_model


@dataclass(frozen=True)
class SftConfig:
    # data and model
    model: str = option(help="Hugging Face directory: config.json, tokenizer.json, safetensors")
    data: str = option(help="SFT rows {question, gt, messages}: a .json or .jsonl file or a directory of them")
    output: str = option(help="directory of checkpoints, metrics and the exported model")
    init: str = option("weights", help="start from the model's weights, or at random", choices=("weights", "random"))
    max_length: int = option(200_000, help="longer rows are left out, and counted", unit="tokens")
    resample: str = option("on", help="on: a row stands in an epoch as often as its `weight` says; off: once", choices=("on", "off"))
    # optimisation
    epochs: float = option(1.0, help="passes over the data")
    batch_size: int = option(32, help="trajectories per optimizer step, over all processes")
    lr: float = option(1e-5, help="peak learning rate")
    min_lr_ratio: float = option(0.0, help="learning rate at the end of the cosine, as a share of the peak")
    warmup_ratio: float = option(0.1, help="share of the steps with linear warm-up")
    beta1: float = option(0.9, help="AdamW")
    beta2: float = option(0.95, help="AdamW")
    weight_decay: float = option(0.01, help="AdamW")
    clip_norm: float = option(1.0, help="largest global gradient norm")
    loss_norm: str = option("token", help="mean over all loss tokens of a step, or over its sequences' token means", choices=("token", "sequence"))
    max_tokens_per_micro_batch: int = option(32_768, help="packed tokens of one forward pass; a longer row runs alone", unit="tokens")
    kernel: str = option("auto", help="auto is Triton on CUDA and torch elsewhere; which one it was stands in run.json", choices=KERNELS)
    # run
    threads: int | None = option(None, help="CPU threads; empty is one per core, which for tiny models on a busy machine is slower than 1")
    seed: int = option(0, help="seed of the random start and of the order of rows")
    save_every: int = option(100, help="steps between checkpoints; a run resumes from the latest", unit="steps")
    log_every: int = option(1, help="steps between console lines; metrics.jsonl has every step", unit="steps")
    tensorboard: bool = option(False, help="also write TensorBoard events (needs tensorboard installed)")
    dry_run: bool = option(False, help="print the resolved config and the plan, and exit")

    def validate(self):
        for name in ("batch_size", "save_every", "log_every", "max_tokens_per_micro_batch", "threads", "epochs", "lr"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"{name} {getattr(self, name)}: must be positive")


@record
def main(cfg: SftConfig) -> None:
    """Encode the rows, then one optimizer step per batch; checkpoints on the way, a Hugging Face directory at the end."""
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    tokenizer = ChatTokenizer(cfg.model)
    tokenizer.check_fits(Qwen3Config.read(cfg.model).vocab_size)
    documents, weights, num_long = read_documents(cfg, tokenizer)
    num_steps = max(1, round(cfg.epochs * steps_per_epoch(weights, cfg.batch_size)))
    batch_items(weights, cfg.batch_size, seed=cfg.seed, step=0)  # fails here, and not after loading, when copies must meet in a batch
    if cfg.dry_run:
        print_plan(cfg, plan(cfg, documents, num_long, num_steps))
        return
    world, output = World(), Path(cfg.output)
    kernel = choose_kernel(cfg.kernel, world.device)
    bf16 = world.device.type == "cuda"
    model = shard(start_model(cfg).to(world.device), bf16=bf16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), weight_decay=cfg.weight_decay)
    first_step = load_checkpoint(output / "checkpoints", model, optimizer)
    if world.is_main:
        if first_step:
            print(f"{output}: resuming after step {first_step} of {num_steps}")
        save_run(cfg, output, world_size=world.size, device=str(world.device), kernel=kernel)
    console = ("loss", "lr", "grad_norm", "loss_tokens_per_second")
    metrics = MetricsLogger(output, enabled=world.is_main, start_step=first_step, console=console, tensorboard=cfg.tensorboard, write=tqdm.write)

    for step in tqdm(range(first_step, num_steps), initial=first_step, total=num_steps, desc="sft", unit="step", disable=not world.is_main or None):
        started = time.monotonic()
        batch = [documents[i] for i in batch_items(weights, cfg.batch_size, seed=cfg.seed, step=step)]
        results = backward(
            model, with_weights(batch, cfg.loss_norm), lambda fields: WeightedNLL(fields["weights"]),
            max_tokens=cfg.max_tokens_per_micro_batch, world=world, kernel=kernel,
        )  # fmt: skip
        grad_norm = clip_gradients(model, cfg.clip_norm)
        if not math.isfinite(grad_norm):
            raise ValueError(f"step {step}: gradient norm {grad_norm}; the last checkpoint is unharmed: lower --lr or look at the batch")
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(cfg, step, num_steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss_tokens = sum(int(sum(document.per_token["mask"])) for document in batch)
        metrics.log(step, {
            "loss": world.sum(sum(result.loss.item() for result, _ in results)), "lr": group["lr"], "grad_norm": grad_norm, "loss_tokens": loss_tokens,
            "tokens": sum(len(document.ids) for document in batch), "loss_tokens_per_second": loss_tokens / (time.monotonic() - started),
        }, show=(step + 1) % cfg.log_every == 0 or step + 1 == num_steps)  # fmt: skip
        if (step + 1) % cfg.save_every == 0 or step + 1 == num_steps:
            save_checkpoint(output / "checkpoints", step + 1, model, optimizer, world)
    export_model(model, cfg.model, output / "model", dtype=torch.bfloat16 if bf16 else torch.float32, world=world)
    metrics.close()
    world.close()


def read_documents(cfg: SftConfig, tokenizer: ChatTokenizer) -> tuple[list[Document], list[int], int]:
    """Tokenise the rows once: ids and a mask that is 1 on the assistant spans.

    Returns the rows kept, how often each stands in an epoch, and the number of rows too long. Equal rows are copies of one trajectory,
    written out, and become one document, so that they cannot share a batch.
    """
    documents, weights, places, num_long = [], [], {}, 0
    for row, encoded in tqdm(encode_rows(cfg.data, tokenizer), desc="tokenise", unit="row", disable=None, leave=False):
        if len(encoded.ids) > cfg.max_length:
            num_long += 1
            continue
        mask = [0.0] * len(encoded.ids)
        for start, end in encoded.spans:
            mask[start:end] = [1.0] * (end - start)
        place = places.setdefault(hashlib.sha256(array("l", encoded.ids)).digest(), len(documents))
        if place == len(documents):
            documents.append(Document(encoded.ids, {"mask": mask}))
            weights.append(0)
        weights[place] += whole_weight(row)
    if cfg.resample == "off":
        weights = [min(1, weight) for weight in weights]
    if not any(weights):
        raise ValueError(f"{cfg.data}: no row with a weight and at most {cfg.max_length} tokens ({num_long} longer ones)")
    return documents, weights, num_long


def whole_weight(row: dict) -> int:
    """How often a row stands in an epoch."""
    weight = row.get("weight", 1)
    if weight != int(weight):
        raise ValueError(f"weight {weight} of the row on {row['question'][:60]!r}: an epoch holds a row a whole number of times")
    return int(weight)


def start_model(cfg: SftConfig) -> Qwen3:
    """fp32 masters: at lr 1e-5 and below a bf16 weight does not move."""
    if cfg.init == "weights":
        return load_model(cfg.model, dtype=torch.float32)
    model = Qwen3(Qwen3Config.read(cfg.model))
    model.init_weights(cfg.seed)
    return model


def learning_rate(cfg: SftConfig, step: int, num_steps: int) -> float:
    """Linear warm-up that starts above 0, then a cosine to min_lr_ratio * lr."""
    warmup = int(cfg.warmup_ratio * num_steps)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def plan(cfg: SftConfig, documents: list[Document], num_long: int, num_steps: int) -> list[tuple[str, object]]:
    """What the run would do, for --dry-run."""
    config = Qwen3Config.read(cfg.model)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Qwen3(config).parameters())
    tokens = sum(len(document.ids) for document in documents)
    longest = max(len(document.ids) for document in documents)
    memory = training_bytes(
        parameters=parameters, world_size=1, layers=config.num_hidden_layers, hidden=config.hidden_size,
        tokens=max(longest, min(tokens, cfg.max_tokens_per_micro_batch)), reference=False, bf16=torch.cuda.is_available(),
    )  # fmt: skip
    per_epoch = training_flops(parameters=parameters, tokens=tokens)
    return [
        ("parameters", f"{parameters:,}"), ("rows", f"{len(documents):,} kept, {num_long:,} longer than --max-length"),
        ("tokens", f"{tokens:,} an epoch, longest row {longest:,}"), ("loss tokens", f"{int(sum(sum(d.per_token['mask']) for d in documents)):,}"),
        ("steps", f"{num_steps:,} of {cfg.batch_size} rows"), ("compute", f"{per_epoch * cfg.epochs:.3g} FLOP without attention"),
        *((f"memory, {name}", readable_bytes(count)) for name, count in memory.items()), ("memory, total", readable_bytes(sum(memory.values()))),
    ]  # fmt: skip


if __name__ == "__main__":
    run(main, SftConfig, "Supervised fine-tuning on agent trajectories.")
