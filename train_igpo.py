"""Information-gain policy optimisation: roll out, score every turn by how much it raised the ground
truth, credit, update (Eq. 2-10).

    python train_igpo.py --model SFT_DIR --questions questions.jsonl --output runs/igpo
    torchrun --nproc_per_node=8 train_igpo.py ...

The same command resumes, with any number of processes. Exit code 3: stopped by SIGTERM or Ctrl-C,
everything saved; 4: done, but the last updates were not finite and skipped. GRPO, the baseline, is
the same code with --ig-turns none --format-pool none.
"""

import dataclasses
import functools
import os
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from venus.cli import option, run
from venus.files import write_jsonl
from venus.grading.judge import RULES, Case, Judge, JudgeOptions, open_judge, parse_judge
from venus.model.costs import memory_rows, num_parameters
from venus.model.qwen3 import ClippedPolicy, Qwen3, Qwen3Config, set_recompute
from venus.model.weights import fingerprint
from venus.rl.igpo import AdvantageConfig, TurnRewards, batch_advantages
from venus.rl.info_gain import GainRule, score_turns
from venus.rl.rewards import outcome_of
from venus.rollout.agent import Agent
from venus.rollout.collect import (
    check_corpora,
    collect,
    jobs_of,
    rollout_metrics,
    share_of_jobs,
)
from venus.rollout.options import RolloutOptions
from venus.runlog import print_plan
from venus.tokenizer import ChatTokenizer
from venus.tools.base import Tool
from venus.tools.options import Keys
from venus.train.backward import (
    backward,
    log_probs_of,
    padding_share,
    policy_document,
    policy_metrics,
    with_weights,
)
from venus.train.batches import Document, batch_items, steps_per_epoch
from venus.train.checkpoint import load_sharded
from venus.train.loop import (
    OptimizerOptions,
    TrainingOptions,
    TrainingRun,
    compute_dtype,
    digest,
    export_latest,
    timed,
)
from venus.train.parallel import World, recorded, unsharded
from venus.trajectory import Outcome, Question, Trajectory, read_questions

CONSOLE = (
    "success",
    "info_gain_mean",
    "format_valid_share",
    "turns",
    "browse_ratio",
    "kl",
    "grad_norm",
    "seconds_step",
)


@dataclass(frozen=True)
class IgpoConfig(AdvantageConfig, OptimizerOptions, TrainingOptions, JudgeOptions, RolloutOptions):
    """What the paper's IGPO does, by default, but for top-p."""

    PRESETS = {"paper": {"top_p": 0.95}}  # README, "Ours, the paper, the released code"

    model: str = option(
        help="Hugging Face directory of the SFT model: the start and the KL reference"
    )
    questions: str = option(help="questions.jsonl: id, question, ground_truth, corpus")
    output: str = option(help="directory of checkpoints, metrics, rollouts and the exported model")
    questions_per_step: int = option(
        16, group="batch", help="questions of an optimizer step", least=1
    )
    group_size: int = option(8, help="rollouts per question", least=2)
    steps: int | None = option(
        None, help="steps in all; empty is one pass over the questions", least=1
    )
    updates: int = option(
        1,
        help="optimizer steps per batch of rollouts; more than one recomputes old log-probs first",
        least=1,
    )
    seed: int = option(0, help="seed of the order of questions and of the sampling noise", least=0)
    reward: str = option(
        "em",
        group="outcome",
        help="outcome: normalised exact match, multiset F1, or the verdict of --judge",
        choices=("em", "f1", "judge"),
    )
    judge: str = option(
        "none",
        help="for --reward judge: openai:BASE_URL:MODEL (key: JUDGE_API_KEY or OPENAI_API_KEY), "
        f"or {', '.join(RULES)}",
    )
    judge_seconds: float = option(
        300.0,
        help="for all tries of a judge call; a rollout without a verdict leaves statistics and "
        "loss",
        unit="s",
        least=1,
        most=1_000_000,
    )
    info_gain: str = option(
        "rollout",
        group="credit (Eq. 2-9)",
        help="score ground truths in the rollout, from its cache, or afterwards, packed",
        choices=("rollout", "packed"),
    )
    ig_alias: str = option(
        "first",
        help="ground truth scored: the first alias, or the best one at every cut",
        choices=("first", "max"),
    )
    loss_norm: str = option(
        "sequence",
        group="objective (Eq. 10)",
        help="mean over trajectories of their token means, or over all tokens",
        choices=("sequence", "token"),
    )
    clip: float = option(0.2, help="the ratio is clipped to 1 +- this", above=0, most=10)
    dual_clip: float = option(
        3.0,
        help="bound of the loss at negative advantage, as a multiple of it",
        above=1,
        most=1_000,
    )
    kl_beta: float = option(
        0.001,
        help="weight of the k3 KL penalty to --model; 0 drops the reference",
        least=0,
        most=1_000,
    )
    lr: float = option(1e-6, group="optimizer", help="constant learning rate", above=0, most=1)
    warmup_steps: int = option(0, help="steps of linear warm-up", unit="steps", least=0)
    beta2: float = option(0.999, help="AdamW: decay of the second moment", least=0, below=1)
    save_every: int = option(
        5,
        group="run",
        help="steps between checkpoints; a run resumes from the latest",
        unit="steps",
        least=1,
    )
    rank_minutes: float = option(
        600.0,
        help="longest wait for the slowest process at the end of rollouts; then it is named, and "
        "the run fails",
        unit="min",
        above=0,
        most=1_000_000,
    )

    def validate(self) -> None:
        super().validate()
        parse_judge(self.judge)
        if (self.reward == "judge") == (self.judge == "none"):
            raise ValueError(
                f"reward {self.reward} with judge {self.judge}: --reward judge needs a "
                "--judge, and no other reward asks one"
            )
        if self.policy is not None:
            raise ValueError(
                "--policy: an endpoint returns neither the ids it sampled nor their "
                "log-probs, so nothing can be trained on them"
            )
        if self.temperature == 0:
            raise ValueError(
                "temperature 0: greedy rollouts of a group are all equal, so nothing can be "
                "learnt from them"
            )

    def gain_rule(self) -> GainRule:
        """Which turns are scored, and how."""
        return GainRule(self.ig_turns, self.ig_value, self.ig_alias)

    def gain(self) -> GainRule | None:
        """What the rollouts score as they go."""
        scores = self.info_gain == "rollout" and self.ig_turns != "none"
        return self.gain_rule() if scores else None


@recorded
def main(cfg: IgpoConfig, keys: Keys) -> int | None:
    """Per step: roll out, score, credit, update."""
    cfg.set_threads()
    if cfg.export:
        return export_latest(cfg)
    questions, tokenizer = read_questions(cfg.questions), ChatTokenizer(cfg.model)
    corpora = check_corpora(questions) if cfg.tools == "offline" else None
    once = [1] * len(questions)
    num_steps = cfg.steps or steps_per_epoch(once, cfg.questions_per_step)
    if cfg.dry_run:
        return print_plan(cfg, plan(cfg, len(questions), num_steps))
    world = World(cfg.sp)
    model, reference = start_models(cfg, world)
    tools = cfg.make_tools(keys, corpora)
    agent = cfg.agent(model, tokenizer, run="", seed=0, manifest={}, tools=tools, gain=cfg.gain())
    agent.run(jobs_of(questions, 1))  # starts nothing: a prompt too long is found now, not days on
    training = TrainingRun(
        cfg,
        model,
        world,
        settings=settings(cfg),
        num_steps=num_steps,
        extra={"lengths": {}},
        record={"decoding": agent.sampler.choices},
        spread=cfg.spread(
            world_size=world.size,
            longest=cfg.max_context,
            reference=reference is not None,
            bf16=compute_dtype(world) == torch.bfloat16,
        ),
        console=CONSOLE,
    )
    rollouts = training.output / "rollouts"
    drop_partials(rollouts, training.step, world)
    verdicts = training.output / "verdicts" / f"rank{world.rank}.jsonl"
    with (
        open_judge(
            cfg.judge, keys.judge, verdicts, cfg.judge_calls, seconds=cfg.judge_seconds
        ) as judge,
        training.running(),
    ):
        for step in training.steps("igpo"):
            seconds = {}
            chosen = batch_items(once, cfg.questions_per_step, seed=cfg.seed, step=step)
            batch = [questions[i] for i in chosen]
            with unsharded(model):
                # 1. roll out G trajectories of every question
                with timed(seconds, "rollout", world):
                    mine = roll_out(cfg, tokenizer, tools, judge, batch, training)
                if world.stop_agreed():
                    break  # the finished ones are on disk, and taken up by the next start
                # 2. score the ground truth after their turns, unless that is done
                with timed(seconds, "info_gain", world):
                    if cfg.info_gain == "packed":
                        score_turns(
                            model,
                            tokenizer,
                            [trajectory for trajectory in mine if trajectory.kept],
                            cfg.gain_rule(),
                            max_tokens=cfg.max_tokens_per_gpu,
                            kernel=training.kernel,
                        )
            trajectories = in_order(world.gather(mine), batch)
            # 3. credit: rewards per turn -> advantages per turn, over the whole batch
            kept, credit = credit_turns(cfg, batch, trajectories)
            # 4. update
            with timed(seconds, "update", world):
                update = update_policy(cfg, training, reference, kept) if kept else {}
            made = rollout_metrics(trajectories, kept)
            time_taken = timing(seconds, trajectories, kept, training)
            training.metrics.log(step, made | credit | update | time_taken)
            training.extra["lengths"] |= mean_lengths(trajectories)
            if world.is_main:
                path = rollouts / f"step_{step:05d}.jsonl"
                write_jsonl(path, [trajectory.to_json() for trajectory in trajectories])
            drop_partials(rollouts, step + 1, world)
    return training.finish()


def settings(cfg: IgpoConfig) -> dict:
    """What decides the training: a checkpoint made with other values is not resumed. Model and
    questions count by their content.
    """
    fields = (*dataclasses.fields(TrainingOptions), *dataclasses.fields(RolloutOptions))
    left_out = {field.name for field in fields}
    left_out |= {"model", "questions", "output", "steps", "save_every", "rank_minutes"}
    left_out |= {"judge_calls", "judge_seconds"}
    values = {k: value for k, value in dataclasses.asdict(cfg).items() if k not in left_out}
    # the model may move to another address
    values["judge"] = (parse_judge(cfg.judge) or [cfg.judge])[-1]
    questions = digest(Path(cfg.questions).read_bytes())
    return values | cfg.manifest() | {"model": fingerprint(cfg.model), "questions": questions}


def start_models(cfg: IgpoConfig, world: World) -> tuple[Qwen3, Qwen3 | None]:
    """The policy, with fp32 masters, and the frozen reference of the KL penalty, if any."""
    dtype = compute_dtype(world)
    model = load_sharded(cfg.model, world, dtype=torch.float32, bf16=dtype == torch.bfloat16)
    set_recompute(model, cfg.recompute)
    if not cfg.kl_beta:
        return model, None
    reference = load_sharded(cfg.model, world, dtype=dtype, bf16=False)
    return model, reference.requires_grad_(False)


# ---- 1. rollouts


def drop_partials(directory: Path, step: int, world: World) -> None:
    """Remove the partial rollouts of all steps but the coming one, `step`, which takes its own up
    again. A collective.
    """
    if world.is_main:
        coming = set(directory.glob(f"step_{step:05d}.*"))
        for path in set(directory.glob("step_*.partial.jsonl")) - coming:
            path.unlink()
    world.barrier()


def roll_out(
    cfg: IgpoConfig,
    tokenizer: ChatTokenizer,
    tools: dict[str, Tool],
    judge: Judge,
    batch: list[Question],
    training: TrainingRun,
) -> list[Trajectory]:
    """This rank's share of the step's rollouts with their outcomes, fewer when a stop was asked
    for. What an interrupted run finished of them is taken up, whichever rank made it. A collective
    at its end only.
    """
    directory = training.output / "rollouts"
    step, world = training.step, training.world
    gain = cfg.gain()
    manifest = {
        "step": step,
        "model": training.extra["settings"]["model"],
        # trajectories with gains, and under which rule, are not those without
        "gain": dataclasses.asdict(gain) if gain else None,
    }
    agent = cfg.agent(
        training.model,
        tokenizer,
        run=training.output.name,
        seed=cfg.seed * 1_000_003 + step,
        manifest=manifest,
        tools=tools,
        gain=gain,
    )
    costs = expected_tokens(agent, batch, training.extra["lengths"])
    jobs = share_of_jobs(batch, cfg.group_size, costs, rank=world.rank, num_ranks=world.size)
    path = directory / f"step_{step:05d}.rank{world.rank}.partial.jsonl"
    # of other ranks, and of the whole step when it was done but not saved
    others = sorted(set(directory.glob(f"step_{step:05d}*.jsonl")) - {path})
    finished = collect(
        agent, jobs, path, progress=None, others=others, should_stop=world.stop_requested
    )
    if not world.stop_requested():
        grade(finished, cfg.reward, judge)
    world.check_alive(f"rollouts of step {step}", timedelta(minutes=cfg.rank_minutes))
    return finished


def expected_tokens(agent: Agent, batch: list[Question], lengths: dict[str, float]) -> list[float]:
    """What a rollout of each question will cost: the mean length of its earlier ones, or, for a new
    question, that of all earlier rollouts, at least its prompt.
    """
    typical = sum(lengths.values()) / len(lengths) if lengths else 0.0
    prompts = [
        len(agent.tokenizer.prompt_ids(agent.system, question.question)) for question in batch
    ]
    return [
        lengths[q.id] if q.id in lengths else max(typical, prompt)
        for q, prompt in zip(batch, prompts, strict=True)
    ]


def in_order(trajectories: list[Trajectory], batch: list[Question]) -> list[Trajectory]:
    """By question and sample, whichever rank made them: mini-batches are cut by place."""
    place = {question.id: number for number, question in enumerate(batch)}
    return sorted(
        trajectories, key=lambda trajectory: (place[trajectory.question_id], trajectory.sample)
    )


def mean_lengths(trajectories: list[Trajectory]) -> dict[str, float]:
    """Mean number of tokens of the trajectories of each question."""
    lengths: dict[str, list[int]] = {}
    for trajectory in trajectories:
        lengths.setdefault(trajectory.question_id, []).append(len(trajectory.token_ids))
    return {question_id: sum(values) / len(values) for question_id, values in lengths.items()}


# ---- 2. rewards


def grade(trajectories: list[Trajectory], reward: str, judge: Judge) -> None:
    """Give the trajectories that came to their end an outcome, in place; the others keep their
    status, without a value.

    An answer that the judge gave no verdict on is not a wrong one: it is left out like the others.
    """
    ended = [t for t in trajectories if t.outcome.status in ("ok", "judge_error")]
    if reward == "judge":
        verdicts = judge([Case(t.question, t.ground_truth, t.prediction) for t in ended])
        value_of = {"correct": 1.0, "incorrect": 0.0, "error": None}
        values = [value_of[verdict.verdict] for verdict in verdicts]
    else:
        values = [outcome_of(t.prediction, t.ground_truth, reward) for t in ended]
    for trajectory, value in zip(ended, values, strict=True):
        trajectory.outcome = Outcome(value, "judge_error" if value is None else "ok")


# ---- 3. credit


def credit_turns(
    cfg: IgpoConfig, batch: list[Question], trajectories: list[Trajectory]
) -> tuple[list[Trajectory], dict]:
    """Write advantages into the turns of the trajectories that count, in place; return those and
    the statistics of Eq. 4-9.

    A group with fewer than two trajectories left has nothing to compare and is skipped whole.
    """
    group_of = {question.id: number for number, question in enumerate(batch)}
    counted = [trajectory for trajectory in trajectories if trajectory.kept]
    sizes = Counter(trajectory.question_id for trajectory in counted)
    kept = [trajectory for trajectory in counted if sizes[trajectory.question_id] >= 2]
    if not kept:
        return [], {}
    advantages, statistics = batch_advantages(
        [TurnRewards.from_trajectory(t, group_of[t.question_id]) for t in kept], cfg
    )
    for trajectory, per_turn in zip(kept, advantages, strict=True):
        for turn, advantage in zip(trajectory.turns, per_turn, strict=True):
            turn.advantage = advantage
    return kept, statistics


# ---- 4. update


def update_policy(
    cfg: IgpoConfig, training: TrainingRun, reference: Qwen3 | None, kept: list[Trajectory]
) -> dict:
    """One optimizer step per mini-batch of the kept trajectories (Eq. 10); returns the
    metrics of the tokens.
    """
    documents = [policy_document(trajectory) for trajectory in kept]
    documents = with_log_probs(cfg, training, reference, documents)
    results, grad_norms = [], []
    lr = cfg.lr * min(1.0, (training.step + 1) / max(1, cfg.warmup_steps))
    for number in range(min(cfg.updates, len(documents))):
        # neighbours are of one group: each mini-batch has some of it
        mini_batch = with_weights(documents[number :: cfg.updates], cfg.loss_norm)
        done = backward(
            training.model,
            mini_batch,
            lambda fields: policy_loss(cfg, fields),
            max_tokens=cfg.max_tokens_per_gpu,
            world=training.world,
            temperature=cfg.temperature,
            kernel=training.kernel,
        )
        names = [f"trajectory {trajectory.id}" for trajectory in kept[number :: cfg.updates]]
        grad_norms.append(training.update(done, lr, names)[1])
        results += done
    return {
        "grad_norm": sum(grad_norms) / len(grad_norms),
        "skipped": training.extra["skipped"],
        "padding_share": padding_share(documents, results, training.world),
        **policy_metrics(results, clip=cfg.clip, dual_clip=cfg.dual_clip, world=training.world),
    }


def with_log_probs(
    cfg: IgpoConfig, training: TrainingRun, reference: Qwen3 | None, documents: list[Document]
) -> list[Document]:
    """Add the field "ref" where there is a reference and, for several updates, "old": log-probs
    before the first of them.
    """
    models = {"ref": reference, "old": training.model if cfg.updates > 1 else None}
    rows = {
        name: log_probs_of(
            model,
            documents,
            max_tokens=cfg.max_tokens_per_gpu,
            world=training.world,
            temperature=cfg.temperature,
            kernel=training.kernel,
        )
        for name, model in models.items()
        if model is not None
    }
    return [
        Document(d.ids, {**d.per_token, **{name: values[i] for name, values in rows.items()}})
        for i, d in enumerate(documents)
    ]


def policy_loss(cfg: IgpoConfig, fields: dict[str, torch.Tensor]) -> ClippedPolicy:
    """Eq. 10 over one micro-batch; without "old", the ratio is exp(log p - log p.detach())."""
    return ClippedPolicy(
        fields["advantages"],
        fields["weights"],
        old_BS=fields.get("old"),
        ref_BS=fields.get("ref"),
        clip=cfg.clip,
        dual_clip=cfg.dual_clip,
        beta=cfg.kl_beta,
    )


# ---- metrics and plan


def timing(
    seconds: dict[str, float],
    trajectories: list[Trajectory],
    kept: list[Trajectory],
    training: TrainingRun,
) -> dict:
    """Seconds by phase, all tokens of the trajectories per second of the step, and the utilisation
    of the hardware in the update.
    """
    total = sum(seconds.values())
    lengths = [len(trajectory.token_ids) for trajectory in kept]
    loss_tokens = sum(trajectory.num_sampled for trajectory in kept)
    by_phase = {f"seconds_{name}": value for name, value in seconds.items()}
    return by_phase | {
        "seconds_step": total,
        "tokens_per_second": sum(len(t.token_ids) for t in trajectories) / total,
        "mfu": training.mfu(lengths, loss_tokens, seconds["update"]),
    }


def plan(cfg: IgpoConfig, num_questions: int, num_steps: int) -> list[tuple[str, object]]:
    """What the run would do, for --dry-run."""
    config, bf16 = Qwen3Config.read(cfg.model), bool(cfg.gpu_memory) or torch.cuda.is_available()
    has_reference = cfg.kl_beta > 0
    num_rollouts = cfg.questions_per_step * cfg.group_size
    spread = cfg.spread(
        world_size=cfg.world_size, longest=cfg.max_context, reference=has_reference, bf16=bf16
    )
    decoding = cfg.decoding_plan(
        config,
        num_rollouts,
        cfg.max_context,
        bf16=bf16,
        world_size=cfg.world_size,
        training=True,
        reference=has_reference,
    )
    return [
        ("parameters", f"{num_parameters(config):,}"),
        ("questions", f"{num_questions:,}"),
        ("steps", f"{num_steps:,}"),
        ("rollouts", f"{num_steps * num_rollouts:,}"),
        *memory_rows(config, spread, cfg.gpu_memory),
        *(
            (f"{name}, a step" if name == "rollout hours" else name, value)
            for name, value in decoding
        ),
        *cfg.web_plan(num_steps * num_rollouts, cfg.max_turns),
    ]


if __name__ == "__main__":
    run(
        functools.partial(main, keys=Keys.read(os.environ)),
        IgpoConfig,
        "Information-gain policy optimisation of a search agent.",
    )
