"""Evaluate an agent: trajectories -> verdicts -> success with confidence intervals, pass@k, tool
use, why the wrong ones failed.

    python eval.py --model DIR --questions questions.jsonl --samples 4 --output runs/eval
        roll out, then grade
    python eval.py --model DIR --benchmark browsecomp --data FILE --tools live \\
        --judge openai:BASE_URL:MODEL --output runs/browsecomp
    python eval.py --trajectories FILE.. --tokenizer DIR --questions questions.jsonl --output ..
        grade what is there, ours or other runners'
    python eval.py ... --baseline runs/other --report report.html
        compare, and look at it
    python eval.py ... --doctor
        try model, services and judge, and exit

The output directory holds trajectories.jsonl (when it rolled out), judge.jsonl (a model's verdicts
as they come), verdicts.jsonl, summary.json (its keys: `grading.summary`) and run.json. The same
command resumes: finished rollouts and verdicts are kept, failed ones are made again.
"""

import functools
import os
from dataclasses import dataclass, replace
from pathlib import Path

from venus.cli import option, run
from venus.curation.formats import read_rollouts
from venus.files import write_json, write_jsonl
from venus.grading.benchmarks import BENCHMARKS
from venus.grading.grade import grade_trajectories
from venus.grading.judge import RULES, open_judge, parse_judge
from venus.grading.summary import (
    check_alike,
    check_same_questions,
    difference,
    has_truth,
    questions_manifest,
    read_verdicts,
    shared_manifest,
    summarise,
)
from venus.grading.verdicts import PROMPTS
from venus.report.page import Run, read_run, write_report
from venus.rollout.agent import Agent
from venus.rollout.collect import RolloutOptions, check_corpora, collect, jobs_of
from venus.rollout.doctor import diagnose
from venus.runlog import print_plan, save_run
from venus.services.chat import ChatClient
from venus.tokenizer import ChatTokenizer
from venus.tools.options import Keys
from venus.trajectory import Question, Trajectory, read_questions

# what the plan takes for an answer, a verdict, a token
ANSWER_CHARS, VERDICT_TOKENS, CHARS_A_TOKEN = 400, 150, 4


@dataclass(frozen=True)
class EvalConfig(RolloutOptions):
    output: str = option(help="directory of all results")
    # what is asked
    questions: str | None = option(
        None, help="questions.jsonl: id, question, ground_truth, corpus, meta"
    )
    benchmark: str | None = option(
        None, help="instead: a benchmark, whose published file is --data", choices=tuple(BENCHMARKS)
    )
    data: str | None = option(None, help="file or directory of the benchmark, as it was published")
    corpus: str | None = option(
        None, help="pages that all questions of the benchmark share, for the offline tools"
    )
    canary: str | None = option(None, help="canary of a benchmark whose rows hold none")
    partial: bool = option(False, help="accept fewer questions than the benchmark has")
    num_questions: int | None = option(None, help="the first so many questions; empty is all")
    # what answers
    model: str | None = option(
        None, help="Hugging Face directory to roll out; empty: grade --trajectories"
    )
    samples: int = option(1, help="rollouts per question")
    trajectories: tuple[str, ...] = option(
        (),
        help="files, directories or glob patterns of trajectories to grade, ours, DR-Venus's or "
        "Tongyi's",
    )
    tokenizer: str | None = option(
        None, help="directory with the tokenizer.json of the --trajectories"
    )
    # what grades
    judge: str | None = option(
        None,
        help=f"{', '.join(RULES)} or openai:BASE_URL:MODEL (key: JUDGE_API_KEY or "
        "OPENAI_API_KEY); empty: the benchmark's, or em",
    )
    judge_calls: int = option(16, help="judge calls under way at once")
    baseline: str | None = option(
        None,
        help="output directory of another evaluation on the same questions: adds the paired "
        "difference",
    )
    allow_unlike: bool = option(
        False, help="put numbers together that were made under other settings"
    )
    report: str | None = option(
        None, help="HTML file to write: figures, comparison, every trajectory"
    )
    resamples: int = option(10_000, help="bootstrap resamples behind the intervals")
    seed: int = option(0, help="seed of the sampling noise and of the bootstrap")
    dry_run: bool = option(False, help="print the resolved config and the plan, and exit")
    doctor: bool = option(
        False,
        help="try everything that --model and the rest name with one cheap call each, and exit "
        "with 0 if all of it works, else 2",
    )

    def validate(self):
        super().validate()
        if (self.model is None) == (not self.trajectories):
            raise ValueError("give either --model, to roll out, or --trajectories, to grade")
        if self.questions and self.benchmark or bool(self.benchmark) != bool(self.data):
            raise ValueError("give either --questions, or --benchmark with its --data")
        if self.model and not self.questions and not self.benchmark:
            raise ValueError("give --questions or --benchmark: what shall the model be asked?")
        if (self.corpus or self.canary or self.partial) and not self.benchmark:
            raise ValueError(
                "--corpus, --canary and --partial belong to a --benchmark; questions name "
                "their corpus themselves"
            )
        if self.num_questions and not self.questions and not self.benchmark:
            raise ValueError("--num-questions needs --questions or --benchmark")
        if self.trajectories and not self.tokenizer:
            raise ValueError(
                "give --tokenizer, the directory of the model's tokenizer.json: observations "
                "are read, not only counted"
            )
        if self.doctor and not self.model:
            raise ValueError("--doctor tries what rolls out: give --model")
        if min(self.samples, self.resamples, self.judge_calls) < 1 or (
            self.num_questions is not None and self.num_questions < 1
        ):
            raise ValueError("samples, resamples, judge_calls and num_questions must be positive")
        self.grader()

    def grader(self) -> tuple[str, str, str | None]:
        """Return what grades as --judge names it, its name in records, and the prompt of a model.
        ValueError: no rule grades the benchmark.
        """
        metric = BENCHMARKS[self.benchmark].metric if self.benchmark else "em"
        if self.judge == "none" or (self.judge is None and metric not in RULES):
            raise ValueError(
                f"{self.benchmark or 'an evaluation'} needs a judge: --judge "
                f"openai:BASE_URL:MODEL, or a rule, --judge {', '.join(RULES)}"
            )
        judge = self.judge or metric
        endpoint = parse_judge(judge)
        return (
            (judge, judge, None)
            if endpoint is None
            else (
                judge,
                endpoint[1],
                BENCHMARKS[self.benchmark].prompt if self.benchmark else "browsecomp",
            )
        )


def main(cfg: EvalConfig, keys: Keys) -> int | None:
    """Roll out or read, grade, summarise, compare, print."""
    cfg.set_threads()
    if cfg.doctor:
        judge = parse_judge(cfg.grader()[0])
        return (
            0
            if diagnose(
                cfg.model,
                cfg,
                keys,
                cfg.policy_client(keys),
                judge and ChatClient(*judge, keys.judge),
            )
            else 2
        )
    if cfg.benchmark:  # copies of the benchmark are not to be found, wherever the tools look
        cfg = replace(cfg, blocked=(*cfg.blocked, *BENCHMARKS[cfg.benchmark].leaks))
    questions, output = questions_of(cfg), Path(cfg.output)
    if cfg.dry_run:
        print_plan(cfg, plan(cfg, questions))
        return None
    baseline, decoding = read_verdicts(cfg.baseline) if cfg.baseline else [], None
    if cfg.model:
        own, agent = manifest_of(cfg, questions), agent_of(cfg, keys, questions)
        tokenizer, decoding = agent.tokenizer, None if cfg.policy else agent.sampler.choices
        check_baseline(cfg, agent.manifest | own, {question.id for question in questions}, baseline)
        trajectories = collect(
            agent,
            jobs_of(questions, cfg.samples),
            output / "trajectories.jsonl",
            begin=lambda: save_run(cfg, output, decoding=decoding),
        )
    else:
        tokenizer = ChatTokenizer(cfg.tokenizer)
        trajectories = trajectories_of(cfg, tokenizer, questions)
        questions = questions or list(
            {
                t.question_id: Question(t.question_id, t.question, t.ground_truth)
                for t in trajectories
            }.values()
        )
        own = manifest_of(cfg, questions)
        check_baseline(
            cfg,
            trajectories[0].manifest | own,
            {t.question_id for t in trajectories if t.ground_truth},
            baseline,
        )
        save_run(cfg, output)
    verdicts = grade(cfg, keys, tokenizer, questions, trajectories, own)
    summary = {
        "name": cfg.benchmark or (Path(cfg.questions).stem if cfg.questions else output.name)
    }
    summary |= summarise(questions, trajectories, verdicts, seed=cfg.seed, resamples=cfg.resamples)
    if baseline:
        summary["difference"] = difference(
            verdicts, baseline, cfg.baseline, seed=cfg.seed, resamples=cfg.resamples
        )
    write_jsonl(output / "verdicts.jsonl", verdicts)
    summary["run"] = save_run(cfg, output, decoding=decoding)
    write_json(output / "summary.json", summary)
    print_summary(summary)
    if cfg.report:
        report(cfg, Run(output.name, trajectories, tokenizer, verdicts, summary))
    return None


def questions_of(cfg: EvalConfig) -> list[Question] | None:
    """The questions asked; None: those of the trajectories."""
    if cfg.benchmark:
        return BENCHMARKS[cfg.benchmark].load(
            cfg.data, corpus=cfg.corpus, canary=cfg.canary, partial=cfg.partial
        )[: cfg.num_questions]
    return read_questions(cfg.questions)[: cfg.num_questions] if cfg.questions else None


def plan(cfg: EvalConfig, questions: list[Question] | None) -> list[tuple[str, str]]:
    """What the evaluation would take: rollouts, calls and pages as in the released trajectories,
    judge calls and tokens.
    """
    if not cfg.model:
        return [
            ("trajectories", ", ".join(cfg.trajectories)),
            ("questions", f"{len(questions):,}" if questions else "those of the trajectories"),
        ]
    rollouts, (_, _, prompt) = len(questions) * cfg.samples, cfg.grader()
    rows = [("questions", f"{len(questions):,}"), *cfg.plan(cfg.model, rollouts)]
    if prompt is None:
        return rows
    chars = (
        len(PROMPTS[prompt].text)
        + ANSWER_CHARS
        + sum(len("".join([q.question, *q.ground_truth])) for q in questions) / len(questions)
    )
    tokens = int(rollouts * (chars / CHARS_A_TOKEN + VERDICT_TOKENS))
    return [
        *rows,
        ("judge calls, at most", f"{rollouts:,}"),
        ("judge tokens, about", f"{tokens:,}"),
    ]


def manifest_of(cfg: EvalConfig, questions: list[Question]) -> dict:
    """What decides the verdicts, beside what decided the trajectories."""
    _, judge, prompt = cfg.grader()
    return (
        {"benchmark": cfg.benchmark}
        | questions_manifest(questions)
        | {"judge": judge, "prompt_hash": PROMPTS[prompt].hash if prompt else None}
    )


def agent_of(cfg: EvalConfig, keys: Keys, questions: list[Question]) -> Agent:
    """The agent over the model and the tools of the run. ValueError for a corpus that
    is missing or broken.
    """
    (model, name), tokenizer = cfg.load_policy(cfg.model, keys), ChatTokenizer(cfg.model)
    corpora = check_corpora(questions) if cfg.tools == "offline" else None
    return cfg.agent(
        model,
        tokenizer,
        run=Path(cfg.output).name,
        seed=cfg.seed,
        manifest={"model": name},
        tools=cfg.make_tools(keys, corpora),
    )


def trajectories_of(
    cfg: EvalConfig, tokenizer: ChatTokenizer, questions: list[Question] | None
) -> list[Trajectory]:
    """The rows of --trajectories that answer the questions: ours by id, other runners', which have
    none, by their text. In the order of questions and samples: a file of ours holds them as they
    ended, and the shortest would be the first of `any_of_first`.

    ValueError: none does, one comes twice or answers another question under the id, or they were
    made under different settings.
    """
    by_id = {question.id: question for question in questions or ()}
    by_text = {question.question.strip(): question for question in questions or ()}
    found: dict[tuple, Trajectory] = {}
    for trajectory in read_rollouts(cfg.trajectories, tokenizer):
        theirs = "source" in trajectory.manifest
        asked = (
            by_text.get(trajectory.question.strip())
            if theirs
            else by_id.get(trajectory.question_id)
        )
        if questions and asked is None:
            continue
        if asked and trajectory.question.strip() != asked.question.strip():
            raise ValueError(
                f"{trajectory.id} of run {trajectory.run!r} answers another question than "
                f"{cfg.questions or cfg.data} asks under this id"
            )
        if asked and theirs:
            trajectory = replace(trajectory, question_id=asked.id, ground_truth=asked.ground_truth)
        if found.setdefault(trajectory.key, trajectory) is not trajectory:
            raise ValueError(
                f"{trajectory.id} of run {trajectory.run!r} occurs twice in "
                f"{' '.join(cfg.trajectories)}"
            )
    if not found:
        raise ValueError(
            f"{' '.join(cfg.trajectories)}: no trajectory of the questions in "
            f"{cfg.questions or cfg.data}"
        )
    if not cfg.allow_unlike:
        check_alike([(f"{t.id} of run {t.run!r}", t.manifest) for t in found.values()], free=())
    place = {
        name: number
        for number, name in enumerate(
            dict.fromkeys([*by_id, *(t.question_id for t in found.values())])
        )
    }
    return sorted(found.values(), key=lambda t: (place[t.question_id], t.run, t.sample))


def check_baseline(cfg: EvalConfig, manifest: dict, asked: set[str], baseline: list[dict]) -> None:
    """ValueError, before the work, for a baseline of other questions or made under
    other settings.
    """
    if baseline:
        check_same_questions(
            asked, {row["question_id"] for row in baseline if has_truth(row)}, cfg.baseline
        )
    if baseline and not cfg.allow_unlike:
        check_alike([(cfg.output, manifest), (cfg.baseline, shared_manifest(baseline))])


def grade(
    cfg: EvalConfig,
    keys: Keys,
    tokenizer: ChatTokenizer,
    questions: list[Question],
    trajectories: list[Trajectory],
    manifest: dict,
) -> list[dict]:
    """The verdict row of every trajectory, by rule or by model."""
    judge, _, prompt = cfg.grader()
    benchmark = BENCHMARKS[cfg.benchmark] if cfg.benchmark else None
    canaries = {
        question.id: question.meta["canary"] for question in questions if "canary" in question.meta
    }
    how = {
        "addresses": benchmark.leaks if benchmark else (),
        "canaries": canaries,
        "manifest": manifest,
    }
    with open_judge(
        judge, keys.judge, Path(cfg.output) / "judge.jsonl", cfg.judge_calls, prompt=prompt
    ) as asked:
        return grade_trajectories(
            trajectories, asked, tokenizer, items=prompt == "deepsearchqa", **how
        )


def report(cfg: EvalConfig, here: Run) -> None:
    """Write the report, with the baseline beside this evaluation when there is one."""
    others = [read_run(cfg.baseline, here.tokenizer, beside=here)] if cfg.baseline else []
    write_report(
        cfg.report,
        here.summary["name"],
        [here, *others],
        baseline=others[0].name if others else None,
    )


def print_summary(summary: dict) -> None:
    """The figures as a short table; what there is none of has no line."""

    def percent(interval: dict | None) -> str | None:
        return interval and (
            f"{100 * interval['mean']:5.1f} %  [{100 * interval['low']:.1f}, "
            f"{100 * interval['high']:.1f}]"
        )

    benchmark, several = BENCHMARKS.get(summary["name"]), (summary["samples"] or 0) > 1
    rows = [(f"success ({summary['judge']})", percent(summary["success"]))]
    rows += [("  of those graded", percent(summary["success_graded"]))] * bool(
        summary["judge_errors"] or summary["excluded"]
    )
    rows += [
        (name, percent(interval))
        for name, interval in (summary["scores"] or {}).items()
        if name != "em"
    ]
    rows += [
        (f"pass@{k}", percent(interval))
        for k, interval in (summary["pass_at"] or {}).items()
        if several
    ]
    rows += [
        (f"majority of {summary['samples']}", percent(summary["majority"]) if several else None)
    ]
    if "difference" in summary:
        found = summary["difference"]
        points = (
            f"{100 * found['mean']:+5.1f} points  [{100 * found['low']:+.1f}, "
            f"{100 * found['high']:+.1f}]"
        )
        rows.append(
            (
                "difference to baseline",
                f"{points}; {len(found['gained'])} questions rose, {len(found['lost'])} fell",
            )
        )
    if benchmark and benchmark.paper:
        rows.append(
            (
                "the paper's 4B, SFT / RL",
                " / ".join(f"{value:.1f}" for value in benchmark.paper)
                + f" %, of all {benchmark.count:,} questions",
            )
        )
    rows += [
        (
            "turns",
            (
                f"{summary['turns']['mean']:5.2f}    (mean over questions; "
                f"{summary['num_turns']:,} in all)"
            ),
        )
    ]
    for name, use in summary["tool_use"].items():
        ratios = (
            use["browse"] is not None
            and f"{100 * use['browse']:5.1f} %  (mean of ratios {100 * use['browse_macro']:.1f} %)"
        )
        rows.append((f"browse ratio, {name}", ratios))
    rows += [
        (name, summary[key] is not None and f"{100 * summary[key]:5.1f} %")
        for name, key in (
            ("reliable sources", "reliable_share"),
            ("format-valid turns", "format_valid_share"),
        )
    ]
    calls = {
        f"{kind} {status}": count
        for kind, statuses in summary["tool_status"].items()
        for status, count in statuses.items()
    }
    rows += [
        ("calls", counts_of(calls)),
        ("stop reasons", counts_of(summary["stop_reasons"])),
        ("why wrong", counts_of(summary["failures"])),
    ]
    missing = {
        key: summary[key] for key in ("judge_errors", "cut_off", "tool_error", "no_ground_truth")
    }
    again = "; the same command tries again" * bool(
        summary["judge_errors"] or summary["tool_error"]
    )
    rows.append(("without a verdict", any(missing.values()) and counts_of(missing) + again))
    if (summary["leaks"] or {}).get("suspected"):
        rows += [
            ("leak suspected", f"{summary['leaks']['suspected']:5d}"),
            ("success without those", percent(summary["leaks"]["success"])),
        ]
    print(
        f"{summary['name']}: {summary['questions']:,} questions, {summary['trajectories']:,} "
        "trajectories"
    )
    for name, value in rows:
        if value:
            print(f"  {name:<26} {value}")


def counts_of(counts: dict) -> str:
    """{"answered": 3, "no_answer": 0} -> "3 answered"."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


if __name__ == "__main__":
    run(
        functools.partial(main, keys=Keys.read(os.environ)),
        EvalConfig,
        "Evaluate an agent: success, pass@k, tool use, with confidence intervals.",
    )
