"""Supervised fine-tuning on agent trajectories: the negative log-likelihood of the agent's own
tokens (Eq. 1), environment tokens masked.

    python train_sft.py --model QWEN3_DIR --data ROWS.jsonl --output runs/sft
    torchrun --nproc_per_node=8 train_sft.py ...

The same command resumes, with any number of processes. Exit code 3: stopped by SIGTERM or
Ctrl-C, everything saved; 4: done, but the last updates were not finite and skipped.
"""

import dataclasses
import hashlib
import math
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from venus.cli import option, run
from venus.curation.formats import MAX_LENGTH, encode_rows
from venus.model.costs import memory_rows, num_parameters, recompute_flops, training_flops
from venus.model.qwen3 import QWEN3_4B, Qwen3, Qwen3Config, WeightedNLL, set_recompute
from venus.model.weights import fingerprint
from venus.runlog import print_plan
from venus.tokenizer import ChatTokenizer
from venus.train.backward import backward, padding_share, with_weights
from venus.train.batches import Document, batch_items, steps_per_epoch
from venus.train.checkpoint import load_sharded
from venus.train.loop import (
    OptimizerOptions,
    TrainingOptions,
    TrainingRun,
    compute_dtype,
    digest,
    export_latest,
)
from venus.train.parallel import World, recorded, shard
from venus.trajectory import span_mask


@dataclass(frozen=True)
class SftConfig(OptimizerOptions, TrainingOptions):
    """What the paper's SFT does, by default."""

    # README, "Ours, the paper, the released code": the mean of per-trajectory means
    PRESETS = {"released": {"loss_norm": "sequence"}}

    model: str | None = option(
        None,
        group="data and model",
        unless="dry_run",
        help="Hugging Face directory: config.json, tokenizer.json, safetensors",
    )
    data: str | None = option(
        None,
        unless="dry_run",
        help="SFT rows {question, gt, messages}: a .json or .jsonl file or a directory of them",
    )
    output: str | None = option(
        None, unless="dry_run", help="directory of checkpoints, metrics and the exported model"
    )
    init: str = option(
        "weights",
        help="start from the model's weights, or at random",
        choices=("weights", "random"),
    )
    max_length: int = option(
        MAX_LENGTH, help="longer rows are left out, and counted", unit="tokens", least=1
    )
    resample: str = option(
        "on",
        help="on: a row stands in an epoch as often as its `weight` says; off: once",
        choices=("on", "off"),
    )
    epochs: float = option(
        1.0, group="training", help="passes over the data", above=0, most=1_000_000
    )
    batch_size: int = option(
        32, help="trajectories per optimizer step, over all processes", least=1
    )
    loss_norm: str = option(
        "token",
        help="mean over all loss tokens of a step, or over its sequences' token means",
        choices=("token", "sequence"),
    )
    seed: int = option(0, help="seed of the random start and of the order of rows", least=0)
    lr: float = option(1e-5, group="optimizer", help="peak learning rate", above=0, most=1)
    min_lr_ratio: float = option(
        0.0,
        help="learning rate at the end of the cosine, as a share of the peak",
        least=0,
        most=1,
    )
    warmup_ratio: float = option(
        0.1, help="share of the steps with linear warm-up", least=0, most=1
    )
    beta2: float = option(0.95, help="AdamW: decay of the second moment", least=0, below=1)
    save_every: int = option(
        100,
        group="run",
        help="steps between checkpoints; a run resumes from the latest",
        unit="steps",
        least=1,
    )
    log_every: int = option(
        1,
        help="steps between console lines; metrics.jsonl has every step",
        unit="steps",
        least=1,
    )


@dataclass(frozen=True)
class Rows:
    """The data: documents, how often each stands in an epoch, the number of its first row, and how
    many rows were too long.
    """

    documents: list[Document]
    weights: list[int]
    numbers: list[int]
    num_long: int


@recorded
def main(cfg: SftConfig) -> int | None:
    """Encode the rows, then one optimizer step per batch; checkpoints on the way, a Hugging Face
    directory at the end.
    """
    cfg.set_threads()
    if cfg.export:
        return export_latest(cfg)
    if cfg.dry_run and not (cfg.model and cfg.data):
        config = Qwen3Config.read(cfg.model) if cfg.model else QWEN3_4B
        return dry_run(cfg, config, cfg.max_length, [])
    config, tokenizer = Qwen3Config.read(cfg.model), ChatTokenizer(cfg.model)
    tokenizer.check_fits(config.vocab_size)
    rows = read_rows(cfg, tokenizer)
    num_steps = max(1, round(cfg.epochs * steps_per_epoch(rows.weights, cfg.batch_size)))
    # fails here, and not after loading, when copies must meet in a batch
    batch_items(rows.weights, cfg.batch_size, seed=cfg.seed, step=0)
    longest = max(len(document.ids) for document in rows.documents)
    if cfg.dry_run:
        return dry_run(cfg, config, longest, plan(cfg, config, rows, num_steps))
    world = World(cfg.sp)
    bf16 = compute_dtype(world) == torch.bfloat16
    model = start_model(cfg, world, bf16)
    training = TrainingRun(
        cfg,
        model,
        world,
        settings=settings(cfg, config, rows),
        num_steps=num_steps,
        console=("loss", "lr", "grad_norm", "tokens_per_second"),
        extra={},
        spread=cfg.spread(world_size=world.size, longest=longest, reference=False, bf16=bf16),
    )
    with training.running():
        for step in training.steps("sft"):
            started = time.monotonic()
            # 1. the batch, with the weight of each of its tokens in the loss
            chosen = batch_items(rows.weights, cfg.batch_size, seed=cfg.seed, step=step)
            batch = with_weights([rows.documents[i] for i in chosen], cfg.loss_norm)
            # 2. the gradient of the negative log-likelihood
            results = backward(
                model,
                batch,
                lambda fields: WeightedNLL(fields["weights"]),
                max_tokens=cfg.max_tokens_per_gpu,
                world=world,
                kernel=training.kernel,
            )
            # 3. update
            lr = learning_rate(cfg, step, num_steps)
            names = [f"row {rows.numbers[i]}" for i in chosen]
            loss, grad_norm = training.update(results, lr, names)
            seconds = time.monotonic() - started
            lengths = [len(document.ids) for document in batch]
            loss_tokens = num_loss_tokens(batch)
            training.metrics.log(
                step,
                {
                    "loss": loss,
                    "lr": lr,
                    "grad_norm": grad_norm,
                    "skipped": training.extra["skipped"],
                    "tokens": sum(lengths),
                    "loss_tokens": loss_tokens,
                    "padding_share": padding_share(batch, results, world),
                    "tokens_per_second": sum(lengths) / seconds,
                    "mfu": training.mfu(lengths, loss_tokens, seconds),
                },
                show=(step + 1) % cfg.log_every == 0 or step + 1 == num_steps,
            )
    return training.finish()


def read_rows(cfg: SftConfig, tokenizer: ChatTokenizer) -> Rows:
    """Tokenise the rows once: ids and a mask that is 1 on the assistant spans.

    Equal rows are copies of one trajectory, written out, and become one document, so that they
    cannot share a batch.
    """
    documents, weights = [], []
    numbers, places = [], {}
    num_long = 0
    encoded_rows = tqdm(
        encode_rows(cfg.data, tokenizer), desc="tokenise", unit="row", disable=None, leave=False
    )
    for number, (row, encoded) in enumerate(encoded_rows, start=1):
        ids = encoded.ids
        if len(ids) > cfg.max_length:
            num_long += 1
            continue
        place = places.setdefault(hashlib.sha256(array("l", ids)).digest(), len(documents))
        if place == len(documents):
            documents.append(Document(ids, {"mask": span_mask(encoded.spans, len(ids))}))
            weights.append(0)
            numbers.append(number)
        weights[place] += whole_weight(row)
    if cfg.resample == "off":
        weights = [min(1, weight) for weight in weights]
    if not any(weights):
        raise ValueError(
            f"{cfg.data}: no row with a weight and at most {cfg.max_length} tokens "
            f"({num_long} longer ones)"
        )
    return Rows(documents, weights, numbers, num_long)


def num_loss_tokens(documents: Sequence[Document]) -> int:
    """Count the tokens that the loss is taken on."""
    return sum(sum(document.per_token["mask"]) for document in documents)


def whole_weight(row: dict) -> int:
    """How often a row stands in an epoch."""
    weight = row.get("weight", 1)
    if weight != int(weight):
        raise ValueError(
            f"weight {weight} of the row on {row['question'][:60]!r}: an epoch holds a row a "
            "whole number of times"
        )
    return int(weight)


def start_model(cfg: SftConfig, world: World, bf16: bool) -> Qwen3:
    """fp32 masters: at lr 1e-5 and below a bf16 weight does not move. bf16: see `shard`."""
    if cfg.init == "weights":
        model = load_sharded(cfg.model, world, dtype=torch.float32, bf16=bf16)
    else:
        model = Qwen3(Qwen3Config.read(cfg.model))
        model.init_weights(cfg.seed)
        model = shard(model.to(world.device), world, bf16=bf16)
    set_recompute(model, cfg.recompute)
    return model


def settings(cfg: SftConfig, config: Qwen3Config, rows: Rows) -> dict:
    """What decides the training: a checkpoint made with other values is not resumed. Model and data
    count by their content, wherever they lie.
    """
    left_out = {field.name for field in dataclasses.fields(TrainingOptions)}
    left_out |= {"model", "data", "output", "save_every", "log_every"}
    values = {k: value for k, value in dataclasses.asdict(cfg).items() if k not in left_out}
    ids = (array("l", document.ids).tobytes() for document in rows.documents)
    model = fingerprint(cfg.model) if cfg.init == "weights" else digest(repr(config).encode())
    return values | {"model": model, "data": digest(*ids, array("l", rows.weights).tobytes())}


def learning_rate(cfg: SftConfig, step: int, num_steps: int) -> float:
    """Linear warm-up that starts above 0, then a cosine to min_lr_ratio * lr."""
    warmup = int(cfg.warmup_ratio * num_steps)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return cfg.lr * (
        cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    )


def dry_run(
    cfg: SftConfig, config: Qwen3Config, longest: int, rows: list[tuple[str, object]]
) -> None:
    """Print the plan; without a model that of the paper's, without data that of rows as
    long as --max-length.
    """
    spread = cfg.spread(
        world_size=cfg.world_size,
        longest=longest,
        reference=False,
        bf16=bool(cfg.gpu_memory) or torch.cuda.is_available(),
    )
    print_plan(cfg, [*rows, *memory_rows(config, spread, cfg.gpu_memory)])


def plan(
    cfg: SftConfig, config: Qwen3Config, rows: Rows, num_steps: int
) -> list[tuple[str, object]]:
    """What the run would do, for --dry-run."""
    lengths = [len(document.ids) for document in rows.documents]
    loss_tokens = num_loss_tokens(rows.documents)
    compute = cfg.epochs * training_flops(config, lengths, loss_tokens)
    again = cfg.epochs * recompute_flops(config, lengths, cfg.recompute)
    return [
        ("parameters", f"{num_parameters(config):,}"),
        ("rows", f"{len(lengths):,} kept, {rows.num_long:,} longer than --max-length"),
        ("tokens", f"{sum(lengths):,} an epoch, longest row {max(lengths):,}"),
        ("loss tokens", f"{loss_tokens:,}"),
        ("steps", f"{num_steps:,} of {cfg.batch_size} rows"),
        ("compute", f"{compute:.3g} FLOP, {again:.3g} of them again"),
    ]


if __name__ == "__main__":
    run(main, SftConfig, "Supervised fine-tuning on agent trajectories.")
