"""Evaluate an agent: trajectories -> verdicts -> success with confidence intervals, pass@k, tool use.

    python eval.py --model DIR --questions questions.jsonl --samples 4 --output runs/eval      roll out, then grade
    python eval.py --trajectories trajectories.jsonl --questions questions.jsonl --output ...  grade what is there
"""

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from venus.cli import option, run
from venus.collect import RolloutOptions, check_corpora, collect, jobs_of
from venus.jsonl import read_jsonl, write_jsonl
from venus.model import Qwen3Config
from venus.record import print_plan, save_run
from venus.rewards import exact_match, f1_score, format_valid_share
from venus.stats import mean_ci, mean_pass_at_k, paired_difference_ci, tool_use
from venus.tokenizer import ChatTokenizer
from venus.trajectory import Question, Trajectory, read_questions, read_trajectories
from venus.weights import fingerprint, load_for_inference


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
        super().validate()
        if (self.model is None) == (self.trajectories is None):
            raise ValueError("give either --model, to roll out, or --trajectories, to grade")
        if min(self.samples, self.resamples) < 1 or (self.num_questions is not None and self.num_questions < 1):
            raise ValueError("samples, resamples and num_questions must be positive")


def main(cfg: EvalConfig) -> None:
    """Roll out or read, grade, summarise, print."""
    cfg.set_threads()
    questions, output = read_questions(cfg.questions)[: cfg.num_questions], Path(cfg.output)
    if cfg.dry_run:
        rollouts = cfg.plan(Qwen3Config.read(cfg.model), len(questions) * cfg.samples) if cfg.model else []
        print_plan(cfg, [("questions", f"{len(questions):,}"), *rollouts])
        return
    baseline = read_verdicts(cfg.baseline) if cfg.baseline else None
    if cfg.model:
        model, tokenizer = load_for_inference(cfg.model), ChatTokenizer(cfg.model)
        check_corpora(questions)
        agent = cfg.agent(model, tokenizer, run=output.name, seed=cfg.seed, manifest={"model": fingerprint(cfg.model)})
        trajectories = collect(agent, jobs_of(questions, cfg.samples), output / "trajectories.jsonl")
    else:
        trajectories = trajectories_of(cfg, questions)
    verdicts = [verdict_of(trajectory) for trajectory in trajectories]
    summary = summarise(cfg, questions, trajectories, verdicts)
    if baseline:
        summary["difference"] = difference(cfg, verdicts, baseline)
    output.mkdir(parents=True, exist_ok=True)
    write_jsonl(output / "verdicts.jsonl", verdicts)
    summary["run"] = save_run(cfg, output)
    temporary = output / "summary.json.tmp"
    temporary.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, output / "summary.json")
    print_summary(summary)


def trajectories_of(cfg: EvalConfig, questions: list[Question]) -> list[Trajectory]:
    """The rows of --trajectories that answer the questions. ValueError: none does, one comes twice, or answers another question under the id."""
    asked, found = {question.id: question.question for question in questions}, {}
    for trajectory in read_trajectories(cfg.trajectories):
        if trajectory.question_id not in asked:
            continue
        if trajectory.question != asked[trajectory.question_id]:
            raise ValueError(f"{cfg.trajectories}: {trajectory.id} answers another question than {cfg.questions} asks under this id")
        if found.setdefault(trajectory.key, trajectory) is not trajectory:
            raise ValueError(f"{cfg.trajectories}: {trajectory.id} of run {trajectory.run!r} occurs twice")
    if not found:
        raise ValueError(f"{cfg.trajectories}: holds no trajectory of the questions in {cfg.questions}")
    return list(found.values())


def verdict_of(trajectory: Trajectory) -> dict:
    """Grade by normalised exact match; F1 stands beside it. No answer is incorrect; a rollout excluded from statistics gets no verdict: error."""
    scores = {"em": exact_match(trajectory.prediction, trajectory.ground_truth), "f1": f1_score(trajectory.prediction, trajectory.ground_truth)}
    verdict = ("correct" if scores["em"] == 1 else "incorrect") if trajectory.kept else "error"
    keys = dict(zip(("run", "question_id", "sample"), trajectory.key, strict=True))
    return keys | {"verdict": verdict, "extracted": trajectory.prediction, "raw": scores, "judge": "em", "prompt_hash": None}


def summarise(cfg: EvalConfig, questions: list[Question], trajectories: list[Trajectory], verdicts: list[dict]) -> dict:
    """All figures of an evaluation; rates are fractions of 1, intervals are 95 % percentile bootstraps over questions.

    Excluded rollouts enter `trajectories`, `excluded`, `stop_reasons` and `seconds` only. ValueError when no other is left.
    """
    reasons, seconds = Counter(t.stop_reason for t in trajectories), {name: sum(t.seconds[name] for t in trajectories) for name in ("model", "tool")}
    total, trajectories = len(trajectories), [t for t in trajectories if t.kept]
    verdicts = [verdict for verdict in verdicts if verdict["verdict"] != "error"]
    if not verdicts:
        raise ValueError(f"all {total} rollouts are excluded from statistics ({dict(reasons)}): nothing to evaluate")
    ids = [verdict["question_id"] for verdict in verdicts]
    correct = [verdict["verdict"] == "correct" for verdict in verdicts]
    counts = Counter(ids)
    how = {"seed": cfg.seed, "resamples": cfg.resamples}
    calls = [[(turn.action, num_items(turn)) for turn in t.turns if turn.tool_status] for t in trajectories]
    return {
        "questions": len(counts), "trajectories": total, "excluded": total - len(trajectories),
        "success": asdict(mean_ci(correct, ids, **how)), "f1": asdict(mean_ci([verdict["raw"]["f1"] for verdict in verdicts], ids, **how)),
        "pass_at": {str(k): asdict(mean_pass_at_k(correct, ids, k, **how)) for k in sorted({1, min(counts.values())})},
        "turns": asdict(mean_ci([len(t.turns) for t in trajectories], ids, **how)), "format_valid_share": format_valid_share(trajectories),
        "tool_use": {name: asdict(use) for name, use in tool_use(calls, correct).items()},
        "reliable_share": reliable_share(questions, trajectories), "stop_reasons": dict(reasons.most_common()), "seconds": seconds,
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


def read_verdicts(directory: str) -> list[dict]:
    """The verdicts of an evaluation; ValueError for a file that is missing, empty or something else."""
    path = Path(directory) / "verdicts.jsonl"
    rows = dict(read_jsonl(path))
    for where, row in rows.items():
        if not {"question_id", "verdict"} <= set(row):
            raise ValueError(f"{where}: not a verdict, question_id or verdict is missing")
    if not rows:
        raise ValueError(f"{path}: no verdicts in the file")
    return list(rows.values())


def difference(cfg: EvalConfig, verdicts: list[dict], rows: list[dict]) -> dict:
    """Success here minus success in --baseline, whose verdicts are `rows`, paired by question, with its interval.

    A question without a verdict on either side is left out. ValueError when the sides asked different questions.
    """
    asked, rows_asked = ({row["question_id"] for row in side} for side in (verdicts, rows))
    if asked != rows_asked:
        raise ValueError(f"{cfg.baseline}: evaluated other questions, {min(asked ^ rows_asked)!r} is on one side only; a paired difference needs the same")
    here, there = ([row for row in side if row["verdict"] != "error"] for side in (verdicts, rows))
    common = {row["question_id"] for row in here} & {row["question_id"] for row in there}
    here, there = ([row for row in side if row["question_id"] in common] for side in (here, there))
    interval = paired_difference_ci(
        [row["verdict"] == "correct" for row in here], [row["question_id"] for row in here],
        baseline_values=[row["verdict"] == "correct" for row in there], baseline_questions=[row["question_id"] for row in there],
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
