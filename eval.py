"""Evaluate an agent: trajectories -> verdicts -> success with confidence intervals, pass@k, tool use.

    python eval.py --model DIR --questions questions.jsonl --samples 4 --output runs/eval      roll out, then grade
    python eval.py --trajectories trajectories.jsonl --questions questions.jsonl --output ...  grade what is there
"""

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from venus.cli import option, run
from venus.collect import RolloutOptions, collect, jobs_of
from venus.record import print_plan, save_run
from venus.rewards import exact_match, f1_score, format_valid_share
from venus.stats import mean_ci, mean_pass_at_k, paired_difference_ci, tool_use
from venus.tokenizer import ChatTokenizer
from venus.trajectory import Question, Trajectory, read_jsonl, read_questions, read_trajectories, write_jsonl
from venus.weights import fingerprint, load_model


@dataclass(frozen=True)
class EvalConfig(RolloutOptions):
    questions: str = option(help="questions.jsonl: id, question, ground_truth, corpus, meta")
    output: str = option(help="directory of trajectories.jsonl, verdicts.jsonl and summary.json")
    model: str | None = option(None, help="Hugging Face directory to roll out; empty: grade --trajectories")
    trajectories: str | None = option(None, help="trajectories.jsonl to grade; empty: roll out --model")
    samples: int = option(1, help="rollouts per question")
    num_questions: int | None = option(None, help="the first so many questions; empty is all")
    baseline: str | None = option(None, help="output directory of another evaluation on the same questions: adds the paired difference")
    resamples: int = option(10_000, help="bootstrap resamples behind the intervals")
    seed: int = option(0, help="seed of the sampling noise and of the bootstrap")
    dry_run: bool = option(False, help="print the resolved config and the plan, and exit")

    def validate(self):
        self.limits()
        if (self.model is None) == (self.trajectories is None):
            raise ValueError("give either --model, to roll out, or --trajectories, to grade")
        if min(self.samples, self.slots, self.resamples) < 1:
            raise ValueError("samples, slots and resamples must be positive")


def main(cfg: EvalConfig) -> None:
    """Roll out or read, grade, summarise, print."""
    questions, output = read_questions(cfg.questions)[: cfg.num_questions], Path(cfg.output)
    if cfg.dry_run:
        print_plan(cfg, [("questions", f"{len(questions):,}"), ("rollouts", f"{len(questions) * cfg.samples if cfg.model else 0:,}")])
        return
    if cfg.model:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model, tokenizer = load_model(cfg.model, device=device), ChatTokenizer(cfg.model)
        agent = cfg.agent(model, tokenizer, run=output.name, seed=cfg.seed, manifest={"model": fingerprint(cfg.model)})
        trajectories = collect(agent, jobs_of(questions, cfg.samples), output / "trajectories.jsonl")
    else:
        known = {question.id for question in questions}
        trajectories = [t for t in read_trajectories(cfg.trajectories) if t.question_id in known]
        if not trajectories:
            raise ValueError(f"{cfg.trajectories}: holds no trajectory of the questions in {cfg.questions}")
    verdicts = [verdict_of(trajectory) for trajectory in trajectories]
    write_jsonl(output / "verdicts.jsonl", verdicts)
    summary = summarise(cfg, questions, trajectories, verdicts)
    if cfg.baseline:
        summary["difference"] = difference(cfg, verdicts)
    summary["run"] = save_run(cfg, output)
    temporary = output / "summary.json.tmp"
    temporary.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, output / "summary.json")
    print_summary(summary)


def verdict_of(trajectory: Trajectory) -> dict:
    """Grade by normalised exact match; F1 stands beside it. A rollout without an answer, or excluded from statistics, is incorrect here."""
    scores = {"em": exact_match(trajectory.prediction, trajectory.ground_truth), "f1": f1_score(trajectory.prediction, trajectory.ground_truth)}
    if not trajectory.kept:
        scores = dict.fromkeys(scores, 0.0)
    verdict = "correct" if scores["em"] == 1 else "incorrect"
    keys = dict(zip(("run", "question_id", "sample"), trajectory.key, strict=True))
    return keys | {"verdict": verdict, "extracted": trajectory.prediction, "raw": scores, "judge": "em", "prompt_hash": None}


def summarise(cfg: EvalConfig, questions: list[Question], trajectories: list[Trajectory], verdicts: list[dict]) -> dict:
    """All figures of an evaluation; rates are fractions of 1, intervals are 95 % percentile bootstraps over questions."""
    ids = [verdict["question_id"] for verdict in verdicts]
    correct = [verdict["verdict"] == "correct" for verdict in verdicts]
    counts = Counter(ids)
    how = {"seed": cfg.seed, "resamples": cfg.resamples}
    calls = [[(turn.action, num_items(turn)) for turn in t.turns if turn.tool_status] for t in trajectories]
    return {
        "questions": len(counts), "trajectories": len(trajectories), "excluded": sum(not t.kept for t in trajectories),
        "success": asdict(mean_ci(correct, ids, **how)), "f1": asdict(mean_ci([verdict["raw"]["f1"] for verdict in verdicts], ids, **how)),
        "pass_at": {str(k): asdict(mean_pass_at_k(correct, ids, k, **how)) for k in sorted({1, min(counts.values())})},
        "turns": asdict(mean_ci([len(t.turns) for t in trajectories], ids, **how)), "format_valid_share": format_valid_share(trajectories),
        "tool_use": {name: asdict(use) for name, use in tool_use(calls, correct).items()},
        "reliable_share": reliable_share(questions, trajectories), "stop_reasons": dict(Counter(t.stop_reason for t in trajectories).most_common()),
        "seconds": {name: sum(t.seconds[name] for t in trajectories) for name in ("model", "tool")},
    }  # fmt: skip


def num_items(turn) -> int:
    """Queries or URLs of one call."""
    return len((turn.arguments or {}).get("query" if turn.action == "search" else "url", []))


def reliable_share(questions: list[Question], trajectories: list[Trajectory]) -> float | None:
    """Share of visited URLs that the question file lists as reliable (meta.reliable); None when it lists none or nothing was visited."""
    reliable = {question.id: set(question.meta["reliable"]) for question in questions if "reliable" in question.meta}
    visited = [
        url in reliable[t.question_id]
        for t in trajectories if t.question_id in reliable
        for turn in t.turns if turn.action == "visit" and turn.tool_status
        for url in turn.arguments["url"]
    ]  # fmt: skip
    return sum(visited) / len(visited) if visited else None


def difference(cfg: EvalConfig, verdicts: list[dict]) -> dict:
    """Success here minus success in --baseline, paired by question, with its interval."""
    rows = [row for _, row in read_jsonl(Path(cfg.baseline) / "verdicts.jsonl")]
    here, there = ([row["verdict"] == "correct" for row in side] for side in (verdicts, rows))
    interval = paired_difference_ci(
        here, [row["question_id"] for row in verdicts], baseline_values=there, baseline_questions=[row["question_id"] for row in rows],
        seed=cfg.seed, resamples=cfg.resamples,
    )  # fmt: skip
    return {"baseline": cfg.baseline} | asdict(interval)


def print_summary(summary: dict) -> None:
    """The figures as a short table."""

    def percent(interval: dict) -> str:
        return f"{100 * interval['mean']:5.1f} %  [{100 * interval['low']:.1f}, {100 * interval['high']:.1f}]"

    browse = {name: use["browse"] for name, use in summary["tool_use"].items()}
    rows = [("success (exact match)", percent(summary["success"])), ("F1", percent(summary["f1"]))]
    rows += [(f"pass@{k}", percent(interval)) for k, interval in summary["pass_at"].items()]
    rows += [("turns", f"{summary['turns']['mean']:5.2f}")]
    rows += [(f"browse ratio, {name}", "-" if ratio is None else f"{ratio:5.3f}") for name, ratio in browse.items()]
    rows += [(name, "-" if summary[key] is None else f"{100 * summary[key]:5.1f} %") for name, key in
             (("reliable sources", "reliable_share"), ("format-valid turns", "format_valid_share"))]  # fmt: skip
    rows += [("excluded", f"{summary['excluded']:5d} of {summary['trajectories']}"), ("stop reasons", summary["stop_reasons"])]
    if "difference" in summary:
        rows.append(("difference to baseline", percent(summary["difference"])))
    for name, value in rows:
        print(f"  {name:<26} {value}")


if __name__ == "__main__":
    run(main, EvalConfig, "Evaluate an agent: success, pass@k, tool use, with confidence intervals.")
