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
from typing import NamedTuple

from venus.cli import option, run
from venus.curation.formats import read_rollouts
from venus.files import write_json, write_jsonl
from venus.grading.benchmarks import BENCHMARKS
from venus.grading.grade import grade_trajectories
from venus.grading.judge import PROMPT, RULES, JudgeOptions, open_judge, parse_judge
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
from venus.rollout.collect import collect, jobs_of
from venus.rollout.doctor import diagnose
from venus.rollout.options import QuestionOptions
from venus.runlog import print_plan, save_run
from venus.services.chat import ChatClient
from venus.tokenizer import ChatTokenizer
from venus.tools.options import Keys
from venus.trajectory import Question, Trajectory, read_questions

# what the plan takes for an answer, a verdict, a token
ANSWER_CHARS = 400
VERDICT_TOKENS = 150
CHARS_A_TOKEN = 4
Lines = list[tuple[str, str | None]]  # label, text; None: no line


class Grader(NamedTuple):
    """What grades: as --judge names it, its name in records, and the prompt of a model (None: a
    rule).
    """

    spec: str
    name: str
    prompt: str | None


@dataclass(frozen=True)
class EvalConfig(JudgeOptions, QuestionOptions):
    output: str = option(help="directory of all results")
    questions: str | None = option(
        None,
        group="what is asked",
        help="questions.jsonl: id, question, ground_truth, corpus, meta",
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
    model: str | None = option(
        None,
        group="what answers",
        help="Hugging Face directory to roll out; empty: grade --trajectories",
    )
    trajectories: tuple[str, ...] = option(
        (),
        help="files, directories or glob patterns of trajectories to grade, ours, DR-Venus's or "
        "Tongyi's",
    )
    tokenizer: str | None = option(
        None, help="directory with the tokenizer.json of the --trajectories"
    )
    judge: str | None = option(
        None,
        group="what grades and compares",
        help=f"{', '.join(RULES)} or openai:BASE_URL:MODEL (key: JUDGE_API_KEY or "
        "OPENAI_API_KEY); empty: the benchmark's, or em",
    )
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
    resamples: int = option(10_000, help="bootstrap resamples behind the intervals", least=1)

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
        self.grader()

    def grader(self) -> Grader:
        """Return what grades. ValueError: no rule grades the benchmark."""
        benchmark = BENCHMARKS.get(self.benchmark)
        metric = benchmark.metric if benchmark else "em"
        if self.judge == "none" or (self.judge is None and metric not in RULES):
            raise ValueError(
                f"{self.benchmark or 'an evaluation'} needs a judge: --judge "
                f"openai:BASE_URL:MODEL, or a rule, --judge {', '.join(RULES)}"
            )
        spec = self.judge or metric
        endpoint = parse_judge(spec)
        if endpoint is None:
            return Grader(spec, spec, None)
        return Grader(spec, endpoint[1], benchmark.prompt if benchmark else PROMPT)


def main(cfg: EvalConfig, keys: Keys) -> int | None:
    """Roll out or read, grade, summarise, compare, print."""
    cfg.set_threads()
    if cfg.doctor:
        endpoint = parse_judge(cfg.grader().spec)
        judge = ChatClient(*endpoint, keys.judge) if endpoint else None
        return 0 if diagnose(cfg.model, cfg, keys, cfg.policy_client(keys), judge) else 1
    if cfg.benchmark:  # copies of the benchmark are not to be found, wherever the tools look
        cfg = cfg.replace(blocked=(*cfg.blocked, *BENCHMARKS[cfg.benchmark].leaks))
    questions, output = questions_of(cfg), Path(cfg.output)
    if cfg.dry_run:
        print_plan(cfg, plan(cfg, questions))
        return None
    baseline = read_verdicts(cfg.baseline) if cfg.baseline else []
    decoding = None
    if cfg.model:
        own = manifest_of(cfg, questions)
        agent = cfg.load_agent(cfg.model, keys, questions, run=output.name, seed=cfg.seed)
        tokenizer = agent.tokenizer
        decoding = None if cfg.policy else agent.sampler.choices
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
        if not questions:
            answered = {t.question_id: t for t in trajectories}.values()
            questions = [Question(t.question_id, t.question, t.ground_truth) for t in answered]
        own = manifest_of(cfg, questions)
        asked = {t.question_id for t in trajectories if t.ground_truth}
        check_baseline(cfg, trajectories[0].manifest | own, asked, baseline)
        save_run(cfg, output)
    verdicts = grade(cfg, keys, tokenizer, questions, trajectories, own)
    name = cfg.benchmark or (Path(cfg.questions).stem if cfg.questions else output.name)
    summary = {"name": name} | summarise(
        questions, trajectories, verdicts, seed=cfg.seed, resamples=cfg.resamples
    )
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
        questions = BENCHMARKS[cfg.benchmark].load(
            cfg.data, corpus=cfg.corpus, canary=cfg.canary, partial=cfg.partial
        )
    elif cfg.questions:
        questions = read_questions(cfg.questions)
    else:
        return None
    return questions[: cfg.num_questions]


def plan(cfg: EvalConfig, questions: list[Question] | None) -> list[tuple[str, str]]:
    """What the evaluation would take: rollouts, calls and pages as in the released trajectories,
    judge calls and tokens.
    """
    if not cfg.model:
        return [
            ("trajectories", ", ".join(cfg.trajectories)),
            ("questions", f"{len(questions):,}" if questions else "those of the trajectories"),
        ]
    rollouts = len(questions) * cfg.samples
    rows = [("questions", f"{len(questions):,}"), *cfg.plan(cfg.model, rollouts)]
    prompt = cfg.grader().prompt
    if prompt is None:
        return rows
    asked = sum(len("".join([q.question, *q.ground_truth])) for q in questions) / len(questions)
    chars = len(PROMPTS[prompt].text) + ANSWER_CHARS + asked
    tokens = int(rollouts * (chars / CHARS_A_TOKEN + VERDICT_TOKENS))
    return [
        *rows,
        ("judge calls, at most", f"{rollouts:,}"),
        ("judge tokens, about", f"{tokens:,}"),
    ]


def manifest_of(cfg: EvalConfig, questions: list[Question]) -> dict:
    """What decides the verdicts, beside what decided the trajectories."""
    grader = cfg.grader()
    return {
        "benchmark": cfg.benchmark,
        **questions_manifest(questions),
        "judge": grader.name,
        "prompt_hash": PROMPTS[grader.prompt].hash if grader.prompt else None,
    }


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
        if theirs:
            asked = by_text.get(trajectory.question.strip())
        else:
            asked = by_id.get(trajectory.question_id)
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
    names = dict.fromkeys([*by_id, *(t.question_id for t in found.values())])
    place = {name: number for number, name in enumerate(names)}
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
    grader = cfg.grader()
    benchmark = BENCHMARKS.get(cfg.benchmark)
    cache = Path(cfg.output) / "judge.jsonl"
    with open_judge(grader.spec, keys.judge, cache, cfg.judge_calls, prompt=grader.prompt) as judge:
        return grade_trajectories(
            trajectories,
            judge,
            tokenizer,
            items=grader.prompt == "deepsearchqa",
            addresses=benchmark.leaks if benchmark else (),
            canaries={q.id: q.meta["canary"] for q in questions if "canary" in q.meta},
            manifest=manifest,
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
    """Print the figures as a short table; what there is none of has no line."""
    counts = f"{summary['questions']:,} questions, {summary['trajectories']:,} trajectories"
    print(f"{summary['name']}: {counts}")
    for lines in (success_lines, comparison_lines, conduct_lines, trouble_lines):
        for label, text in lines(summary):
            if text:
                print(f"  {label:<26} {text}")


def success_lines(summary: dict) -> Lines:
    """Success, scores and, of several samples, pass@k and majority."""
    lines = [(f"success ({summary['judge']})", interval_text(summary["success"]))]
    if summary["judge_errors"] or summary["excluded"]:
        lines.append(("  of those graded", interval_text(summary["success_graded"])))
    scores = summary["scores"] or {}
    lines += [(name, interval_text(scores[name])) for name in scores if name != "em"]
    samples = summary["samples"] or 0
    if samples > 1:
        lines += [(f"pass@{k}", interval_text(x)) for k, x in summary["pass_at"].items()]
        lines.append((f"majority of {samples}", interval_text(summary["majority"])))
    return lines


def comparison_lines(summary: dict) -> Lines:
    """The difference to the baseline, and what the paper reports."""
    lines = []
    if found := summary.get("difference"):
        points = f"{100 * found['mean']:+5.1f} points"
        span = f"[{100 * found['low']:+.1f}, {100 * found['high']:+.1f}]"
        moved = f"{len(found['gained'])} questions rose, {len(found['lost'])} fell"
        lines.append(("difference to baseline", f"{points}  {span}; {moved}"))
    benchmark = BENCHMARKS.get(summary["name"])
    if benchmark and benchmark.paper:
        accuracy = " / ".join(f"{value:.1f}" for value in benchmark.paper)
        text = f"{accuracy} %, of all {benchmark.count:,} questions"
        lines.append(("the paper's 4B, SFT / RL", text))
    return lines


def conduct_lines(summary: dict) -> Lines:
    """Turns and tool use, and how the rollouts ended."""
    in_all = f"(mean over questions; {summary['num_turns']:,} in all)"
    lines = [("turns", f"{summary['turns']['mean']:5.2f}    {in_all}")]
    for name, use in summary["tool_use"].items():
        if use["browse"] is not None:
            ratios = f"(mean of ratios {100 * use['browse_macro']:.1f} %)"
            lines.append((f"browse ratio, {name}", f"{share_text(use['browse'])}  {ratios}"))
    calls = {
        f"{kind} {status}": count
        for kind, statuses in summary["tool_status"].items()
        for status, count in statuses.items()
    }
    return [
        *lines,
        ("reliable sources", share_text(summary["reliable_share"])),
        ("format-valid turns", share_text(summary["format_valid_share"])),
        ("calls", counts_of(calls)),
        ("stop reasons", counts_of(summary["stop_reasons"])),
        ("why wrong", counts_of(summary["failures"])),
    ]


def trouble_lines(summary: dict) -> Lines:
    """What has no verdict, and what looks leaked."""
    reasons = ("judge_errors", "cut_off", "tool_error", "no_ground_truth")
    missing = counts_of({reason: summary[reason] for reason in reasons})
    if summary["judge_errors"] or summary["tool_error"]:
        missing += "; the same command tries again"
    lines = [("without a verdict", missing)]
    leaks = summary["leaks"]
    if leaks and leaks["suspected"]:
        lines.append(("leak suspected", f"{leaks['suspected']:5d}"))
        lines.append(("success without those", interval_text(leaks["success"])))
    return lines


def share_text(share: float | None) -> str | None:
    """.625 -> " 62.5 %"."""
    return None if share is None else f"{100 * share:5.1f} %"


def interval_text(interval: dict | None) -> str | None:
    """The mean of an Interval and its bounds: " 62.5 %  [50.0, 75.0]"."""
    if interval is None:
        return None
    bounds = f"[{100 * interval['low']:.1f}, {100 * interval['high']:.1f}]"
    return f"{share_text(interval['mean'])}  {bounds}"


def counts_of(counts: dict) -> str:
    """{"answered": 3, "no_answer": 0} -> "3 answered"."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


if __name__ == "__main__":
    run(
        functools.partial(main, keys=Keys.read(os.environ)),
        EvalConfig,
        "Evaluate an agent: success, pass@k, tool use, with confidence intervals.",
    )
