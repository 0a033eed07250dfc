"""Roll the agent out on questions: questions.jsonl -> trajectories.jsonl. No grading (eval.py), no training.

    python rollout.py --model DIR --questions questions.jsonl --output trajectories.jsonl --samples 4
"""

from dataclasses import dataclass
from pathlib import Path

from venus.cli import option, run
from venus.collect import RolloutOptions, check_corpora, collect, jobs_of
from venus.model import Qwen3Config
from venus.record import print_plan, save_run
from venus.tokenizer import ChatTokenizer
from venus.trajectory import read_questions
from venus.weights import fingerprint, load_for_inference


@dataclass(frozen=True)
class RolloutConfig(RolloutOptions):
    model: str = option(help="Hugging Face directory: config.json, safetensors, tokenizer.json")
    questions: str = option(help="questions.jsonl: id, question, ground_truth, corpus")
    output: str = option(help="trajectories.jsonl, appended to; finished trajectories are not made again")
    samples: int = option(1, help="rollouts per question")
    num_questions: int | None = option(None, help="the first so many questions; empty is all")
    seed: int = option(0, help="seed of the sampling noise")
    dry_run: bool = option(False, help="print the resolved config and the plan, and exit")

    def validate(self):
        super().validate()
        if self.samples < 1 or (self.num_questions is not None and self.num_questions < 1):
            raise ValueError("samples and num_questions must be positive")


def main(cfg: RolloutConfig) -> None:
    """Read the questions, make what is missing, say what there is."""
    cfg.set_threads()
    questions = read_questions(cfg.questions)[: cfg.num_questions]
    jobs = jobs_of(questions, cfg.samples)
    if cfg.dry_run:
        print_plan(cfg, [("questions", f"{len(questions):,}"), *cfg.plan(Qwen3Config.read(cfg.model), len(jobs))])
        return
    model, tokenizer = load_for_inference(cfg.model), ChatTokenizer(cfg.model)
    check_corpora(questions)
    agent = cfg.agent(model, tokenizer, run=Path(cfg.output).stem, seed=cfg.seed, manifest={"model": fingerprint(cfg.model)})
    trajectories = collect(agent, jobs, cfg.output)
    save_run(cfg, Path(cfg.output).with_suffix(".run"), device=str(model.lm_head.weight.device))
    turns = sum(len(trajectory.turns) for trajectory in trajectories)
    print(f"{cfg.output}: {len(trajectories)} trajectories, {turns} turns, {sum(t.num_sampled for t in trajectories)} sampled tokens")


if __name__ == "__main__":
    run(main, RolloutConfig, "Roll the agent out on questions.")
