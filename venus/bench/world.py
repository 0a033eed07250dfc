"""`python -m venus.bench world`: seconds of the offline world's rollouts, of this tree and, in turn
with it, of another one (an older commit).

Every run is a process of its own that plays this file with the tree's code, and sees of it
only what both have.
"""

import hashlib
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

import torch

from venus.cli import option
from venus.model.qwen3 import Qwen3Config
from venus.model.weights import load_for_inference
from venus.rollout.collect import jobs_of
from venus.rollout.options import RolloutOptions
from venus.tokenizer import ChatTokenizer
from venus.trajectory import read_questions

PLAY = (
    "import json, runpy, sys; config = json.loads(sys.argv[1]); "
    "print(json.dumps(runpy.run_path(config.pop('file'))['play'](**config)))"
)


@dataclass(frozen=True)
class WorldConfig:
    """Which rollouts are timed."""

    model: str = option(help="Hugging Face directory, such as runs/demo/seed_0/sft/model")
    questions: str = option(
        help="questions with a corpus, such as runs/demo/seed_0/world/questions/test.jsonl"
    )
    before: str | None = option(
        None, help="root of another tree to compare with, such as a git worktree"
    )
    num_questions: int = option(48, help="questions, the first ones", unit="questions")
    samples: int = option(8, help="rollouts of each question")
    slots: int = option(
        64,
        help="rollouts decoded at once, and open at once where concurrent does not say or is not "
        "known",
        unit="rows",
    )
    concurrent: int | None = option(
        None, help="rollouts open at once, in a tree that has this flag", unit="rows"
    )
    latency: float = option(
        0.05, help="what every tool call takes more than it does", unit="seconds"
    )
    threads: int = option(1, help="CPU threads")
    repeats: int = option(5, help="runs of every tree")

    def validate(self) -> None:
        """ValueError for a count out of range, and for a tree, a model or questions
        that are none.
        """
        if (
            min(self.num_questions, self.samples, self.slots, self.threads, self.repeats) < 1
            or self.latency < 0
        ):
            raise ValueError(
                "num-questions, samples, slots, threads and repeats must be at least 1, "
                "latency at least 0"
            )
        if self.before and not (Path(self.before) / "venus" / "collect.py").is_file():
            raise ValueError(
                f"before {self.before}: no venus/collect.py there; give the root of a checkout"
            )
        if self.concurrent is not None and self.concurrent < self.slots:
            raise ValueError(
                f"concurrent {self.concurrent}: fewer than the {self.slots} slots that decode"
            )
        Qwen3Config.read(self.model), read_questions(self.questions)


def world(cfg: WorldConfig) -> None:
    """Time every tree in turn; print seconds, tokens and ratios; exit 1 when the
    trees sample other ids.
    """
    config = asdict(cfg) | {
        "file": __file__,
        "model": str(Path(cfg.model).resolve()),
        "questions": str(Path(cfg.questions).resolve()),
    }
    repeats, before = config.pop("repeats"), config.pop("before")
    trees = {"this tree": Path(__file__).resolve().parents[2]} | (
        {"before": before} if before else {}
    )
    runs = {name: [] for name in trees}
    for _ in range(repeats):
        for name, tree in trees.items():
            done = subprocess.run(
                [sys.executable, "-c", PLAY, json.dumps(config)],
                cwd=tree,
                stdout=subprocess.PIPE,
                text=True,
            )
            if done.returncode:
                sys.exit(
                    f"error: the rollouts of {tree} ended with exit code {done.returncode}; "
                    "what they said stands above"
                )
            runs[name].append(json.loads(done.stdout))
            print(
                (
                    "{name:<10}{rollouts:5} rollouts {tokens:7,} sampled tokens {seconds:7.2f} s"
                ).format(name=name, **runs[name][-1]),
                flush=True,
            )
    if before:
        ratios = [
            theirs["seconds"] / ours["seconds"]
            for ours, theirs in zip(runs["this tree"], runs["before"], strict=True)
        ]
        fastest = min(run["seconds"] for run in runs["before"]) / min(
            run["seconds"] for run in runs["this tree"]
        )
        goal = f"goal 1.5x: {'met' if median(ratios) >= 1.5 else 'missed'}"
        print(
            f"this tree over before: {median(ratios):.2f}x ({goal}), {min(ratios):.2f} to "
            f"{max(ratios):.2f}; of the fastest runs {fastest:.2f}x"
        )
        if len({run["ids"] for of_tree in runs.values() for run in of_tree}) > 1:
            sys.exit("error: the trees sampled other ids")
        print("the ids are equal")


def play(
    model: str,
    questions: str,
    num_questions: int,
    samples: int,
    slots: int,
    concurrent: int | None,
    latency: float,
    threads: int,
) -> dict:
    """Make the rollouts, as the demo does, and return seconds, counts and a digest of all ids."""
    torch.set_num_threads(threads)
    limits = {
        "max_turns": 8,
        "max_turn_tokens": 48,
        "max_observation_tokens": 160,
        "max_context": 1024,
        "slots": slots,
    }
    if "concurrent" in {field.name for field in fields(RolloutOptions)}:
        limits["concurrent"] = concurrent
    options = RolloutOptions(system_prompt="short", **limits)
    agent = options.agent(
        load_for_inference(model), ChatTokenizer(model), run="bench", seed=0, manifest={}
    )

    def slow(tool):
        return lambda *args, **kwargs: (time.sleep(latency), tool(*args, **kwargs))[1]

    agent.tools = {name: slow(tool) for name, tool in agent.tools.items()}
    start = time.perf_counter()
    made = list(agent.run(jobs_of(read_questions(questions)[:num_questions], samples)))
    seconds = time.perf_counter() - start
    ids = json.dumps(sorted([t.question_id, t.sample, t.token_ids] for t in made)).encode()
    return {
        "seconds": seconds,
        "rollouts": len(made),
        "tokens": sum(t.num_sampled for t in made),
        "ids": hashlib.sha256(ids).hexdigest(),
    }
