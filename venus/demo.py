"""The whole recipe on a laptop: world -> clean -> SFT -> eval -> IGPO -> eval, each stage a command
that is printed before it runs.

    python -m venus.demo [--seed S]     about ten minutes on two cores
    python -m venus.demo --smoke        the same path with tiny budgets

Everything lies under runs/demo/seed_S (runs/smoke/smoke_seed_S). A finished stage is kept, an
interrupted one goes on where it stopped; remove the directory to start anew.
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from venus.cli import STOPPED, option, run
from venus.curation.formats import to_messages
from venus.files import read_jsonl, write_json
from venus.model.qwen3 import Qwen3, Qwen3Config
from venus.model.weights import copy_tokenizer_files, save_model
from venus.report.page import Run, read_run, write_report
from venus.report.plot_svg import write_svg_curve
from venus.runlog import save_run
from venus.tokenizer import ChatTokenizer
from venus.trajectory import read_trajectories

ROOT = Path(__file__).resolve().parents[1]
AGENT = (
    *(
        "--system-prompt",
        "short",
        "--max-turns",
        "8",
        "--max-turn-tokens",
        "48",
        "--max-observation-tokens",
        "160",
    ),
    *("--max-context", "1024", "--slots", "48", "--threads", "1"),
)
RESULTS = ("summary.json", "reward_curve.svg", "report.html")
SAMPLES = 4  # of a test question at temperature 1
STEPS_FLAGS = ("--weight-decay", "0", "--max-tokens-per-gpu", "16384", "--recompute", "off")


@dataclass(frozen=True)
class DemoConfig:
    output: str | None = option(
        None, help="directory of all results; empty is runs/demo, with --smoke runs/smoke"
    )
    seed: int = option(
        0, help="seed of the world, the weights, the order of the data and the sampling noise"
    )
    smoke: bool = option(
        False, help="tiny budgets: shows that every stage runs, not that it learns"
    )


@dataclass(frozen=True)
class Budget:
    """What the two sizes of the demo differ in."""

    world: tuple[str, ...]
    sft_epochs: float
    igpo_steps: int
    questions: int
    random_questions: int


FULL = Budget(world=(), sft_epochs=2.0, igpo_steps=15, questions=200, random_questions=100)
SMOKE = Budget(
    world=(
        "--train-webs",
        "8",
        "--dev-webs",
        "2",
        "--test-webs",
        "2",
        "--long-webs",
        "2",
        "--sft-rows",
        "400",
    ),
    sft_epochs=1.0,
    igpo_steps=2,
    questions=8,
    random_questions=4,
)


def main(cfg: DemoConfig) -> None:
    """Run the stages, then write and print what they show."""
    budget, size = (SMOKE, "smoke") if cfg.smoke else (FULL, "demo")
    # a directory for each size and seed: finished stages are kept, and those of a smoke run must
    # not pass for the demo's
    out = Path(cfg.output or f"runs/{size}").resolve() / (
        f"smoke_seed_{cfg.seed}" if cfg.smoke else f"seed_{cfg.seed}"
    )
    world, seed = out / "world", ("--seed", str(cfg.seed))
    stage(
        out,
        "world",
        ["-m", "venus.world", "build", "--out", str(world), *seed, *budget.world],
        done=world / "manifest.json",
    )
    start = random_model(world / "model", out / "random", cfg.seed)
    rows = clean(out, "train", seed)
    # its experts take 20 to 120 turns, so that resampling has something to do;
    # nothing is trained on it
    clean(out, "long", seed)
    stage(
        out,
        "sft",
        [
            "train_sft.py",
            "--model",
            str(world / "model"),
            "--init",
            "random",
            "--data",
            str(rows),
            "--output",
            str(out / "sft"),
            "--epochs",
            str(budget.sft_epochs),
            "--batch-size",
            "8",
            "--lr",
            "2e-3",
            "--beta2",
            "0.98",
            "--warmup-ratio",
            "0.03",
            "--min-lr-ratio",
            "0.05",
            "--save-every",
            "200",
            "--log-every",
            "50",
            "--threads",
            "1",
            *STEPS_FLAGS,
            *seed,
        ],
    )
    stage(
        out,
        "igpo",
        [
            "train_igpo.py",
            "--model",
            str(out / "sft" / "model"),
            "--questions",
            str(world / "questions" / "train.jsonl"),
            "--output",
            str(out / "igpo"),
            "--questions-per-step",
            "8",
            "--group-size",
            "6",
            "--steps",
            str(budget.igpo_steps),
            "--updates",
            "2",
            "--lr",
            "4e-4",
            "--beta2",
            "0.95",
            "--warmup-steps",
            "3",
            *STEPS_FLAGS,
            *AGENT,
            *seed,
        ],
    )
    rows = {
        "random": evaluate(out, "random", start, budget.random_questions, seed),
        "sft": evaluate(out, "sft", out / "sft" / "model", budget.questions, seed),
        "igpo": evaluate(
            out, "igpo", out / "igpo" / "model", budget.questions, seed, baseline="sft"
        ),
    }
    summary = {
        name: {key: row[key] for key in ("success", "success_ci", "greedy", "pass_at_4")}
        for name, row in rows.items()
    }
    gain = rows["igpo"]["difference"]
    seconds = json.loads((out / "seconds.json").read_text(encoding="utf-8"))
    summary |= {
        "paired_gain": gain["mean"],
        "paired_gain_ci": [gain["low"], gain["high"]],
        "questions": gain["questions"],
    }
    summary |= {
        "seconds": sum(seconds.values()),
        "seconds_by_stage": seconds,
        "seed": cfg.seed,
        "smoke": cfg.smoke,
        "run": save_run(cfg, out),
    }
    write_json(out.parent / "summary.json", summary)
    curve = [row for _, row in read_jsonl(out / "igpo" / "metrics.jsonl")]
    write_svg_curve(
        out.parent / "reward_curve.svg",
        [row["step"] for row in curve],
        [row["success"] for row in curve],
        title="IGPO on the offline world: success of the rollouts of each step",
        x_label="step",
        y_label="success (exact match)",
    )
    tokenizer = ChatTokenizer(start)
    # in the report, for its information gains and advantages
    last_step = max((out / "igpo" / "rollouts").glob("step_?????.jsonl"))
    runs = [
        *(read_run(str(out / name), tokenizer) for name in ("eval_igpo", "eval_sft")),
        Run("training", read_trajectories(last_step), tokenizer),
    ]
    write_report(
        out.parent / "report.html",
        "Venus on the offline world: IGPO against SFT",
        runs,
        baseline="eval_sft",
    )
    print_example(out, tokenizer)
    print_table(rows, seconds)
    print(
        f"\nIGPO over SFT, paired by question: {100 * gain['mean']:+.1f} points "
        f"[{100 * gain['low']:+.1f}, {100 * gain['high']:+.1f}]"
    )
    print(
        f"{sum(seconds.values()):.0f} s in all. Written: "
        f"{', '.join(str(out.parent / name) for name in RESULTS)}, and every stage under "
        f"{out}"
    )


def stage(out: Path, name: str, command: list[str], done: Path | None = None) -> None:
    """Run one command of the repository unless `done` is there, and add its seconds to
    out/seconds.json. A failure ends the demo with its code.
    """
    if done is not None and done.exists():
        return
    print(f"\n== {name}: python {' '.join(command)}", flush=True)
    started = time.monotonic()
    code = subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
    if code in (STOPPED, 130):
        raise KeyboardInterrupt
    if code:
        sys.exit(code)
    path = out / "seconds.json"
    seconds = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_json(path, seconds | {name: seconds.get(name, 0.0) + time.monotonic() - started})


def clean(out: Path, name: str, seed: tuple[str, str]) -> Path:
    """Clean the experts' raw trajectories of one kind; return the SFT rows."""
    world, rows = out / "world", out / f"clean_{name}"
    stage(
        out,
        f"clean {name}",
        [
            "-m",
            "venus.clean",
            "--input",
            str(world / "raw" / f"{name}.jsonl"),
            "--output",
            str(rows),
            "--system-prompt",
            "short",
            "--tokenizer",
            str(world / "model"),
            "--max-length",
            "8192",
            "--validation",
            "0",
            *seed,
        ],
        done=rows / "stats.json",
    )
    return rows / "train.jsonl"


def random_model(source: Path, directory: Path, seed: int) -> Path:
    """The untrained model, with the weights that SFT starts from."""
    model = Qwen3(Qwen3Config.read(source))
    model.init_weights(seed)
    save_model(model, directory)
    copy_tokenizer_files(source, directory)
    return directory


def evaluate(
    out: Path,
    name: str,
    model: Path,
    questions: int,
    seed: tuple[str, str],
    baseline: str | None = None,
) -> dict:
    """Test questions at temperature 1 with several samples, and greedily once; the
    figures of the table.
    """
    shared = [
        "eval.py",
        "--model",
        str(model),
        "--questions",
        str(out / "world" / "questions" / "test.jsonl"),
        "--num-questions",
        str(questions),
        *AGENT,
        *seed,
    ]
    sampled, greedy = (out / f"eval_{name}{suffix}" for suffix in ("", "_greedy"))
    against = [] if baseline is None else ["--baseline", str(out / f"eval_{baseline}")]
    stage(
        out,
        f"eval {name}",
        [*shared, "--output", str(sampled), "--samples", str(SAMPLES), *against],
    )
    stage(out, f"eval {name}, greedy", [*shared, "--output", str(greedy), "--temperature", "0"])
    at_one, at_zero = (
        json.loads((path / "summary.json").read_text(encoding="utf-8"))
        for path in (sampled, greedy)
    )
    return at_one | {
        "success": at_one["success"]["mean"],
        "success_ci": [at_one["success"]["low"], at_one["success"]["high"]],
        "greedy": at_zero["success"]["mean"],
        "greedy_ci": [at_zero["success"]["low"], at_zero["success"]["high"]],
        "pass_at_4": at_one["pass_at"][str(SAMPLES)]["mean"],
    }


def print_table(rows: dict[str, dict], seconds: dict[str, float]) -> None:
    """A line per model."""
    print(
        f"\n{'':8}{'success T=1':>20}{'greedy':>20}{'pass@4':>8}{'turns':>7}{'browse':>8}"
        f"{'reliable':>10}{'format':>8}{'seconds':>9}"
    )
    for name, row in rows.items():
        success, greedy = (
            (
                f"{100 * row[key]:.1f} [{100 * row[f'{key}_ci'][0]:.1f}, "
                f"{100 * row[f'{key}_ci'][1]:.1f}]"
            )
            for key in ("success", "greedy")
        )
        browse = row["tool_use"]["overall"]["browse"]
        reliable = row["reliable_share"]
        valid = row["format_valid_share"]
        cells = [
            "-" if value is None else f"{100 * value:.0f} %" for value in (browse, reliable, valid)
        ]
        print(
            f"{name:8}{success:>20}{greedy:>20}{100 * row['pass_at_4']:>8.1f}"
            f"{row['turns']['mean']:>7.2f}{cells[0]:>8}{cells[1]:>10}{cells[2]:>8}"
            f"{seconds.get(name, 0):>9.0f}"
        )
    print(
        "success, greedy and pass@4 in % of the test questions, with 95 % intervals; seconds "
        "of training, evaluations apart"
    )


def print_example(out: Path, tokenizer: ChatTokenizer) -> None:
    """One test question before and after IGPO: where SFT failed and IGPO did not,
    if there is one.
    """
    before, after = (
        {(t.question_id, t.sample): t for t in read_trajectories(out / name / "trajectories.jsonl")}
        for name in ("eval_sft", "eval_igpo")
    )
    chosen = next(
        (
            key
            for key in before
            if before[key].prediction != before[key].ground_truth[0] == after[key].prediction
        ),
        next(iter(before)),
    )
    print(f"\n{before[chosen].question}  (ground truth: {before[chosen].ground_truth[0]})")
    for name, trajectory in (("after SFT", before[chosen]), ("after IGPO", after[chosen])):
        print(f"-- {name}")
        # thoughts, actions and observations, a line each
        for message in to_messages(trajectory, tokenizer)["messages"][2:]:
            who = "agent" if message["role"] == "assistant" else "tool"
            print(f"   {who:6}{' '.join(message['content'].split())}")
        print(f"   ({trajectory.stop_reason}; prediction: {trajectory.prediction})")


if __name__ == "__main__":
    run(main, DemoConfig, "The whole recipe on a laptop: world, SFT, evaluation, IGPO, evaluation.")
