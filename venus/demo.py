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

from venus.cli import STOPPED, Options, option, run
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
RESULTS = ("summary.json", "reward_curve.svg", "report.html")
SAMPLES = 4  # of a test question at temperature 1


# a file of OUT with which a stage is complete; the other stages know themselves where they stand
DONE = {
    "world": "world/manifest.json",
    "clean train": "clean_train/stats.json",
    "clean long": "clean_long/stats.json",
}
AGENT = (
    "--system-prompt short --max-turns 8 --max-turn-tokens 48 --max-observation-tokens 160 "
    "--max-context 1024 --slots 48 --threads 1"
)
STEPS = "--weight-decay 0 --max-tokens-per-gpu 16384 --recompute off"


@dataclass(frozen=True)
class DemoConfig(Options):
    """Where the results go, and how large and with which seed the demo is."""

    output: str | None = option(
        None,
        group="demo",
        help="directory of all results; empty is runs/demo, with --smoke runs/smoke",
    )
    seed: int = option(
        0, help="seed of the world, the weights, the order of the data and the noise", least=0
    )
    smoke: bool = option(
        False, help="tiny budgets: shows that every stage runs, not that it learns"
    )


@dataclass(frozen=True)
class Budget:
    """What the two sizes of the demo differ in."""

    world: str
    sft_epochs: float
    igpo_steps: int
    questions: int
    random_questions: int


FULL = Budget(world="", sft_epochs=2.0, igpo_steps=15, questions=200, random_questions=100)
SMOKE = Budget(
    world="--train-webs 8 --dev-webs 2 --test-webs 2 --long-webs 2 --sft-rows 400",
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
    for name, command in stages(cfg.seed, budget).items():
        run_stage(out, name, command)
        if name == "world":
            random_model(out / "world" / "model", out / "random", cfg.seed)
    rows = {name: read_figures(out, name) for name in ("random", "sft", "igpo")}
    gain = rows["igpo"][0]["difference"]
    seconds = json.loads((out / "seconds.json").read_bytes())
    write_results(out, cfg, rows, seconds)
    print_example(out, ChatTokenizer(out / "random"))
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


def stages(seed: int, budget: Budget) -> dict[str, str]:
    """Return {name: command} of the stages, in order. OUT stands for the directory of the results.

    The experts of the long webs take 20 to 120 turns, so that resampling has something to do;
    nothing is trained on them.
    """
    commands = {"world": f"-m venus.world build --out OUT/world --seed {seed} {budget.world}"}
    for kind in ("train", "long"):
        commands[f"clean {kind}"] = (
            f"-m venus.clean --input OUT/world/raw/{kind}.jsonl --output OUT/clean_{kind} "
            "--system-prompt short --tokenizer OUT/world/model --max-length 8192 --validation 0 "
            f"--seed {seed}"
        )
    commands["sft"] = (
        "train_sft.py --model OUT/world/model --init random --data OUT/clean_train/train.jsonl "
        f"--output OUT/sft --epochs {budget.sft_epochs} --batch-size 8 --lr 2e-3 --beta2 0.98 "
        "--warmup-ratio 0.03 --min-lr-ratio 0.05 --save-every 200 --log-every 50 --threads 1 "
        f"{STEPS} --seed {seed}"
    )
    commands["igpo"] = (
        "train_igpo.py --model OUT/sft/model --questions OUT/world/questions/train.jsonl "
        f"--output OUT/igpo --questions-per-step 8 --group-size 6 --steps {budget.igpo_steps} "
        f"--updates 2 --lr 4e-4 --beta2 0.95 --warmup-steps 3 {STEPS} {AGENT} --seed {seed}"
    )
    for name, model, num_questions in (
        ("random", "random", budget.random_questions),
        ("sft", "sft/model", budget.questions),
        ("igpo", "igpo/model", budget.questions),
    ):
        test = (
            f"eval.py --model OUT/{model} --questions OUT/world/questions/test.jsonl "
            f"--num-questions {num_questions} {AGENT} --seed {seed} --output OUT/eval_{name}"
        )
        baseline = " --baseline OUT/eval_sft" if name == "igpo" else ""
        commands[f"eval {name}"] = f"{test} --samples {SAMPLES}{baseline}"
        commands[f"eval {name}, greedy"] = f"{test}_greedy --temperature 0"
    return commands


def run_stage(out: Path, name: str, command: str) -> None:
    """Run one command of the repository unless it is DONE, and add its seconds to
    out/seconds.json. A failure ends the demo with its code.
    """
    if name in DONE and (out / DONE[name]).exists():
        return
    # word by word: the directory may have a space in its name
    words = [word.replace("OUT", str(out)) for word in command.split()]
    print(f"\n== {name}: python {' '.join(words)}", flush=True)
    started = time.monotonic()
    code = subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode
    if code in (STOPPED, 130):
        raise KeyboardInterrupt
    if code:
        sys.exit(code)
    path = out / "seconds.json"
    seconds = json.loads(path.read_bytes()) if path.exists() else {}
    write_json(path, seconds | {name: seconds.get(name, 0.0) + time.monotonic() - started})


def random_model(source: Path, directory: Path, seed: int) -> None:
    """Write the untrained model, with the weights that SFT starts from."""
    model = Qwen3(Qwen3Config.read(source))
    model.init_weights(seed)
    save_model(model, directory)
    copy_tokenizer_files(source, directory)


def read_figures(out: Path, name: str) -> list[dict]:
    """Read the figures of a model at temperature 1 and of its greedy answers."""
    files = (out / f"eval_{name}{suffix}" / "summary.json" for suffix in ("", "_greedy"))
    return [json.loads(file.read_bytes()) for file in files]


def write_results(out: Path, cfg: DemoConfig, rows: dict[str, list[dict]], seconds: dict) -> None:
    """Write the RESULTS beside `out`."""
    gain = rows["igpo"][0]["difference"]
    summary = {
        name: {
            "success": sampled["success"]["mean"],
            "success_ci": [sampled["success"]["low"], sampled["success"]["high"]],
            "greedy": greedy["success"]["mean"],
            "pass_at_4": sampled["pass_at"][str(SAMPLES)]["mean"],
        }
        for name, (sampled, greedy) in rows.items()
    }
    summary |= {
        "paired_gain": gain["mean"],
        "paired_gain_ci": [gain["low"], gain["high"]],
        "questions": gain["questions"],
        "seconds": sum(seconds.values()),
        "seconds_by_stage": seconds,
        "seed": cfg.seed,
        "smoke": cfg.smoke,
        "run": save_run(cfg, out),
    }
    summary_file, curve_file, report_file = (out.parent / name for name in RESULTS)
    write_json(summary_file, summary)
    curve = [row for _, row in read_jsonl(out / "igpo" / "metrics.jsonl")]
    write_svg_curve(
        curve_file,
        [row["step"] for row in curve],
        [row["success"] for row in curve],
        title="IGPO on the offline world: success of the rollouts of each step",
        x_label="step",
        y_label="success (exact match)",
    )
    tokenizer = ChatTokenizer(out / "random")
    # in the report, for its information gains and advantages
    last_step = max((out / "igpo" / "rollouts").glob("step_?????.jsonl"))
    runs = [
        *(read_run(str(out / name), tokenizer) for name in ("eval_igpo", "eval_sft")),
        Run("training", read_trajectories(last_step), tokenizer),
    ]
    title = "Venus on the offline world: IGPO against SFT"
    write_report(report_file, title, runs, baseline="eval_sft")


def print_table(rows: dict[str, list[dict]], seconds: dict[str, float]) -> None:
    """A line per model."""
    print(
        f"\n{'':8}{'success T=1':>20}{'greedy':>20}{'pass@4':>8}{'turns':>7}{'browse':>8}"
        f"{'reliable':>10}{'format':>8}{'seconds':>9}"
    )
    for name, (sampled, greedy) in rows.items():
        success, greedy = (
            f"{100 * found['mean']:.1f} [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"
            for found in (sampled["success"], greedy["success"])
        )
        shares = (
            sampled["tool_use"]["overall"]["browse"],
            sampled["reliable_share"],
            sampled["format_valid_share"],
        )
        browse, reliable, valid = (
            "-" if share is None else f"{100 * share:.0f} %" for share in shares
        )
        print(
            f"{name:8}{success:>20}{greedy:>20}"
            f"{100 * sampled['pass_at'][str(SAMPLES)]['mean']:>8.1f}"
            f"{sampled['turns']['mean']:>7.2f}{browse:>8}{reliable:>10}{valid:>8}"
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
