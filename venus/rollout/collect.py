"""Rollouts of (question, sample) pairs into a JSONL file that an interruption leaves resumable:
finished ones are read back, never made again.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path

from tqdm import tqdm

from venus.files import append_jsonl, repair_tail, write_jsonl
from venus.rl.rewards import exact_match, format_valid_share
from venus.rollout.agent import Agent, Job
from venus.tools.offline import CorpusCache
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
    units = [jobs_of([question], num_samples) for question in questions]
    if len(questions) < num_ranks:
        units = [[job] for unit in units for job in unit]
        costs = [cost for cost in costs for _ in range(num_samples)]
    # dealt as documents are, all in one round
    (mine,) = micro_batches(costs, 2 * sum(costs), num_ranks)[rank]
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
    repair_tail(path)
    done, stale = _read_back(agent, jobs, [*others, path] if path.exists() else others)
    todo = [job for job in jobs if (job.question.id, job.sample) not in done]
    rollouts = agent.run(todo, should_stop, num_done=len(jobs) - len(todo))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path in stale:  # the rows of failed rollouts go, so that each key stands once
        kept = [row for row in read_trajectories(path) if row.stop_reason not in FAILED]
        write_jsonl(path, (row.to_json() for row in kept))
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
    keys = [(job.question.id, job.sample) for job in jobs]
    return [done[key] for key in keys if key in done]


def _read_back(
    agent: Agent, jobs: Sequence[Job], files: Iterable[Path]
) -> tuple[dict[tuple[str, int], Trajectory], set[Path]]:
    """Return the finished trajectories of the files by (question id, sample), and the files that
    hold failed ones. ValueError as `collect`.
    """
    done, stale = {}, set()
    made = (agent.run_name, agent.seed, agent.manifest)
    asked = {job.question.id: (job.question.question, job.question.ground_truth) for job in jobs}
    for file in files:
        # another process may be at its last row
        for t in read_trajectories(file, torn_tail=True):
            fault = None
            if (t.run, t.seed, t.manifest) != made:
                fault = f"of run {t.run!r} (seed {t.seed}) made under other settings"
            elif asked.get(t.question_id) not in (None, (t.question, t.ground_truth)):
                fault = "with another question or ground truth"
            if fault:
                held = f"{file}: holds {t.id} {fault}"
                raise ValueError(f"{held}; give another output, or remove the file")
            if t.stop_reason in FAILED:
                stale.add(file)
            else:
                done[t.question_id, t.sample] = t
    return done, stale


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
