"""Rollouts of (question, sample) pairs into a JSONL file that an interruption leaves resumable: finished ones are read back, never made again."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from venus import protocol
from venus.agent import Agent, Job, Limits
from venus.cli import option
from venus.jsonl import append_jsonl, repair_tail
from venus.model import Qwen3, Qwen3Config
from venus.plan import kv_bytes, readable_bytes
from venus.rewards import exact_match, format_valid_share
from venus.sampler import Sampler, SamplingParams
from venus.tokenizer import ChatTokenizer
from venus.tools.offline import CorpusCache, offline_tools
from venus.trajectory import Question, Trajectory, read_trajectories


def jobs_of(questions: Sequence[Question], num_samples: int) -> list[Job]:
    """All samples of a question side by side, so that they share its prefilled prompt."""
    return [Job(question, sample) for question in questions for sample in range(num_samples)]


def check_corpora(questions: Sequence[Question]) -> None:
    """Read every corpus once, so that a bad page stops the run before it starts. ValueError: as `Corpus.load`, or a question without one."""
    cache = CorpusCache(capacity=1)
    for path in dict.fromkeys(question.corpus for question in questions):
        cache.get(path)


def collect(agent: Agent, jobs: Sequence[Job], path: str | Path, *, progress: str | None = "rollouts") -> list[Trajectory]:
    """Run the jobs that `path` does not hold yet, appending each as it ends, and return the trajectories of all jobs in their order.

    A torn last line is dropped. ValueError, before anything is written, when the file belongs to another run, was made under other settings
    (its manifest differs) or asks other questions under the same ids.
    """
    path = Path(path)
    done: dict[tuple[str, int], Trajectory] = {}
    asked = {job.question.id: (job.question.question, job.question.ground_truth) for job in jobs}
    if path.exists():
        repair_tail(path)
        for trajectory in read_trajectories(path):
            if (trajectory.run, trajectory.seed, trajectory.manifest) != (agent.run_name, agent.seed, agent.manifest):
                raise ValueError(
                    f"{path}: holds {trajectory.id} of run {trajectory.run!r} (seed {trajectory.seed}) made under other settings; "
                    "give another output, or remove the file"
                )
            if asked.get(trajectory.question_id) not in (None, (trajectory.question, trajectory.ground_truth)):
                raise ValueError(f"{path}: holds {trajectory.id} with another question or ground truth; give another output, or remove the file")
            done[trajectory.question_id, trajectory.sample] = trajectory
    todo = [job for job in jobs if (job.question.id, job.sample) not in done]
    rollouts = agent.run(todo)
    path.parent.mkdir(parents=True, exist_ok=True)
    bar = tqdm(total=len(jobs), initial=len(jobs) - len(todo), desc=progress, disable=progress is None, unit="rollout")
    with path.open("a", encoding="utf-8") as handle, bar:
        for trajectory in rollouts:
            append_jsonl(handle, trajectory.to_json())
            done[trajectory.question_id, trajectory.sample] = trajectory
            bar.update()
    return [done[job.question.id, job.sample] for job in jobs]


def rollout_metrics(trajectories: Sequence[Trajectory], kept: Sequence[Trajectory]) -> dict:
    """Averages over the trajectories kept for training, and how many were left out. success: exact match; browse_ratio: visits / tool calls.

    With none kept only the counts are there: 0 would read as a result.
    """
    counts = {"trajectories": len(trajectories), "excluded": len(trajectories) - len(kept)}
    if not kept:
        return counts
    turns = [turn for trajectory in kept for turn in trajectory.turns]
    searches, visits = (sum(turn.action == kind for turn in turns) for kind in ("search", "visit"))
    gains: dict[int, list[float]] = {}
    for trajectory in kept:
        for number, turn in enumerate(trajectory.turns):
            if turn.info_gain is not None:
                gains.setdefault(number, []).append(turn.info_gain)
    count = len(kept)
    return {
        "success": sum(exact_match(t.prediction, t.ground_truth) for t in kept) / count, "outcome": sum(t.outcome.value for t in kept) / count,
        "info_gain_by_turn": {str(number): sum(gains[number]) / len(gains[number]) for number in sorted(gains)},
        "format_valid_share": format_valid_share(kept), "turns": len(turns) / count, "searches": searches / count, "visits": visits / count,
        "browse_ratio": visits / (searches + visits) if searches + visits else None, **counts,
    }  # fmt: skip


@dataclass(frozen=True)
class RolloutOptions:
    """How trajectories are made; the configs of rollout.py, eval.py and train_igpo.py start with these fields."""

    # sampling
    temperature: float = option(1.0, help="softmax temperature; 0 is greedy")
    top_p: float = option(1.0, help="sample from the smallest set of tokens with this probability mass")
    top_k: int = option(0, help="sample from this many most probable tokens; 0 is all of them")
    slots: int = option(16, help="rollouts decoded at once", unit="rows")
    threads: int | None = option(None, help="CPU threads; empty is one per core, which for tiny models on a busy machine is slower than 1")
    # limits
    max_turns: int = option(200, help="assistant turns of a trajectory; the last one is asked to answer", unit="turns")
    max_turn_tokens: int = option(8192, help="sampled tokens of a turn", unit="tokens")
    max_observation_tokens: int = option(16384, help="longer observations are cut, visibly", unit="tokens")
    max_context: int = option(262144, help="tokens of a trajectory; the answering turn is kept room for", unit="tokens")
    max_seconds: float = option(0.0, help="wall-clock limit of a trajectory, excluded from statistics when reached; 0 is none", unit="s")
    tool_seconds: float = option(150.0, help="total deadline of a tool call", unit="s")
    # protocol
    system_prompt: str = option("full", help="the system message: full with tool signatures, or short for tiny models", choices=("full", "short"))
    date: str | None = option(None, help="date line of the full system message, such as 2026-03-01; empty is none")

    def validate(self) -> None:
        """ValueError for a value out of range."""
        self.limits()
        SamplingParams((), self.temperature, self.top_p, self.top_k)
        for name in ("slots", "threads"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1")

    def set_threads(self) -> None:
        """Give torch the threads asked for."""
        if self.threads:
            torch.set_num_threads(self.threads)

    def limits(self) -> Limits:
        """The agent's limits; ValueError for one out of range."""
        return Limits(self.max_turns, self.max_turn_tokens, self.max_observation_tokens, self.max_context, self.max_seconds, self.tool_seconds)

    def plan(self, config: Qwen3Config, num_rollouts: int) -> list[tuple[str, str]]:
        """Rows for `print_plan`: parameters, rollouts, upper bounds of what they sample and of the KV cache."""
        with torch.device("meta"):
            num_parameters = sum(parameter.numel() for parameter in Qwen3(config).parameters())
        heads = {"layers": config.num_hidden_layers, "kv_heads": config.num_key_value_heads, "head_dim": config.head_dim}
        cache = kv_bytes(tokens=self.slots * self.max_context, bf16=config.dtype != "float32", **heads)
        sampled = f"{num_rollouts * self.max_turns * self.max_turn_tokens:,}"
        return [("parameters", f"{num_parameters:,}"), ("rollouts", f"{num_rollouts:,}"), ("sampled tokens, at most", sampled),
                ("KV cache, all slots full", readable_bytes(cache))]  # fmt: skip

    def manifest(self) -> dict:
        """What decides a trajectory besides seed, weights and tools; recorded in each one."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(RolloutOptions) if field.name not in ("slots", "threads")}

    def agent(self, model: Qwen3, tokenizer: ChatTokenizer, *, run: str, seed: int, manifest: dict) -> Agent:
        """An agent over a fresh KV cache on the model's device, with the offline tools."""
        if self.max_context > model.config.max_position_embeddings:
            raise ValueError(f"max_context {self.max_context} exceeds the model's max_position_embeddings {model.config.max_position_embeddings}")
        tokenizer.check_fits(model.config.vocab_size)
        params = SamplingParams((tokenizer.im_end_id, tokenizer.endoftext_id), self.temperature, self.top_p, self.top_k)
        sampler = Sampler(model, params, num_slots=self.slots, capacity=self.max_context)
        system = protocol.system_prompt(self.system_prompt, self.date)
        return Agent(sampler, tokenizer, offline_tools(), self.limits(), system=system, run=run, seed=seed, manifest=self.manifest() | manifest)
