"""Rollouts of (question, sample) pairs into a JSONL file that an interruption leaves resumable:
finished ones are read back, never made again.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from tqdm import tqdm

from venus import protocol
from venus.cli import option
from venus.files import append_jsonl, repair_tail, write_jsonl
from venus.model.costs import num_parameters
from venus.model.qwen3 import Qwen3, Qwen3Config
from venus.model.weights import fingerprint, load_for_inference
from venus.rl.info_gain import GainRule
from venus.rl.rewards import exact_match, format_valid_share
from venus.rollout.agent import Agent, Job, Limits
from venus.rollout.options import DecodingOptions
from venus.rollout.remote import RemoteSampler
from venus.rollout.sampler import Sampler, SamplingParams
from venus.services.chat import ChatClient, parse_endpoint
from venus.tokenizer import ChatTokenizer
from venus.tools.base import Tool
from venus.tools.offline import CorpusCache
from venus.tools.options import Keys, ToolOptions
from venus.train.batches import micro_batches
from venus.trajectory import Question, Trajectory, read_trajectories

FAILED = ("tool_error", "model_error")  # stop reasons that say nothing about the agent


def jobs_of(questions: Sequence[Question], num_samples: int) -> list[Job]:
    """All samples of a question side by side, so that they share its prefilled prompt."""
    return [Job(question, sample) for question in questions for sample in range(num_samples)]


def share_of_jobs(
    questions: Sequence[Question],
    num_samples: int,
    costs: Sequence[float],
    *,
    rank: int,
    num_ranks: int,
) -> list[Job]:
    """The jobs of one of several ranks. costs: expected tokens of a rollout of each question; the
    costliest go first, each to the rank with the least.

    The samples of a question stay together, since they share its prompt, unless there are fewer
    questions than ranks.
    """
    whole = len(questions) >= num_ranks
    units = (
        [[job] for job in jobs_of(questions, num_samples)]
        if not whole
        else [jobs_of([question], num_samples) for question in questions]
    )
    unit_costs = costs if whole else [cost for cost in costs for _ in range(num_samples)]
    # dealt as documents are, all in one round
    (mine,) = micro_batches(unit_costs, 2 * sum(unit_costs), num_ranks)[rank]
    return [job for number in sorted(mine) for job in units[number]]


def check_corpora(questions: Sequence[Question]) -> CorpusCache:
    """Read every corpus and return them: a bad page stops the run before it starts, and no tool
    call has to wait until a large one is indexed.

    ValueError: as `Corpus.load`, or a question without one.
    """
    cache = CorpusCache()
    for path in dict.fromkeys(question.corpus for question in questions):
        cache.get(path)
    return cache


def collect(
    agent: Agent,
    jobs: Sequence[Job],
    path: str | Path,
    *,
    progress: str | None = "rollouts",
    begin: Callable[[], object] | None = None,
    others: Sequence[Path] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Trajectory]:
    """Run the jobs that `path` does not hold yet, appending each as it ends, and return the
    trajectories of all jobs in their order.

    A torn last line is dropped, and so are rollouts whose tools or model were down: those are made
    again. begin is called when all checks have passed and no rollout has begun. others: files of
    other processes, whose rollouts are taken up as well. When should_stop stops the agent, what is
    finished is returned. ValueError, before anything is written, when the file belongs to another
    run, was made under other settings (its manifest differs) or asks other questions under the same
    ids.
    """
    path = Path(path)
    done: dict[tuple[str, int], Trajectory] = {}
    stale: set[Path] = set()
    asked = {job.question.id: (job.question.question, job.question.ground_truth) for job in jobs}
    repair_tail(path)
    for file in (*others, *([path] if path.exists() else [])):
        # another process may be at its last row
        for trajectory in read_trajectories(file, torn_tail=True):
            held = f"{file}: holds {trajectory.id}"
            if (trajectory.run, trajectory.seed, trajectory.manifest) != (
                agent.run_name,
                agent.seed,
                agent.manifest,
            ):
                made = (
                    f"of run {trajectory.run!r} (seed {trajectory.seed}) made under other settings"
                )
                raise ValueError(f"{held} {made}; give another output, or remove the file")
            if asked.get(trajectory.question_id) not in (
                None,
                (trajectory.question, trajectory.ground_truth),
            ):
                raise ValueError(
                    f"{held} with another question or ground truth; give another output, or "
                    "remove the file"
                )
            if trajectory.stop_reason in FAILED:
                stale.add(file)
            else:
                done[trajectory.question_id, trajectory.sample] = trajectory
    todo = [job for job in jobs if (job.question.id, job.sample) not in done]
    rollouts = agent.run(todo, should_stop, num_done=len(jobs) - len(todo))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path in stale:  # the rows of failed rollouts go, so that each key stands once
        write_jsonl(
            path,
            (row.to_json() for row in read_trajectories(path) if row.stop_reason not in FAILED),
        )
    if begin:
        begin()
    bar = tqdm(
        total=len(jobs),
        initial=len(jobs) - len(todo),
        desc=progress,
        disable=progress is None,
        unit="rollout",
    )
    with path.open("a", encoding="utf-8") as handle, bar:
        for trajectory in rollouts:
            append_jsonl(handle, trajectory.to_json())
            done[trajectory.question_id, trajectory.sample] = trajectory
            bar.update()
    return [
        done[job.question.id, job.sample] for job in jobs if (job.question.id, job.sample) in done
    ]


def rollout_metrics(trajectories: Sequence[Trajectory], kept: Sequence[Trajectory]) -> dict:
    """Averages over the trajectories kept for training, and how many were left out. success: exact
    match; browse_ratio: visits / tool calls.

    excluded_by: why, an outcome status or small_group (fewer than two were left of it);
    failed_calls: tool calls without an answer, of all trajectories. With none kept only the counts
    are there: 0 would read as a result.
    """
    kept_keys = {trajectory.key for trajectory in kept}
    reasons = Counter(
        "small_group" if t.kept else t.outcome.status
        for t in trajectories
        if t.key not in kept_keys
    )
    failed = sum(
        turn.tool_status in ("error", "timeout")
        for trajectory in trajectories
        for turn in trajectory.turns
    )
    counts = {
        "trajectories": len(trajectories),
        "excluded": reasons.total(),
        "excluded_by": dict(reasons),
        "failed_calls": failed,
    }
    if not kept:
        return counts
    turns = [turn for trajectory in kept for turn in trajectory.turns]
    searches, visits = (sum(turn.action == kind for turn in turns) for kind in ("search", "visit"))
    by_turn = zip_longest(*([turn.info_gain for turn in trajectory.turns] for trajectory in kept))
    gains = {
        str(number): [gain for gain in column if gain is not None]
        for number, column in enumerate(by_turn)
    }
    count = len(kept)
    return {
        "success": sum(exact_match(t.prediction, t.ground_truth) for t in kept) / count,
        "outcome": sum(t.outcome.value for t in kept) / count,
        "info_gain_by_turn": {
            number: sum(column) / len(column) for number, column in gains.items() if column
        },
        "format_valid_share": format_valid_share(kept),
        "turns": len(turns) / count,
        "searches": searches / count,
        "visits": visits / count,
        "browse_ratio": visits / (searches + visits) if searches + visits else None,
        **counts,
    }


@dataclass(frozen=True)
class RolloutOptions(ToolOptions, DecodingOptions):
    """How trajectories are made; the configs of rollout.py, eval.py and train_igpo.py
    start with these fields.
    """

    # sampling
    policy: str | None = option(
        None,
        help="openai:BASE_URL:MODEL (key: POLICY_API_KEY or OPENAI_API_KEY) samples, and --model "
        "names the tokenizer only",
    )
    policy_seconds: float = option(600.0, help="longest wait for one turn of --policy", unit="s")
    temperature: float = option(1.0, help="softmax temperature; 0 is greedy")
    top_p: float = option(
        1.0, help="sample from the smallest set of tokens with this probability mass"
    )
    top_k: int = option(0, help="sample from this many most probable tokens; 0 is all of them")
    threads: int | None = option(
        None,
        help="CPU threads; empty is one per core, which for tiny models on a busy machine is "
        "slower than 1",
    )
    # limits
    max_turns: int = option(
        200, help="assistant turns of a trajectory; the last one is asked to answer", unit="turns"
    )
    max_turn_tokens: int = option(8192, help="sampled tokens of a turn", unit="tokens")
    max_observation_tokens: int = option(
        16384, help="longer observations are cut, visibly", unit="tokens"
    )
    max_context: int = option(
        262144, help="tokens of a trajectory; the answering turn is kept room for", unit="tokens"
    )
    max_seconds: float = option(
        0.0,
        help="wall-clock limit of a trajectory, which then leaves training and is wrong in "
        "eval.py; 0 is none",
        unit="s",
    )
    cut_off_share: float = option(
        0.0,
        help="give up the last of a process' rollouts of a step when only this share is left; 0 "
        "waits for all",
    )
    tool_seconds: float = option(150.0, help="total deadline of a tool call", unit="s")
    # protocol
    system_prompt: str = option(
        "full",
        help="the system message: full with tool signatures, or short for tiny models",
        choices=("full", "short"),
    )
    date: str | None = option(
        None, help="date line of the full system message, such as 2026-03-01; empty is none"
    )

    def validate(self) -> None:
        """ValueError for a value out of range."""
        ToolOptions.validate(self)
        DecodingOptions.validate(self)
        self.limits()
        if self.policy is not None:
            parse_endpoint(self.policy, "--policy")
        if self.policy_seconds <= 0:
            raise ValueError(f"policy_seconds {self.policy_seconds}: must be positive")
        SamplingParams((), self.temperature, self.top_p, self.top_k)
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads {self.threads}: must be at least 1")
        if not 0 <= self.cut_off_share < 1:
            raise ValueError(f"cut_off_share {self.cut_off_share}: must lie in [0, 1)")

    def set_threads(self) -> None:
        """Give torch the threads asked for."""
        if self.threads:
            torch.set_num_threads(self.threads)

    def limits(self) -> Limits:
        """The agent's limits; ValueError for one out of range."""
        return Limits(
            self.max_turns,
            self.max_turn_tokens,
            self.max_observation_tokens,
            self.max_context,
            self.max_seconds,
            self.tool_seconds,
        )

    def plan(self, directory: str, num_rollouts: int) -> list[tuple[str, str]]:
        """Rows for `print_plan`: rollouts, an upper bound of what they sample, the model in
        `directory` and how it decodes, unless --policy samples.
        """
        rows = [
            ("rollouts", f"{num_rollouts:,}"),
            (
                "sampled tokens, at most",
                f"{num_rollouts * self.max_turns * self.max_turn_tokens:,}",
            ),
        ]
        if self.policy is None:
            config = Qwen3Config.read(directory)
            decoding = self.decoding_plan(
                config, num_rollouts, self.max_context, bf16=config.dtype != "float32"
            )
            rows = [("parameters", f"{num_parameters(config):,}"), *rows, *decoding]
        return [*rows, *self.web_plan(num_rollouts, self.max_turns)]

    def manifest(self) -> dict:
        """What decides a trajectory besides seed and weights; recorded in each one."""
        left_out = {"threads", "policy", "policy_seconds"} | {
            field.name
            for base in (ToolOptions, DecodingOptions)
            for field in dataclasses.fields(base)
        }
        own = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(RolloutOptions)
            if field.name not in left_out
        }
        return own | self.tools_manifest()

    def load_policy(self, directory: str, keys: Keys) -> tuple[Qwen3 | ChatClient, str]:
        """What samples, the model in `directory` or the client of --policy, and what
        a manifest calls it.
        """
        client = self.policy_client(keys)
        return (
            (load_for_inference(directory), fingerprint(directory))
            if client is None
            else (client, self.policy)
        )

    def policy_client(self, keys: Keys) -> ChatClient | None:
        """The client of --policy, if there is one."""
        if self.policy is None:
            return None
        return ChatClient(
            *parse_endpoint(self.policy, "--policy"), keys.policy, self.policy_seconds
        )

    def agent(
        self,
        model: Qwen3 | ChatClient,
        tokenizer: ChatTokenizer,
        *,
        run: str,
        seed: int,
        manifest: dict,
        tools: dict[str, Tool] | None = None,
        gain: GainRule | None = None,
    ) -> Agent:
        """An agent over a fresh KV cache on the model's device, or over an endpoint. tools: of
        `make_tools`, once a run; None makes some without keys.

        gain: information gain to be scored along the way, never over an endpoint.
        """
        return Agent(
            self._sampler(model, tokenizer),
            tokenizer,
            tools or self.make_tools(Keys()),
            self.limits(),
            run=run,
            seed=seed,
            gain=gain,
            system=protocol.system_prompt(self.system_prompt, self.date),
            manifest=self.manifest() | manifest,
            cut_off_share=self.cut_off_share,
        )

    def _sampler(
        self, model: Qwen3 | ChatClient, tokenizer: ChatTokenizer
    ) -> Sampler | RemoteSampler:
        params = SamplingParams(
            (tokenizer.im_end_id, tokenizer.endoftext_id), self.temperature, self.top_p, self.top_k
        )
        if isinstance(model, ChatClient):
            return RemoteSampler(
                model,
                tokenizer,
                params,
                num_slots=self.concurrent or self.slots,
                capacity=self.max_context,
            )
        if self.max_context > model.config.max_position_embeddings:
            raise ValueError(
                f"max_context {self.max_context} exceeds the model's max_position_embeddings "
                f"{model.config.max_position_embeddings}"
            )
        tokenizer.check_fits(model.config.vocab_size)
        return self.sampler(model, params, self.max_context)
