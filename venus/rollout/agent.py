"""The multi-turn loop: sampler + protocol + tools -> Trajectory. Token in, token out: what was
sampled is what is recorded.

Many rollouts run at once over the sampler's slots. Each is a small state machine: generate a turn
-> read its action -> wait for the tool, or answer at once (malformed turn, duplicate call) ->
append the observation -> generate. No rollout waits for another; a hung tool costs its own row
only.
"""

import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from venus import protocol
from venus.cli import Options, option
from venus.protocol import Action, parse_action
from venus.rl.info_gain import GainRule
from venus.rollout.noise import noise_key
from venus.rollout.sampler import Generation, Sampler
from venus.rollout.tool_calls import ToolPool
from venus.tokenizer import ChatTokenizer
from venus.tools.base import Tool, ToolResult
from venus.trajectory import Outcome, Question, Trajectory, Turn

CUT_NOTICE = "\n[cut]"


@dataclass(frozen=True)
class Limits(Options):
    """What ends a rollout.

    Before every turn the context must hold that turn, its observation, the message that asks for
    the answer and the answering turn; where it cannot, the turn is the answering one
    (context_limit). An observation longer than its share is cut, visibly.
    """

    max_turns: int = option(
        200,
        group="limits",
        help="assistant turns of a trajectory; the last one is asked to answer",
        unit="turns",
        least=1,
        agent=True,
    )
    max_turn_tokens: int = option(
        8192, help="sampled tokens of a turn", unit="tokens", least=1, agent=True
    )
    max_observation_tokens: int = option(
        16384, help="longer observations are cut, visibly", unit="tokens", least=32, agent=True
    )
    max_context: int = option(
        262144,
        help="tokens of a trajectory; the answering turn is kept room for",
        unit="tokens",
        least=1,
        agent=True,
    )
    max_seconds: float = option(
        0.0,
        help="wall-clock limit of a trajectory, which then leaves training and is wrong in "
        "eval.py; 0 is none",
        unit="s",
        least=0,
        most=1_000_000,
    )
    cut_off_share: float = option(
        0.0,
        help="give up the last of a process' rollouts of a step when only this share is left; 0 "
        "waits for all",
        least=0,
        below=1,
    )
    tool_seconds: float = option(
        150.0, help="total deadline of a tool call", unit="s", least=0.001, most=1_000_000
    )


@dataclass(frozen=True)
class Job:
    """One rollout to make: sample number `sample` of a question."""

    question: Question
    sample: int


@dataclass
class _Rollout:
    job: Job
    slot: int
    ids: list[int]  # at first the prompt's
    started: float = field(default_factory=time.monotonic)
    log_probs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    # successful calls of this rollout, by signature
    results: dict[tuple, ToolResult] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"model": 0.0, "tool": 0.0})
    since: float = 0.0
    limit: str | None = None  # the limit that made the coming turn the last one
    # turn -> mean log-prob of each ground truth after it
    values: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self):
        self.prompt_len = len(self.ids)


class Agent:
    """Runs jobs over one sampler. `tools` maps search and visit to callables; `manifest` is copied
    into every trajectory.

    gain: score the ground truth behind every observation that counts, while its keys and values are
    in the cache, and write the turns' gains.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: ChatTokenizer,
        tools: dict[str, Tool],
        limits: Limits,
        *,
        system: str,
        run: str,
        seed: int,
        manifest: dict,
        gain: GainRule | None = None,
    ):
        self.sampler = sampler
        self.tokenizer = tokenizer
        self.tools = tools
        self.limits = limits
        self.system = system
        self.run_name = run
        self.seed = seed
        self.manifest = manifest
        self.gain = gain
        # question id -> mean log-prob of each ground truth at the question,
        # once its group has begun
        self.baselines: dict[str, list[float]] = {}
        longest = max(
            len(tokenizer.observation_ids(["", message], closed=False))
            for message in protocol.LIMIT_MESSAGES.values()
        )
        # a turn, its observation, the answering turn
        self.reserve = longest + limits.max_observation_tokens + 2 * limits.max_turn_tokens

    def run(
        self,
        jobs: Iterable[Job],
        should_stop: Callable[[], bool] = lambda: False,
        *,
        num_done: int = 0,
    ) -> Iterator[Trajectory]:
        """Yield the trajectory of every job as it finishes. ValueError, before the first one
        starts, for a prompt longer than the context.

        should_stop is asked before every token; then the trajectories under way are given up.
        num_done: jobs that were finished before and count for cut_off_share. An agent that gave
        trajectories up is not to be used again.
        """
        waiting = collections.deque(jobs)
        for question in {job.question.id: job.question for job in waiting}.values():
            self._prompt_ids(question)
            self._answers(question)
        num_stragglers = math.floor(self.limits.cut_off_share * (num_done + len(waiting)))
        return self._run(waiting, should_stop, num_stragglers)

    def _run(
        self, waiting: collections.deque[Job], should_stop: Callable[[], bool], num_stragglers: int
    ) -> Iterator[Trajectory]:
        active = {}
        with contextlib.closing(ToolPool()) as pool:
            while len(waiting) + len(active) > num_stragglers and not should_stop():
                self._admit(waiting, active)
                for generation in self.sampler.step():
                    rollout = active[generation.slot]
                    trajectory = self._end_turn(rollout, generation, pool)
                    if trajectory is not None:
                        del active[rollout.slot]
                        self.sampler.close(rollout.slot)
                        yield trajectory
                is_idle = (
                    not self.sampler.rows
                    and not (waiting and self.sampler.free)
                    and len(waiting) + len(active) > num_stragglers
                )
                for slot, result in pool.poll(block=is_idle):
                    self._observe(active[slot], result)
        if len(waiting) + len(active) <= num_stragglers:
            not_begun = [_Rollout(job, -1, self._prompt_ids(job.question)) for job in waiting]
            for rollout in (*active.values(), *not_begun):
                yield self._trajectory(rollout, None, "straggler", "cut_off")

    def _admit(self, waiting: collections.deque[Job], active: dict[int, _Rollout]) -> None:
        while waiting and self.sampler.free:
            job = waiting.popleft()
            prompt_ids = self._prompt_ids(job.question)
            sibling = next(
                (r for r in active.values() if r.job.question.id == job.question.id), None
            )
            if sibling is not None:
                slot = self.sampler.fork(sibling.slot, len(prompt_ids) - 1)
            else:
                slot = self.sampler.open()
                self.sampler.prefill(slot, prompt_ids[:-1])
            rollout = active[slot] = _Rollout(job, slot, prompt_ids)
            self._generate(rollout, prompt_ids[-1:])
            # the first of its group: older rows are served first, so no sibling is done before
            if self.gain and job.question.id not in self.baselines:
                values = self.baselines[job.question.id] = []
                self._score(rollout, values)

    def _prompt_ids(self, question: Question) -> list[int]:
        prompt_ids = self.tokenizer.prompt_ids(self.system, question.question)
        if len(prompt_ids) + self.reserve > self.limits.max_context:
            raise ValueError(
                f"question {question.id}: a prompt of {len(prompt_ids)} tokens and "
                f"{self.reserve} for a turn, its observation and the answer "
                f"exceed the context of {self.limits.max_context}: raise --max-context or "
                "lower the token limits"
            )
        return prompt_ids

    def _answers(self, question: Question) -> list[list[int]]:
        """Ids of the ground truths to score; ValueError where one has no room in the context, of
        which a turn is always left.
        """
        if self.gain is None:
            return []
        answers = [
            self.tokenizer.ground_truth_ids(alias)
            for alias in self.gain.aliases(question.ground_truth)
        ]
        longest = len(self.tokenizer.answer_prefix_ids) + max(map(len, answers))
        if longest > self.limits.max_turn_tokens:
            raise ValueError(
                f"question {question.id}: scoring its ground truth takes {longest} tokens, "
                "and --max-turn-tokens leaves room for "
                f"{self.limits.max_turn_tokens}: raise it, or use --info-gain packed"
            )
        return answers

    def _score(self, rollout: _Rollout, values: list[float]) -> None:
        """Have the ground truths scored behind what was fed last, and `values` filled before
        the coming turn ends.
        """
        self.sampler.score(
            rollout.slot,
            self.tokenizer.answer_prefix_ids,
            self._answers(rollout.job.question),
            values.extend,
        )

    def _generate(self, rollout: _Rollout, ids: list[int]) -> None:
        rollout.since = time.monotonic()
        key = noise_key(self.seed, rollout.job.question.id, rollout.job.sample, len(rollout.turns))
        self.sampler.feed(rollout.slot, ids, budget=self.limits.max_turn_tokens, key=key)

    def _end_turn(
        self, rollout: _Rollout, generation: Generation, pool: ToolPool
    ) -> Trajectory | None:
        rollout.seconds["model"] += time.monotonic() - rollout.since
        # a remote policy that failed; left out of statistics, and made again
        # when the run is resumed
        if not generation.ids:
            return self._trajectory(rollout, None, "model_error", "tool_error")
        start = len(rollout.ids)
        rollout.ids += generation.ids
        rollout.log_probs += generation.log_probs
        text = self.tokenizer.decode(generation.ids[:-1] if generation.stopped else generation.ids)
        content = f"{protocol.THINK_OPEN}\n{text}"  # the generation prompt opened the thoughts
        action = parse_action(content)
        turn = Turn(
            start,
            len(rollout.ids),
            len(rollout.ids),
            action.kind,
            None,
            action.arguments,
            format_ok=action.format_ok,
        )
        rollout.turns.append(turn)
        if action.kind == "answer" or rollout.limit or len(rollout.turns) == self.limits.max_turns:
            return self._last_turn(rollout, generation, action, content)
        if action.kind == "malformed":
            self._observe(rollout, ToolResult(protocol.MALFORMED_MESSAGE, "ok"))
            return None
        signature = protocol.call_signature(action)
        if signature in rollout.results:  # answered from the record: the service is not asked twice
            turn.duplicate = True
            self._observe(rollout, rollout.results[signature])
            return None
        rollout.since = time.monotonic()
        tool = self.tools[action.kind]
        corpus = rollout.job.question.corpus
        deadline = self.limits.tool_seconds
        pool.submit(
            rollout.slot, lambda: tool(action.arguments, corpus=corpus, deadline=deadline), deadline
        )
        return None

    def _last_turn(
        self, rollout: _Rollout, generation: Generation, action: Action, content: str
    ) -> Trajectory:
        prediction = action.answer or protocol.extract_prediction(content)
        if rollout.limit == "time_limit":
            return self._trajectory(rollout, prediction, "time_limit", "cut_off")
        if prediction is None:
            reason = "no_answer" if generation.stopped else "token_limit"
        else:
            reason = rollout.limit or ("answered" if action.kind == "answer" else "turn_limit")
        return self._trajectory(rollout, prediction, reason, "ok")

    def _observe(self, rollout: _Rollout, result: ToolResult) -> None:
        """Append an observation to the row, decide whether the coming turn is
        the last, and start it.
        """
        turn = rollout.turns[-1]
        if turn.action != "malformed":
            turn.tool_status = result.status
            if not turn.duplicate:
                turn.seconds = round(time.monotonic() - rollout.since, 3)
                rollout.seconds["tool"] += turn.seconds
            if result.status == "ok":  # a failed call registers nothing: its retry is no duplicate
                signature = protocol.call_signature(Action(turn.action, turn.arguments))
                rollout.results[signature] = result
        last_id = rollout.ids[-1]
        closed = last_id == self.tokenizer.im_end_id
        bodies = [self._cut(result.text)]
        glue = self.tokenizer.observation_ids(bodies, closed=closed)
        rollout.limit = self._limit(rollout, len(rollout.ids) + len(glue))
        if rollout.limit:
            glue = self.tokenizer.observation_ids(
                [*bodies, protocol.LIMIT_MESSAGES[rollout.limit]], closed=closed
            )
        rollout.ids += glue
        turn.obs_end = len(rollout.ids)
        self._generate(rollout, [last_id, *glue])
        if self.gain and self.gain.scores(turn):
            self._score(rollout, rollout.values.setdefault(len(rollout.turns) - 1, []))

    def _limit(self, rollout: _Rollout, num_tokens: int) -> str | None:
        if len(rollout.turns) + 1 == self.limits.max_turns:
            return "turn_limit"
        if num_tokens + self.reserve > self.limits.max_context:
            return "context_limit"
        if self.limits.max_seconds and time.monotonic() - rollout.started > self.limits.max_seconds:
            return "time_limit"
        return None

    def _cut(self, body: str) -> str:
        """Shorten an observation to its share of tokens, saying so at its end. What counts is the
        piece between the tags, newlines included.
        """
        keep = limit = self.limits.max_observation_tokens
        body_ids = None
        while (
            length := len(self.tokenizer.encode_untrusted(protocol.observation_text(body)))
        ) > limit:
            assert keep, (
                f"max_observation_tokens {limit} cannot hold the {length} of the notice "
                f"{CUT_NOTICE!r}"
            )
            body_ids = body_ids or self.tokenizer.encode_untrusted(body)
            # text cut at a token encodes to about as many tokens again, seldom to a few more
            keep = max(keep - 8, 0)
            body = self.tokenizer.decode(body_ids[:keep]).rstrip("\ufffd") + CUT_NOTICE
        return body

    def _trajectory(
        self, rollout: _Rollout, prediction: str | None, stop_reason: str, status: str
    ) -> Trajectory:
        question = rollout.job.question
        trajectory = Trajectory(
            run=self.run_name,
            question_id=question.id,
            sample=rollout.job.sample,
            seed=self.seed,
            question=question.question,
            ground_truth=question.ground_truth,
            prompt_len=rollout.prompt_len,
            token_ids=rollout.ids,
            log_probs=rollout.log_probs,
            turns=rollout.turns,
            prediction=prediction,
            outcome=Outcome(None, status),
            stop_reason=stop_reason,
            seconds={name: round(value, 3) for name, value in rollout.seconds.items()},
            manifest=self.manifest,
        )
        if self.gain:
            self.gain.write(trajectory, self.baselines.get(question.id, []), rollout.values)
        return trajectory
