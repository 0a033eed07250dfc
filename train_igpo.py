"""Information-gain policy optimisation: roll out, score every turn by how much it raised the ground
truth, credit, update (Eq. 2-10).

    python train_igpo.py --model SFT_DIR --questions questions.jsonl --output runs/igpo torchrun
    --nproc_per_node=8 train_igpo.py ...
The same command resumes, with any number of processes. Exit code 3: stopped by SIGTERM or Ctrl-C,
everything saved. GRPO, the baseline, is the same code with --ig-turns none --format-pool none.
"""

import dataclasses
import functools
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from venus.cli import option, run
from venus.files import write_jsonl
from venus.grading.judge import RULES, Case, Judge, open_judge, parse_judge
from venus.model.costs import memory_rows, num_parameters
from venus.model.qwen3 import ClippedPolicy, Qwen3, Qwen3Config, set_recompute
from venus.model.weights import fingerprint
from venus.rl.igpo import AdvantageConfig, TurnRewards, batch_advantages
from venus.rl.info_gain import GainRule, score_turns
from venus.rl.rewards import outcome_of
from venus.rollout.agent import Agent
from venus.rollout.collect import (
    RolloutOptions,
    check_corpora,
    collect,
    jobs_of,
    rollout_metrics,
    share_of_jobs,
)
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
    TrainingOptions,
    TrainingRun,
    compute_dtype,
    digest,
    export_latest,
    timed,
)
from venus.train.parallel import World, recorded, unsharded
from venus.trajectory import Outcome, Question, Trajectory, read_questions


@dataclass(frozen=True)
class IgpoConfig(RolloutOptions, TrainingOptions):
    # data and model
    model: str = option(
        help="Hugging Face directory of the SFT model: the start and the KL reference"
    )
    questions: str = option(help="questions.jsonl: id, question, ground_truth, corpus")
    output: str = option(help="directory of checkpoints, metrics, rollouts and the exported model")
    questions_per_step: int = option(16, help="questions of an optimizer step")
    group_size: int = option(8, help="rollouts per question")
    steps: int | None = option(None, help="steps in all; empty is one pass over the questions")
    # rewards and credit (Eq. 2-9)
    reward: str = option(
        "em",
        help="outcome: normalised exact match, multiset F1, or the verdict of --judge",
        choices=("em", "f1", "judge"),
    )
    judge: str = option(
        "none",
        help="for --reward judge: openai:BASE_URL:MODEL (key: JUDGE_API_KEY or OPENAI_API_KEY), "
        f"or {', '.join(RULES)}",
    )
    judge_calls: int = option(16, help="judge calls under way at once, on each rank")
    judge_seconds: float = option(
        300.0,
        help="for all tries of a judge call; a rollout without a verdict leaves statistics and "
        "loss",
        unit="s",
    )
    info_gain: str = option(
        "rollout",
        help="score ground truths in the rollout, from its cache, or afterwards, packed",
        choices=("rollout", "packed"),
    )
    ig_turns: str = option(
        "visit",
        help="turns whose gain is rewarded: answered visits, all, or none (GRPO)",
        choices=("visit", "all", "none"),
    )
    ig_value: str = option(
        "log_prob",
        help="gain in mean log-probability (DR-Venus) or in its exp (IGPO)",
        choices=("log_prob", "prob"),
    )
    ig_alias: str = option(
        "first",
        help="ground truth scored: the first alias, or the best one at every cut",
        choices=("first", "max"),
    )
    ig_weight: float = option(1.0, help="factor on information gain, not on the penalty")
    ig_std_floor: float = option(
        0.0,
        help="least sigma of the information-gain pool; at 0, as released, tiny gains become "
        "full-size advantages",
    )
    ig_scale: str = option(
        "batch",
        help="IG-Scale over the batch (released), per group, or off",
        choices=("batch", "group", "none"),
    )
    norm: str = option(
        "separate",
        help="z-score outcomes and gains apart, or as one pool",
        choices=("separate", "joint"),
    )
    format_penalty: float = option(1.0, help="lambda: a malformed turn earns minus this; 0 is off")
    format_pool: str = option(
        "ig",
        help="penalties enter the information-gain pool (released), or are added afterwards",
        choices=("ig", "none"),
    )
    gamma: float = option(0.95, help="discount per credit segment")
    # objective (Eq. 10)
    updates: int = option(
        1,
        help="optimizer steps per batch of rollouts; more than one recomputes old log-probs first",
    )
    loss_norm: str = option(
        "sequence",
        help="mean over trajectories of their token means, or over all tokens",
        choices=("sequence", "token"),
    )
    clip: float = option(0.2, help="the ratio is clipped to 1 +- this")
    dual_clip: float = option(
        3.0, help="bound of the loss at negative advantage, as a multiple of it"
    )
    kl_beta: float = option(
        0.001, help="weight of the k3 KL penalty to --model; 0 drops the reference"
    )
    lr: float = option(1e-6, help="constant learning rate")
    warmup_steps: int = option(0, help="steps of linear warm-up", unit="steps")
    beta1: float = option(0.9, help="AdamW")
    beta2: float = option(0.999, help="AdamW")
    weight_decay: float = option(0.01, help="AdamW")
    clip_norm: float = option(1.0, help="largest global gradient norm")
    # run
    seed: int = option(0, help="seed of the order of questions and of the sampling noise")
    save_every: int = option(
        5, help="steps between checkpoints; a run resumes from the latest", unit="steps"
    )
    rank_minutes: float = option(
        600.0,
        help="longest wait for the slowest process at the end of rollouts; then it is named, and "
        "the run fails",
        unit="min",
    )

    def validate(self):
        super().validate()
        TrainingOptions.validate(self)
        self.advantages()
        parse_judge(self.judge)
        if (self.reward == "judge") == (self.judge == "none"):
            raise ValueError(
                f"reward {self.reward} with judge {self.judge}: --reward judge needs a "
                "--judge, and no other reward asks one"
            )
        least = {
            "questions_per_step": 1,
            "group_size": 2,
            "steps": 1,
            "updates": 1,
            "save_every": 1,
            "judge_calls": 1,
            "judge_seconds": 1,
        }
        for name, value in least.items():
            if getattr(self, name) is not None and getattr(self, name) < value:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least {value}")
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

    def gain(self) -> GainRule | None:
        """What the rollouts score as they go."""
        return (
            GainRule(self.ig_turns, self.ig_value, self.ig_alias)
            if self.info_gain == "rollout" and self.ig_turns != "none"
            else None
        )

    def advantages(self) -> AdvantageConfig:
        return AdvantageConfig(
            **{
                field.name: getattr(self, field.name)
                for field in dataclasses.fields(AdvantageConfig)
            }
        )


@recorded
def main(cfg: IgpoConfig, keys: Keys) -> int | None:
    """Per step: roll out, score, credit, update."""
    cfg.set_threads()
    if cfg.export:
        return export_latest(cfg)
    questions, tokenizer = read_questions(cfg.questions), ChatTokenizer(cfg.model)
    corpora = check_corpora(questions) if cfg.tools == "offline" else None
    num_steps = cfg.steps or steps_per_epoch([1] * len(questions), cfg.questions_per_step)
    if cfg.dry_run:
        print_plan(cfg, plan(cfg, len(questions), num_steps))
        return None
    world = World(cfg.sp)
    dtype = compute_dtype(world)
    model = load_sharded(cfg.model, world, dtype=torch.float32, bf16=dtype == torch.bfloat16)
    set_recompute(model, cfg.recompute)
    reference = (
        load_sharded(cfg.model, world, dtype=dtype, bf16=False).requires_grad_(False)
        if cfg.kl_beta
        else None
    )
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
            bf16=dtype == torch.bfloat16,
        ),
        console=(
            "success",
            "info_gain_mean",
            "format_valid_share",
            "turns",
            "browse_ratio",
            "kl",
            "grad_norm",
            "seconds_step",
        ),
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
            batch = [
                questions[i]
                for i in batch_items(
                    [1] * len(questions), cfg.questions_per_step, seed=cfg.seed, step=step
                )
            ]
            # 1. roll out G trajectories of every question, and 2. score the ground truth after
            # their turns, with the weights at hand
            with unsharded(model):
                with timed(seconds, "rollout", world):
                    mine = roll_out(cfg, tokenizer, tools, judge, batch, training)
                if world.stop_agreed():
                    break  # the finished ones are on disk, and taken up by the next start
                with timed(seconds, "info_gain", world):
                    if cfg.info_gain == "packed":
                        score_turns(
                            model,
                            tokenizer,
                            [trajectory for trajectory in mine if trajectory.kept],
                            ig_turns=cfg.ig_turns,
                            ig_value=cfg.ig_value,
                            ig_alias=cfg.ig_alias,
                            max_tokens=cfg.max_tokens_per_gpu,
                            kernel=training.kernel,
                        )
            trajectories = in_order(world.gather(mine), batch)
            # 3. credit: rewards per turn -> advantages per turn, over the whole batch
            kept, credit = credit_turns(cfg, batch, trajectories)
            # 4. update
            with timed(seconds, "update", world):
                update = update_policy(cfg, training, reference, kept) if kept else {}
            training.metrics.log(
                step,
                rollout_metrics(trajectories, kept)
                | credit
                | update
                | timing(seconds, trajectories, kept, training),
            )
            training.extra["lengths"] |= mean_lengths(trajectories)
            if world.is_main:
                write_jsonl(
                    rollouts / f"step_{step:05d}.jsonl",
                    [trajectory.to_json() for trajectory in trajectories],
                )
            drop_partials(rollouts, step + 1, world)
    return training.finish()


def settings(cfg: IgpoConfig) -> dict:
    """What decides the training: a checkpoint made with other values is not resumed. Model and
    questions count by their content.
    """
    left_out = {
        field.name
        for base in (TrainingOptions, RolloutOptions)
        for field in dataclasses.fields(base)
    }
    left_out |= {
        "model",
        "questions",
        "output",
        "steps",
        "save_every",
        "rank_minutes",
        "judge_calls",
        "judge_seconds",
    }
    values = {
        field.name: getattr(cfg, field.name)
        for field in dataclasses.fields(cfg)
        if field.name not in left_out
    }
    # the model may move to another address
    values["judge"] = (parse_judge(cfg.judge) or [cfg.judge])[-1]
    return (
        values
        | cfg.manifest()
        | {"model": fingerprint(cfg.model), "questions": digest(Path(cfg.questions).read_bytes())}
    )


# ---- 1. rollouts


def drop_partials(directory: Path, step: int, world: World) -> None:
    """Remove the partial rollouts of all steps but the coming one, `step`, which takes its own up
    again. A collective.
    """
    if world.is_main:
        for path in set(directory.glob("step_*.partial.jsonl")) - set(
            directory.glob(f"step_{step:05d}.*")
        ):
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
    directory, step, world = training.output / "rollouts", training.step, training.world
    # trajectories with gains, and under which rule, are not those without
    manifest = {
        "step": step,
        "model": training.extra["settings"]["model"],
        "gain": dataclasses.asdict(cfg.gain()) if cfg.gain() else None,
    }
    seed = cfg.seed * 1_000_003 + step
    agent = cfg.agent(
        training.model,
        tokenizer,
        run=training.output.name,
        seed=seed,
        manifest=manifest,
        tools=tools,
        gain=cfg.gain(),
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
    if reward != "judge":
        outcomes = [Outcome(outcome_of(t.prediction, t.ground_truth, reward), "ok") for t in ended]
    else:
        verdicts = judge([Case(t.question, t.ground_truth, t.prediction) for t in ended])
        outcomes = [
            Outcome(None, "judge_error")
            if v.verdict == "error"
            else Outcome(float(v.verdict == "correct"), "ok")
            for v in verdicts
        ]
    for trajectory, outcome in zip(ended, outcomes, strict=True):
        trajectory.outcome = outcome


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
    sizes = [
        sum(group_of[t.question_id] == number for t in counted) for number in range(len(batch))
    ]
    kept = [t for t in counted if sizes[group_of[t.question_id]] >= 2]
    if not kept:
        return [], {}
    advantages, statistics = batch_advantages(
        [TurnRewards.from_trajectory(t, group_of[t.question_id]) for t in kept], cfg.advantages()
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
    model, world = training.model, training.world
    how = {
        "max_tokens": cfg.max_tokens_per_gpu,
        "world": world,
        "temperature": cfg.temperature,
        "kernel": training.kernel,
    }
    documents = [policy_document(trajectory) for trajectory in kept]
    extras = {"ref": log_probs_of(reference, documents, **how)} if reference is not None else {}
    if cfg.updates > 1:
        extras["old"] = log_probs_of(model, documents, **how)
    documents = [
        Document(d.ids, {**d.per_token, **{name: rows[i] for name, rows in extras.items()}})
        for i, d in enumerate(documents)
    ]
    results = []
    grad_norms = []
    lr = cfg.lr * min(1.0, (training.step + 1) / max(1, cfg.warmup_steps))
    for number in range(min(cfg.updates, len(documents))):
        # neighbours are of one group: each mini-batch has some of it
        mini_batch = with_weights(documents[number :: cfg.updates], cfg.loss_norm)
        done = backward(model, mini_batch, lambda fields: policy_loss(cfg, fields), **how)
        _, grad_norm = training.update(
            done, lr, [f"trajectory {trajectory.id}" for trajectory in kept[number :: cfg.updates]]
        )
        results, grad_norms = results + done, [*grad_norms, grad_norm]
    return {
        "grad_norm": sum(grad_norms) / len(grad_norms),
        "skipped": training.extra["skipped"],
        "padding_share": padding_share(documents, results, world),
        **policy_metrics(results, clip=cfg.clip, dual_clip=cfg.dual_clip, world=world),
    }


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
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]
    trained = (
        [len(trajectory.token_ids) for trajectory in kept],
        sum(trajectory.num_sampled for trajectory in kept),
    )
    by_phase = {f"seconds_{name}": value for name, value in seconds.items()}
    return by_phase | {
        "seconds_step": total,
        "tokens_per_second": sum(lengths) / total,
        "mfu": training.mfu(*trained, seconds["update"]),
    }


def plan(cfg: IgpoConfig, num_questions: int, num_steps: int) -> list[tuple[str, object]]:
    """What the run would do, for --dry-run."""
    config, bf16 = Qwen3Config.read(cfg.model), bool(cfg.gpu_memory) or torch.cuda.is_available()
    how = {"world_size": cfg.world_size, "reference": bool(cfg.kl_beta), "bf16": bf16}
    num_rollouts = cfg.questions_per_step * cfg.group_size
    spread = cfg.spread(longest=cfg.max_context, **how)
    decoding = cfg.decoding_plan(config, num_rollouts, cfg.max_context, training=True, **how)
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
