"""What both training scripts do between their steps: resume, update or skip, save, stop when asked,
export; and the flags for it.
"""

import contextlib
import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from kernels.launch import KERNELS, choose_kernel
from venus.cli import STOPPED, UNTRUSTED, Options, RunFailed, option
from venus.model.costs import Training, knobs, mfu, readable_bytes, training_flops, training_memory
from venus.model.qwen3 import RECOMPUTE, Qwen3, Qwen3Config, TokenLoss
from venus.runlog import MetricsLogger, RunOptions, save_run
from venus.train.backward import Fields
from venus.train.checkpoint import (
    check_export,
    check_shared,
    empty_sharded,
    export_model,
    load_checkpoint,
    save_checkpoint,
)
from venus.train.parallel import World, clip_gradients

NAMES_SHOWN = 32


@dataclass(frozen=True)
class OptimizerOptions(Options):
    """AdamW, as far as train_sft.py and train_igpo.py have the same defaults."""

    beta1: float = option(
        0.9, group="optimizer", help="AdamW: decay of the first moment", least=0, below=1
    )
    weight_decay: float = option(
        0.01, help="AdamW: decay of the weights, times the learning rate", least=0, most=100
    )
    clip_norm: float = option(1.0, help="largest global gradient norm", above=0, most=1_000_000)


@dataclass(frozen=True)
class TrainingOptions(RunOptions):
    """Flags of train_sft.py and train_igpo.py that do not change what is computed: a run may be
    resumed with others.
    """

    sp: int = option(
        1,
        group="memory and speed",
        help="GPUs that share one sequence (Ulysses); divides the number of processes and of "
        "query heads",
        least=1,
    )
    recompute: str = option(
        "on",
        help="activations: kept, computed again from block inputs, or those kept in host memory",
        choices=RECOMPUTE,
    )
    max_tokens_per_gpu: int = option(
        32_768,
        help="packed tokens of one forward pass on each GPU; a longer row runs alone",
        unit="tokens",
        least=1,
    )
    kernel: str = option(
        "auto",
        help="auto is Triton on CUDA and torch elsewhere; which one it was stands in run.json",
        choices=KERNELS,
    )
    keep_checkpoints: int = option(2, group="run", help="newest checkpoints kept", least=1)
    max_skipped: int = option(
        5,
        help="updates in a row with a loss or gradient that is not finite; each is skipped, then "
        "the run fails",
        least=1,
    )
    export: str | None = option(
        None, help="write the latest checkpoint to this directory in Hugging Face's form, and exit"
    )
    tensorboard: bool = option(
        False, help="also write TensorBoard events (needs tensorboard installed)"
    )
    world_size: int = option(
        1,
        help="for --dry-run: the number of processes planned for; torchrun sets the real one",
        least=1,
    )

    def validate(self) -> None:
        """ValueError where the planned processes cannot share sequences."""
        super().validate()
        if self.dry_run and self.world_size % self.sp:
            raise ValueError(f"sp {self.sp}: does not divide the world_size of {self.world_size}")

    def spread(self, *, world_size: int, longest: int, reference: bool, bf16: bool) -> Training:
        """What the plan needs to know of a run."""
        return Training(
            world_size, self.sp, self.max_tokens_per_gpu, longest, self.recompute, reference, bf16
        )


def digest(*parts: bytes) -> str:
    """16 hex digits that change with the parts."""
    whole = hashlib.blake2b(digest_size=8)
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()


def compute_dtype(world: World) -> torch.dtype:
    """bf16 matrix products (over fp32 masters) on a GPU, fp32 on the CPU; the
    exported model has the same.
    """
    return torch.bfloat16 if world.device.type == "cuda" else torch.float32


def adamw(cfg: TrainingOptions, model: Qwen3, world: World) -> torch.optim.AdamW:
    """The optimizer of all parameters."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=cfg.lr,
        betas=(cfg.beta1, cfg.beta2),
        weight_decay=cfg.weight_decay,
        # torch's default there takes the root of a whole moment at once, as large as the weights
        fused=world.device.type == "cuda",
    )


class TrainingRun:
    """A run between its steps. `step` counts the batches consumed, skipped ones too: with the seed
    it is the place in the data, at any world size.

    settings: what decides the training; a directory that was started with others is refused with a
    ValueError. extra: what to keep in checkpoints besides, plain JSON; after a resume it is what
    was saved. spread: for the line that explains a lack of memory. record: what else stands in
    run.json.
    """

    def __init__(
        self,
        cfg: TrainingOptions,
        model: Qwen3,
        world: World,
        *,
        settings: dict,
        num_steps: int,
        spread: Training,
        console: Sequence[str],
        extra: dict,
        record: Mapping[str, object] | None = None,
    ):
        self.cfg = cfg
        self.model = model
        self.world = world
        self.num_steps = num_steps
        self.spread = spread
        self.output, self.kernel = Path(cfg.output), choose_kernel(cfg.kernel, world.device)
        self.optimizer = adamw(cfg, model, world)
        check_shared(self.output, world)
        check_export(cfg.model, self.output / "model")
        self.step, saved = load_checkpoint(
            self.output / "checkpoints", model, self.optimizer, world, settings=settings
        )
        self.extra = saved or {"settings": settings, "skipped": 0, "skipped_in_a_row": 0, **extra}
        self.saved_step = self.step
        if world.is_main:
            if self.step:
                print(f"{self.output}: resuming after step {self.step} of {num_steps}")
            save_run(
                cfg,
                self.output,
                world_size=world.size,
                device=str(world.device),
                kernel=self.kernel,
                **(record or {}),
            )
        self.metrics = MetricsLogger(
            self.output,
            enabled=world.is_main,
            start_step=self.step,
            console=console,
            tensorboard=cfg.tensorboard,
            write=tqdm.write,
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, SIGTERM and SIGINT on any rank ask all to stop; what a stop left unsaved is saved
        at the end. RunFailed for a lack of GPU memory.
        """
        with self.world.catch_signals():
            try:
                yield
            except torch.OutOfMemoryError as error:
                raise RunFailed(
                    f"step {self.step}, rank {self.world.rank}: "
                    f"{lack_of_memory(self.model.config, self.spread)}"
                ) from error
            self.save()

    def steps(self, name: str) -> Iterator[int]:
        """The steps that are left, until a stop. When the loop comes back for the next one, the
        step is done, and saved when that is due.
        """
        for step in tqdm(
            range(self.step, self.num_steps),
            initial=self.step,
            total=self.num_steps,
            desc=name,
            unit="step",
            disable=not self.world.is_main or None,
        ):
            yield step
            self.world.check_alive(f"step {step}")
            self.step = step + 1
            if self.step % self.cfg.save_every == 0 or self.step == self.num_steps:
                self.save()
            if self.world.stop_agreed():
                return

    def update(
        self, results: Sequence[tuple[TokenLoss, Fields]], lr: float, names: Sequence[str]
    ) -> tuple[float, float]:
        """One AdamW step on the gradients that `backward` left; returns the loss over all ranks and
        the gradient norm before clipping. A collective.

        When one of them is not finite, all ranks skip the step and count it. RunFailed after
        `max_skipped` in a row, with the names of what the last batch held; no weight, and so no
        checkpoint, has seen any of them.
        """
        loss = self.world.sum(sum(result.loss.item() for result, _ in results))
        grad_norm = clip_gradients(self.model, self.cfg.clip_norm)
        is_sound = math.isfinite(loss) and math.isfinite(grad_norm)
        if is_sound:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.extra["skipped"] += not is_sound
        self.extra["skipped_in_a_row"] = 0 if is_sound else self.extra["skipped_in_a_row"] + 1
        if self.extra["skipped_in_a_row"] >= self.cfg.max_skipped:
            more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
            raise RunFailed(
                f"step {self.step}: loss {loss}, gradient norm {grad_norm}; "
                f"{self.extra['skipped_in_a_row']} updates in a row were not finite and "
                "skipped; the checkpoints are unharmed: lower --lr or look at "
                f"{', '.join(names[:NAMES_SHOWN])}{more}"
            )
        return loss, grad_norm

    def mfu(self, lengths: Sequence[int], loss_tokens: int, seconds: float) -> float | None:
        """Model FLOPs utilisation of all ranks in an update on documents of these lengths; None
        where the device's peak is unknown.
        """
        device_name = (
            torch.cuda.get_device_name(self.world.device)
            if self.world.device.type == "cuda"
            else "cpu"
        )
        return mfu(
            training_flops(self.model.config, lengths, loss_tokens),
            seconds,
            world_size=self.world.size,
            device_name=device_name,
        )

    def save(self) -> None:
        """Write a checkpoint unless there is one of this step, or nothing has been
        learnt yet. A collective.
        """
        if self.step > self.saved_step and self.optimizer.state:
            save_checkpoint(
                self.output / "checkpoints",
                self.step,
                self.model,
                self.optimizer,
                self.world,
                keep=self.cfg.keep_checkpoints,
                extra=self.extra,
            )
            self.saved_step = self.step

    def finish(self) -> int | None:
        """Export the model of a run that is through. Return STOPPED for one that is not, UNTRUSTED
        when its last updates were skipped, as not finite.
        """
        self.metrics.close()
        skipped = self.extra["skipped_in_a_row"]
        code = UNTRUSTED if skipped else None
        line = f"the last {skipped} updates were not finite and skipped; do not trust the model"
        if self.step != self.num_steps:
            code = STOPPED
            line = f"stopped after step {self.step} of {self.num_steps}; the same command resumes"
        else:
            export_model(
                self.model,
                self.cfg.model,
                self.output / "model",
                dtype=compute_dtype(self.world),
                world=self.world,
            )
        if code and self.world.is_main:
            print(f"{self.output}: {line}")
        self.world.close()
        return code


def export_latest(cfg: TrainingOptions) -> None:
    """For --export: the latest checkpoint of cfg.output as a Hugging Face directory.
    ValueError when there is none.
    """
    world = World(cfg.sp)
    dtype = compute_dtype(world)
    model = empty_sharded(cfg.model, world, dtype=torch.float32, bf16=dtype == torch.bfloat16)
    step, _ = load_checkpoint(Path(cfg.output) / "checkpoints", model, None, world)
    if not step:
        raise ValueError(f"{cfg.output}: no checkpoint to export")
    export_model(model, cfg.model, cfg.export, dtype=dtype, world=world)
    if world.is_main:
        print(f"{cfg.export}: the model after step {step}")
    world.close()


def lack_of_memory(config: Qwen3Config, spread: Training) -> str:
    """What the plan says about a run that did not fit: its numbers and the flag to turn first."""
    items = training_memory(config, spread)
    largest = max(items, key=items.get)
    flags = [f"{flag} {value}" for flag, value, _ in knobs(config, spread)]
    return (
        f"out of GPU memory; the plan has {readable_bytes(sum(items.values()))} a GPU for "
        f"training, most of it {largest} "
        f"({readable_bytes(items[largest])}): try "
        f"{flags[0] if flags else 'more GPUs, or shorter sequences'}"
    )


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str, world: World) -> Iterator[None]:
    """Put the seconds of a block, until the slowest rank is through, into seconds[name]; a block
    that raises has none.
    """
    started = time.monotonic()
    yield
    world.barrier()
    seconds[name] = time.monotonic() - started
