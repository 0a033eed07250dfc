"""Roll the agent out on questions: questions.jsonl -> trajectories.jsonl. No grading
(eval.py), no training.

    python rollout.py --model DIR --questions questions.jsonl --output trajectories.jsonl
    python rollout.py --model DIR --doctor [--tools live ..]
        try the model, the kernels and each service, and exit
"""

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from venus.cli import option, run
from venus.rollout.collect import collect, jobs_of
from venus.rollout.doctor import diagnose
from venus.rollout.options import QuestionOptions
from venus.runlog import print_plan, save_run
from venus.tools.options import Keys
from venus.trajectory import read_questions


@dataclass(frozen=True)
class RolloutConfig(QuestionOptions):
    model: str = option(help="Hugging Face directory: config.json, safetensors, tokenizer.json")
    questions: str | None = option(
        None, help="questions.jsonl: id, question, ground_truth, corpus", unless="doctor"
    )
    output: str | None = option(
        None,
        help="trajectories.jsonl, appended to; finished trajectories are not made again",
        unless="doctor",
    )


def main(cfg: RolloutConfig, keys: Keys) -> int | None:
    """Read the questions, make what is missing, say what there is."""
    cfg.set_threads()
    if cfg.doctor:
        return 0 if diagnose(cfg.model, cfg, keys, cfg.policy_client(keys)) else 1
    questions = read_questions(cfg.questions)[: cfg.num_questions]
    jobs = jobs_of(questions, cfg.samples)
    if cfg.dry_run:
        print_plan(cfg, [("questions", f"{len(questions):,}"), *cfg.plan(cfg.model, len(jobs))])
        return None
    output = Path(cfg.output)
    agent = cfg.load_agent(cfg.model, keys, questions, run=output.stem, seed=cfg.seed)
    device = cfg.policy or str(agent.sampler.device)
    decoding = None if cfg.policy else agent.sampler.choices
    trajectories = collect(
        agent,
        jobs,
        output,
        begin=lambda: save_run(cfg, output.with_suffix(".run"), device=device, decoding=decoding),
    )
    turns = sum(len(trajectory.turns) for trajectory in trajectories)
    print(
        f"{cfg.output}: {len(trajectories)} trajectories, {turns} turns, "
        f"{sum(t.num_sampled for t in trajectories)} sampled tokens"
    )
    return None


if __name__ == "__main__":
    run(
        functools.partial(main, keys=Keys.read(os.environ)),
        RolloutConfig,
        "Roll the agent out on questions.",
    )
