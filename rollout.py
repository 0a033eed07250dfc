"""Roll the agent out on questions: questions.jsonl -> trajectories.jsonl. No grading (eval.py), no training.

    python rollout.py --model DIR --questions questions.jsonl --output trajectories.jsonl --samples 4
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from venus.cli import option, run
from venus.collect import RolloutOptions, collect, jobs_of
from venus.plan import kv_bytes, readable_bytes
from venus.record import print_plan, save_run
from venus.tokenizer import ChatTokenizer
from venus.trajectory import read_questions
from venus.weights import fingerprint, load_model


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
        self.limits()
        if self.samples < 1 or self.slots < 1:
            raise ValueError("samples and slots must be positive")


def main(cfg: RolloutConfig) -> None:
    """Read the questions, make what is missing, say what there is."""
    questions = read_questions(cfg.questions)[: cfg.num_questions]
    model, tokenizer = load_model(cfg.model), ChatTokenizer(cfg.model)
    jobs = jobs_of(questions, cfg.samples)
    if cfg.dry_run:
        config, bf16 = model.config, model.lm_head.weight.dtype != torch.float32
        row = kv_bytes(layers=config.num_hidden_layers, kv_heads=config.num_key_value_heads, head_dim=config.head_dim, tokens=1, bf16=bf16)
        print_plan(cfg, [
            ("parameters", f"{sum(p.numel() for p in model.parameters()):,}"), ("rollouts", f"{len(jobs):,} over {len(questions):,} questions"),
            ("sampled tokens, at most", f"{len(jobs) * cfg.max_turns * cfg.max_turn_tokens:,}"),
            ("KV cache, all slots full", readable_bytes(row * cfg.slots * cfg.max_context)),
        ])  # fmt: skip
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    agent = cfg.agent(model.to(device), tokenizer, run=Path(cfg.output).stem, seed=cfg.seed, manifest={"model": fingerprint(cfg.model)})
    save_run(cfg, Path(cfg.output).with_suffix(".run"), device=device)
    trajectories = collect(agent, jobs, cfg.output)
    turns = sum(len(trajectory.turns) for trajectory in trajectories)
    print(f"{cfg.output}: {len(trajectories)} trajectories, {turns} turns, {sum(t.num_sampled for t in trajectories)} sampled tokens")


if __name__ == "__main__":
    run(main, RolloutConfig, "Roll the agent out on questions.")
