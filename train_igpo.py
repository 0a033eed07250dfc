"""Information-gain policy optimisation: roll out, score every turn by how much it raised the ground truth, credit, update (Eq. 2-10).

    python train_igpo.py --model SFT_DIR --questions questions.jsonl --output runs/igpo
    torchrun --nproc_per_node=8 train_igpo.py ...
GRPO, the baseline, is the same code with --ig-turns none --format-pool none.
"""

import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm

from kernels.launch import KERNELS, choose_kernel
from venus.batches import Document, batch_items, steps_per_epoch
from venus.checkpoint import export_model, load_checkpoint, save_checkpoint
from venus.cli import option, run
from venus.collect import RolloutOptions, check_corpora, collect, jobs_of, rollout_metrics
from venus.igpo import AdvantageConfig, TurnRewards, batch_advantages
from venus.info_gain import score_turns
from venus.jsonl import write_jsonl
from venus.metrics import MetricsLogger
from venus.model import ClippedPolicy, Qwen3, Qwen3Config
from venus.parallel import World, clip_gradients, shard, unsharded
from venus.plan import kv_bytes, readable_bytes, training_bytes
from venus.record import print_plan, save_run
from venus.rewards import outcome_of
from venus.tokenizer import ChatTokenizer
from venus.trajectory import Outcome, Question, Trajectory, read_questions
from venus.updates import backward, log_probs_of, policy_document, policy_metrics, with_weights
from venus.weights import fingerprint, load_model


@dataclass(frozen=True)
class IgpoConfig(RolloutOptions):
    # data and model
    model: str = option(help="Hugging Face directory of the SFT model: the start and the KL reference")
    questions: str = option(help="questions.jsonl: id, question, ground_truth, corpus")
    output: str = option(help="directory of checkpoints, metrics, rollouts and the exported model")
    questions_per_step: int = option(16, help="questions of an optimizer step")
    group_size: int = option(8, help="rollouts per question")
    steps: int | None = option(None, help="steps in all; empty is one pass over the questions")
    # rewards and credit (Eq. 2-9)
    reward: str = option("em", help="outcome: normalised exact match, or multiset F1", choices=("em", "f1"))
    ig_turns: str = option("visit", help="turns whose gain is rewarded: answered visits, all, or none (GRPO)", choices=("visit", "all", "none"))
    ig_value: str = option("log_prob", help="gain in mean log-probability (DR-Venus) or in its exp (IGPO)", choices=("log_prob", "prob"))
    ig_alias: str = option("first", help="ground truth scored: the first alias, or the best one at every cut", choices=("first", "max"))
    ig_weight: float = option(1.0, help="factor on information gain, not on the penalty")
    ig_std_floor: float = option(0.0, help="least sigma of the information-gain pool; at 0, as released, tiny gains become full-size advantages")
    ig_scale: str = option("batch", help="IG-Scale over the batch (released), per group, or off", choices=("batch", "group", "none"))
    norm: str = option("separate", help="z-score outcomes and gains apart, or as one pool", choices=("separate", "joint"))
    format_penalty: float = option(1.0, help="lambda: a malformed turn earns minus this; 0 is off")
    format_pool: str = option("ig", help="penalties enter the information-gain pool (released), or are added afterwards", choices=("ig", "none"))
    gamma: float = option(0.95, help="discount per credit segment")
    # objective (Eq. 10)
    updates: int = option(1, help="optimizer steps per batch of rollouts; more than one recomputes old log-probs first")
    loss_norm: str = option("sequence", help="mean over trajectories of their token means, or over all tokens", choices=("sequence", "token"))
    clip: float = option(0.2, help="the ratio is clipped to 1 +- this")
    dual_clip: float = option(3.0, help="bound of the loss at negative advantage, as a multiple of it")
    kl_beta: float = option(0.001, help="weight of the k3 KL penalty to --model; 0 drops the reference")
    lr: float = option(1e-6, help="constant learning rate")
    warmup_steps: int = option(0, help="steps of linear warm-up", unit="steps")
    beta1: float = option(0.9, help="AdamW")
    beta2: float = option(0.999, help="AdamW")
    weight_decay: float = option(0.01, help="AdamW")
    clip_norm: float = option(1.0, help="largest global gradient norm")
    max_tokens_per_micro_batch: int = option(32_768, help="packed tokens of one forward pass; a longer row runs alone", unit="tokens")
    kernel: str = option("auto", help="auto is Triton on CUDA and torch elsewhere; which one it was stands in run.json", choices=KERNELS)
    # run
    seed: int = option(0, help="seed of the order of questions and of the sampling noise")
    save_every: int = option(5, help="steps between checkpoints; a run resumes from the latest", unit="steps")
    tensorboard: bool = option(False, help="also write TensorBoard events (needs tensorboard installed)")
    dry_run: bool = option(False, help="print the resolved config and the plan, and exit")

    def validate(self):
        super().validate()
        self.advantages()
        least = {"questions_per_step": 1, "group_size": 2, "steps": 1, "updates": 1, "save_every": 1, "max_tokens_per_micro_batch": 1}
        for name, value in least.items():
            if getattr(self, name) is not None and getattr(self, name) < value:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least {value}")
        if self.temperature == 0:
            raise ValueError("temperature 0: greedy rollouts of a group are all equal, so nothing can be learnt from them")

    def advantages(self) -> AdvantageConfig:
        return AdvantageConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(AdvantageConfig)})


@record
def main(cfg: IgpoConfig) -> None:
    """Per step: roll out, score, credit, update."""
    cfg.set_threads()
    questions, tokenizer = read_questions(cfg.questions), ChatTokenizer(cfg.model)
    check_corpora(questions)
    num_steps = cfg.steps or steps_per_epoch([1] * len(questions), cfg.questions_per_step)
    if cfg.dry_run:
        print_plan(cfg, plan(cfg, len(questions), num_steps))
        return
    world, output = World(), Path(cfg.output)
    kernel = choose_kernel(cfg.kernel, world.device)
    bf16 = world.device.type == "cuda"
    model = shard(load_model(cfg.model, dtype=torch.float32, device=world.device), bf16=bf16)
    dtype = torch.bfloat16 if bf16 else torch.float32
    reference = shard(load_model(cfg.model, dtype=dtype, device=world.device), bf16=False).requires_grad_(False) if cfg.kl_beta else None
    cfg.agent(model, tokenizer, run="", seed=0, manifest={}).run(jobs_of(questions, 1))  # starts nothing: a prompt too long is found now, not days on
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), weight_decay=cfg.weight_decay)
    first_step = load_checkpoint(output / "checkpoints", model, optimizer)
    drop_partials(output / "rollouts", first_step, world)
    if world.is_main:
        if first_step:
            print(f"{output}: resuming after step {first_step} of {num_steps}")
        save_run(cfg, output, world_size=world.size, device=str(world.device), kernel=kernel)
    console = ("success", "info_gain_mean", "format_valid_share", "turns", "browse_ratio", "kl", "grad_norm", "seconds_step")
    metrics = MetricsLogger(output, enabled=world.is_main, start_step=first_step, console=console, tensorboard=cfg.tensorboard, write=tqdm.write)

    for step in tqdm(range(first_step, num_steps), initial=first_step, total=num_steps, desc="igpo", unit="step", disable=not world.is_main or None):
        seconds = {}
        batch = [questions[i] for i in batch_items([1] * len(questions), cfg.questions_per_step, seed=cfg.seed, step=step)]
        # 1. roll out G trajectories of every question, and 2. score the ground truth after their turns, with the weights at hand
        with unsharded(model):
            with timed(seconds, "rollout", world):
                mine = roll_out(cfg, model, tokenizer, batch, step, output / "rollouts", world)
            with timed(seconds, "info_gain", world):
                for trajectory in mine:
                    trajectory.outcome = graded(trajectory, cfg.reward)
                score_turns(
                    model, tokenizer, [trajectory for trajectory in mine if trajectory.kept], ig_turns=cfg.ig_turns, ig_value=cfg.ig_value,
                    ig_alias=cfg.ig_alias, max_tokens=cfg.max_tokens_per_micro_batch, kernel=kernel,
                )  # fmt: skip
        trajectories = world.gather(mine)
        # 3. credit: rewards per turn -> advantages per turn, over the whole batch
        kept, credit = credit_turns(cfg, batch, trajectories)
        # 4. update
        with timed(seconds, "update", world):
            update = update_policy(cfg, model, reference, optimizer, kept, step, world) if kept else {}
        metrics.log(step, rollout_metrics(trajectories, kept) | credit | update | timing(seconds, trajectories))
        if world.is_main:
            write_jsonl(output / "rollouts" / f"step_{step:05d}.jsonl", [trajectory.to_json() for trajectory in trajectories])
        drop_partials(output / "rollouts", step + 1, world)
        if (step + 1) % cfg.save_every == 0 or step + 1 == num_steps:
            save_checkpoint(output / "checkpoints", step + 1, model, optimizer, world)
    export_model(model, cfg.model, output / "model", dtype=dtype, world=world)
    metrics.close()
    world.close()


# ---- 1. rollouts


def partial_path(directory: Path, step: int, world: World) -> Path:
    """Where a rank appends its rollouts of a step until the step is done."""
    return directory / f"step_{step:05d}.rank{world.rank}.partial.jsonl"


def drop_partials(directory: Path, step: int, world: World) -> None:
    """Remove the partial rollouts of all steps but the coming one, `step`, which takes its own up again. A collective."""
    if world.is_main:
        for path in set(directory.glob("step_*.partial.jsonl")) - set(directory.glob(f"step_{step:05d}.*")):
            path.unlink()
    world.barrier()


def roll_out(
    cfg: IgpoConfig, model: Qwen3, tokenizer: ChatTokenizer, batch: list[Question], step: int, directory: Path, world: World
) -> list[Trajectory]:
    """This rank's share of the step's rollouts: whole questions, dealt out in turn."""
    manifest = {"step": step, "model": fingerprint(cfg.model)}
    agent = cfg.agent(model, tokenizer, run=directory.parent.name, seed=cfg.seed * 1_000_003 + step, manifest=manifest)
    return collect(agent, jobs_of(batch[world.rank :: world.size], cfg.group_size), partial_path(directory, step, world), progress=None)


# ---- 2. rewards


def graded(trajectory: Trajectory, reward: str) -> Outcome:
    """The outcome reward of a trajectory that counts; the others keep their status, without a value."""
    if not trajectory.kept:
        return trajectory.outcome
    return Outcome(outcome_of(trajectory.prediction, trajectory.ground_truth, reward), "ok")


# ---- 3. credit


def credit_turns(cfg: IgpoConfig, batch: list[Question], trajectories: list[Trajectory]) -> tuple[list[Trajectory], dict]:
    """Write advantages into the turns of the trajectories that count, in place; return those and the statistics of Eq. 4-9.

    A group with fewer than two trajectories left has nothing to compare and is skipped whole.
    """
    group_of = {question.id: number for number, question in enumerate(batch)}
    counted = [trajectory for trajectory in trajectories if trajectory.kept]
    sizes = [sum(group_of[t.question_id] == number for t in counted) for number in range(len(batch))]
    kept = [t for t in counted if sizes[group_of[t.question_id]] >= 2]
    if not kept:
        return [], {}
    advantages, statistics = batch_advantages([TurnRewards.from_trajectory(t, group_of[t.question_id]) for t in kept], cfg.advantages())
    for trajectory, per_turn in zip(kept, advantages, strict=True):
        for turn, advantage in zip(trajectory.turns, per_turn, strict=True):
            turn.advantage = advantage
    return kept, statistics


# ---- 4. update


def update_policy(
    cfg: IgpoConfig, model: Qwen3, reference: Qwen3 | None, optimizer: torch.optim.Optimizer, kept: list[Trajectory], step: int, world: World
) -> dict:
    """One optimizer step per mini-batch of the kept trajectories (Eq. 10); returns the metrics of the tokens."""
    how = {"max_tokens": cfg.max_tokens_per_micro_batch, "world": world, "temperature": cfg.temperature, "kernel": cfg.kernel}
    documents = [policy_document(trajectory) for trajectory in kept]
    extras = {"ref": log_probs_of(reference, documents, **how)} if reference is not None else {}
    if cfg.updates > 1:
        extras["old"] = log_probs_of(model, documents, **how)
    documents = [Document(d.ids, {**d.per_token, **{name: rows[i] for name, rows in extras.items()}}) for i, d in enumerate(documents)]
    results = []
    for number in range(min(cfg.updates, len(documents))):
        mini_batch = with_weights(documents[number :: cfg.updates], cfg.loss_norm)  # neighbours are of one group: each mini-batch has some of it
        results += backward(model, mini_batch, lambda fields: policy_loss(cfg, fields), **how)
        grad_norm = clip_gradients(model, cfg.clip_norm)
        if not math.isfinite(grad_norm):
            raise ValueError(f"step {step}: gradient norm {grad_norm}; the last checkpoint is unharmed: lower --lr or look at the rollouts")
        for group in optimizer.param_groups:
            group["lr"] = cfg.lr * min(1.0, (step + 1) / max(1, cfg.warmup_steps))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"grad_norm": grad_norm} | policy_metrics(results, clip=cfg.clip, dual_clip=cfg.dual_clip, world=world)


def policy_loss(cfg: IgpoConfig, fields: dict[str, torch.Tensor]) -> ClippedPolicy:
    """Eq. 10 over one micro-batch; without "old", the ratio is exp(log p - log p.detach())."""
    return ClippedPolicy(
        fields["advantages"], fields["weights"], old_BS=fields.get("old"), ref_BS=fields.get("ref"), clip=cfg.clip, dual_clip=cfg.dual_clip,
        beta=cfg.kl_beta,
    )  # fmt: skip


# ---- metrics and plan


class timed:
    """Add the seconds of a block, until the slowest rank is through, to seconds[name]."""

    def __init__(self, seconds: dict[str, float], name: str, world: World):
        self.seconds, self.name, self.world = seconds, name, world

    def __enter__(self) -> None:
        self.started = time.monotonic()

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            self.world.barrier()
            self.seconds[self.name] = time.monotonic() - self.started


def timing(seconds: dict[str, float], trajectories: list[Trajectory]) -> dict:
    """Seconds by phase, and all tokens of the trajectories per second of the step."""
    total = sum(seconds.values())
    by_phase = {f"seconds_{name}": value for name, value in seconds.items()}
    return by_phase | {"seconds_step": total, "tokens_per_second": sum(len(t.token_ids) for t in trajectories) / total}


def plan(cfg: IgpoConfig, num_questions: int, num_steps: int) -> list[tuple[str, object]]:
    """What the run would do, for --dry-run."""
    config, bf16 = Qwen3Config.read(cfg.model), torch.cuda.is_available()
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Qwen3(config).parameters())
    memory = training_bytes(
        parameters=parameters, world_size=1, layers=config.num_hidden_layers, hidden=config.hidden_size,
        tokens=cfg.max_tokens_per_micro_batch, reference=bool(cfg.kl_beta), bf16=bf16,
    )  # fmt: skip
    memory["KV cache, all slots full"] = kv_bytes(
        layers=config.num_hidden_layers, kv_heads=config.num_key_value_heads, head_dim=config.head_dim, tokens=cfg.slots * cfg.max_context, bf16=bf16
    )
    return [
        ("parameters", f"{parameters:,}"), ("questions", f"{num_questions:,}"), ("steps", f"{num_steps:,}"),
        ("rollouts", f"{num_steps * cfg.questions_per_step * cfg.group_size:,}"),
        *((f"memory, {name}", readable_bytes(count)) for name, count in memory.items()), ("memory, total", readable_bytes(sum(memory.values()))),
    ]  # fmt: skip


if __name__ == "__main__":
    run(main, IgpoConfig, "Information-gain policy optimisation of a search agent.")
