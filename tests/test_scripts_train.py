"""train_sft.py and train_igpo.py as a user runs them: alone, interrupted, under
torchrun, with bad input.

A run is seconds, most of it importing torch, so a few runs are shared by many tests. `ran` holds
them: SFT of 60 steps that ends with a model which searches and visits, then IGPO from there.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_runs
import torch
from tiny_runs import ROLLOUT, ROOT, read_rows, run_all, run_one

from venus.cli import STOPPED
from venus.model.weights import load_model
from venus.trajectory import read_trajectories

pytestmark = pytest.mark.slow
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
STEPS, LR = 60, 0.02  # of SFT: one batch of six rows an epoch
# gains scored in the rollout differ in their last bit with the rollouts beside,
# and so after a resume
PACKED = ("--info-gain", "packed")
# of a dry run, which calls nobody
LIVE = (
    "--tools",
    "live",
    "--summary",
    "openai:http://127.0.0.1:9/v1:m",
    "--gpu-memory",
    "80",
    "--bandwidth",
    "3.35",
)
CLOCK = ("tokens_per_second", "seconds_")  # what two equal runs may differ in


def sft(world, output, *more):
    words = [
        "train_sft.py",
        "--model",
        world / "model",
        "--data",
        world / "sft" / "few.jsonl",
        "--output",
        output,
        "--init",
        "random",
    ]
    return [
        *words,
        "--epochs",
        str(STEPS),
        "--batch-size",
        "6",
        "--lr",
        str(LR),
        "--max-length",
        "1000",
        "--save-every",
        "10",
        *more,
    ]


def igpo(world, model, output, *more):
    words = [
        "train_igpo.py",
        "--model",
        model,
        "--questions",
        world / "questions" / "few.jsonl",
        "--output",
        output,
        *ROLLOUT,
    ]
    return [
        *words,
        "--questions-per-step",
        "3",
        "--group-size",
        "4",
        "--steps",
        "3",
        "--lr",
        "1e-3",
        "--save-every",
        "1",
        *more,
    ]


def timeless(rows):
    return [{key: value for key, value in row.items() if not key.startswith(CLOCK)} for row in rows]


def wait_for(condition, process):
    """Poll until the condition holds; the process must live until then."""
    deadline = time.monotonic() + 120
    while not condition():
        assert Path(f"/proc/{process}").exists() and time.monotonic() < deadline, (
            "it ended before it was interrupted"
        )
        time.sleep(0.002)


def worker(launcher, rank):
    """The process of a rank that torchrun started."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = path.read_text().rpartition(")")[2].split()[1]
            environment = path.with_name("environ").read_bytes()
        except OSError:
            continue  # gone by now, or not ours
        if int(parent) == launcher and f"RANK={rank}".encode() in environment.split(b"\0"):
            return int(path.parent.name)
    raise AssertionError(f"no rank {rank} below process {launcher}")


def interrupted(forked, command, condition, how):
    """Start a script, send the signal `how` once the condition holds, and return (exit
    code, what it wrote).
    """
    process = forked.start(command)
    wait_for(condition, process)
    os.kill(process, how)
    return forked.wait(), forked.log.read_text()


def interrupted_rank(command, condition, how, rank):
    """The same for a command line of torchrun and one of its processes."""
    words = [sys.executable, *map(str, command)]
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=tiny_runs.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(condition, process.pid)
    os.kill(worker(process.pid, rank), how)
    return process.wait(timeout=60), process.communicate()[1]


def num_lines(path):
    return path.read_text().count("\n") if path.exists() else 0


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """world, and the outputs of one uninterrupted process: SFT `sft`; from its model IGPO `igpo`,
    `packed` and the flag pair `grpo`; dry runs.
    """
    world, base = tiny_runs.tiny_world(tmp_path_factory), tmp_path_factory.mktemp("ran")
    model = base / "sft" / "model"
    pair = ("--format-pool", "none", "--steps", "1", "--updates", "2")
    results = run_all(
        sft(world, base / "sft"),
        igpo(world, model, base / "igpo"),
        igpo(world, model, base / "grpo", "--ig-turns", "none", *pair),
        sft(world, base / "dry", "--dry-run"),
        igpo(world, model, base / "dry", "--dry-run", *LIVE),
        igpo(world, model, base / "packed" / "igpo", *PACKED),
        [
            "train_sft.py",
            *[
                "--dry-run",
                "--world-size",
                "8",
                "--sp",
                "8",
                "--max-length",
                "200000",
                "--gpu-memory",
                "80",
            ],
        ],
    )
    assert [result["code"] for result in results] == [0] * 7, [
        result["err"][-1000:] for result in results
    ]
    with tiny_runs.Forked(base) as forked:
        yield SimpleNamespace(
            world=world, base=base, model=model, dry=results[3:5], paper=results[6], forked=forked
        )


# SFT


def test_sft_learns_and_writes_metrics_run_record_checkpoint_and_model(ran):
    rows = read_rows(ran.base / "sft" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert rows[0]["loss"] == pytest.approx(6.5, abs=0.3)  # ln 650: uniform over the vocabulary
    assert rows[-1]["loss"] < 0.5
    keys = {
        "step",
        "loss",
        "lr",
        "grad_norm",
        "skipped",
        "loss_tokens",
        "tokens",
        "padding_share",
        "tokens_per_second",
        "mfu",
    }
    assert all(
        set(row) == keys and row["padding_share"] == 0 and row["skipped"] == 0 for row in rows
    )
    record = json.loads((ran.base / "sft" / "run.json").read_text())
    assert record["config"]["lr"] == LR and record["world_size"] == 1
    assert sorted(path.name for path in (ran.base / "sft" / "checkpoints").iterdir()) == [
        "latest",
        f"step_{STEPS - 10}",
        f"step_{STEPS}",
    ]
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in ran.model.iterdir()} == names


def test_sft_warms_up_linearly_and_follows_the_cosine_to_zero(ran):
    """6 of 60 steps of warm-up that starts above 0, then the cosine; half-way between steps
    6 and 60 it is half.
    """
    rates = [row["lr"] for row in read_rows(ran.base / "sft" / "metrics.jsonl")]
    assert rates[:7] == pytest.approx([LR / 6, LR / 3, LR / 2, LR * 2 / 3, LR * 5 / 6, LR, LR])
    assert rates[33] == pytest.approx(LR / 2)
    assert rates[-1] < LR / 100 and rates[6:] == sorted(rates[6:], reverse=True)


def test_sft_stopped_by_ctrl_c_saves_the_step_and_resumes_to_the_same_losses_and_weights(
    ran, tmp_path
):
    """The step under way is finished and saved, so that nothing is done twice."""
    command = sft(ran.world, tmp_path / "sft")
    metrics = tmp_path / "sft" / "metrics.jsonl"
    code, errors = interrupted(ran.forked, command, lambda: num_lines(metrics) >= 13, signal.SIGINT)
    assert code == STOPPED and "Traceback" not in errors
    done = num_lines(metrics)
    assert 13 <= done < STEPS
    assert (tmp_path / "sft" / "checkpoints" / "latest").read_text() == f"step_{done}\n"
    ran.forked.run(command)
    assert timeless(read_rows(metrics)) == timeless(read_rows(ran.base / "sft" / "metrics.jsonl"))
    weights = (tmp_path / "sft" / "model" / "model.safetensors").read_bytes()
    assert weights == (ran.model / "model.safetensors").read_bytes()


@pytest.mark.dist
def test_sigterm_to_one_of_two_processes_stops_both_and_one_takes_up_what_they_saved(ran, tmp_path):
    """6 rows over 2 processes: loss and gradient norm equal those of one process
    throughout, to fp32 rounding.

    The first 3 steps to 1e-5. Later ones drift: Adam at this learning rate multiplies a
    difference from step to step.
    """
    command = sft(ran.world, tmp_path / "sft")
    metrics = tmp_path / "sft" / "metrics.jsonl"
    code, errors = interrupted_rank(
        [*TORCHRUN, *command], lambda: num_lines(metrics) >= 13, signal.SIGTERM, rank=1
    )
    assert code != 0 and f"exitcode  : {STOPPED} " in errors
    two = read_rows(metrics)
    assert 13 <= len(two) < STEPS
    assert (tmp_path / "sft" / "checkpoints" / "latest").read_text() == f"step_{len(two)}\n"
    ran.forked.run(command)
    assert json.loads((tmp_path / "sft" / "run.json").read_text())["world_size"] == 1
    one, resumed = read_rows(ran.base / "sft" / "metrics.jsonl"), read_rows(metrics)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in two[:3]] == pytest.approx(
            [row[key] for row in one[:3]], rel=1e-5, abs=1e-5
        )
    assert resumed[: len(two)] == two and [row["step"] for row in resumed] == list(range(STEPS))
    assert resumed[-1]["loss"] < 0.5


def test_export_writes_the_latest_checkpoint_and_nothing_else_happens(ran, tmp_path):
    """The weights that the run itself exported at its end; without a checkpoint there
    is nothing to export.
    """
    before = {path: path.stat().st_mtime_ns for path in ran.base.joinpath("sft").rglob("*")}
    done, none, onto = run_all(
        sft(ran.world, ran.base / "sft", "--export", tmp_path / "out"),
        sft(ran.world, tmp_path / "none", "--export", tmp_path / "none-out"),
        sft(ran.world, ran.base / "sft", "--export", ran.base),
    )
    assert done["code"] == 0 and f"the model after step {STEPS}" in done["out"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        path.name: path.read_bytes() for path in ran.model.iterdir()
    }
    assert (
        none["code"] == 2
        and "no checkpoint to export" in none["err"]
        and not (tmp_path / "none-out").exists()
    )
    assert onto["code"] == 2 and "which no export wrote" in onto["err"]
    assert {path: path.stat().st_mtime_ns for path in ran.base.joinpath("sft").rglob("*")} == before


# IGPO

METRICS = {
    "success",
    "outcome",
    "info_gain_mean",
    "info_gain_positive_share",
    "info_gain_by_turn",
    "format_valid_share",
    "turns",
    "searches",
    "visits",
    "browse_ratio",
    "groups",
    "zero_variance_groups",
    "segments",
    "scored_turns",
    "advantage_abs_mean",
    "kl",
    "clip_share",
    "entropy",
    "sampler_gap_mean",
    "sampler_gap_max",
    "trajectories",
    "excluded",
    "tokens_per_second",
    "seconds_rollout",
    "seconds_info_gain",
    "seconds_update",
    "seconds_step",
    "loss",
    "grad_norm",
    "trained_tokens",
    "skipped",
    "padding_share",
    "mfu",
}


def test_igpo_reports_what_a_step_did(ran):
    rows = read_rows(ran.base / "igpo" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row.keys() >= METRICS for row in rows)
    assert sum(row["scored_turns"] for row in rows) > 0 and all(
        row["visits"] + row["searches"] > 0 for row in rows
    )
    assert rows[0]["kl"] == 0.0 and rows[-1]["kl"] > 0
    assert all(
        row["clip_share"] == 0.0 and row["trajectories"] == 12 and row["excluded"] == 0
        for row in rows
    )


def test_the_trainers_log_probs_are_the_samplers(ran):
    """Cached decoding in a batch against packed training: 1e-4 at most, 1e-5 on average, in fp32
    with one set of weights.
    """
    for row in read_rows(ran.base / "igpo" / "metrics.jsonl"):
        assert row["sampler_gap_max"] <= 1e-4 and row["sampler_gap_mean"] <= 1e-5


def test_every_trajectory_of_a_step_is_kept_with_its_credit(ran):
    scored = 0
    for step in range(3):
        trajectories = read_trajectories(ran.base / "igpo" / "rollouts" / f"step_{step:05d}.jsonl")
        assert len({t.key for t in trajectories}) == len(trajectories) == 12
        assert len({t.question_id for t in trajectories}) == 3
        for trajectory in trajectories:
            assert trajectory.outcome.value is not None and trajectory.manifest["step"] == step
            assert len(trajectory.log_probs) == trajectory.num_sampled
            assert all(turn.advantage is not None for turn in trajectory.turns)
            for k, turn in enumerate(trajectory.turns):
                is_scored = (
                    turn.action == "visit"
                    and turn.tool_status in ("ok", "empty")
                    and k + 1 < len(trajectory.turns)
                )
                assert (turn.info_gain is not None) == is_scored
                scored += is_scored
    assert scored > 0
    assert not list((ran.base / "igpo" / "rollouts").glob("*.partial.jsonl"))


def test_a_fixed_question_set_is_shuffled_and_each_question_taken_once_an_epoch(ran):
    """6 questions in steps of 3: the two steps of the first epoch share no question."""
    steps = [
        {
            t.question_id
            for t in read_trajectories(ran.base / "igpo" / "rollouts" / f"step_{step:05d}.jsonl")
        }
        for step in range(2)
    ]
    assert not steps[0] & steps[1]


def test_grpo_is_two_flags_and_scores_nothing(ran):
    """Two updates of the same rollouts besides: the second one's ratios are not 1, against
    recomputed old log-probs.
    """
    (row,) = read_rows(ran.base / "grpo" / "metrics.jsonl")
    assert row["scored_turns"] == 0 and row["info_gain_mean"] is None
    trajectories = read_trajectories(ran.base / "grpo" / "rollouts" / "step_00000.jsonl")
    assert all(
        turn.info_gain is None and turn.advantage is not None
        for t in trajectories
        for turn in t.turns
    )


def test_igpo_killed_during_rollouts_takes_up_the_finished_ones_and_does_nothing_twice(
    ran, tmp_path
):
    """Killed hard in step 1. One of the finished rollouts is marked: it must come back as it is,
    and the metrics as if nothing had happened.

    Rank 1 had made them, it is said, so that there were two processes before.
    """
    command, output = igpo(ran.world, ran.model, tmp_path / "igpo", *PACKED), tmp_path / "igpo"
    partial = output / "rollouts" / "step_00001.rank0.partial.jsonl"
    code, _ = interrupted(ran.forked, command, lambda: num_lines(partial) >= 2, signal.SIGKILL)
    assert code == -signal.SIGKILL
    finished = partial.read_bytes().splitlines(keepends=True)
    whole = [json.loads(line) for line in finished if line.endswith(b"\n")]
    assert 2 <= len(whole) < 12
    whole[0]["seconds"] = {"model": 1234.5, "tool": 0.0}
    partial.unlink()
    partial.with_name("step_00001.rank1.partial.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in whole) + '{"torn'
    )
    ran.forked.run(command)
    assert timeless(read_rows(output / "metrics.jsonl")) == timeless(
        read_rows(ran.base / "packed" / "igpo" / "metrics.jsonl")
    )
    trajectories = read_trajectories(output / "rollouts" / "step_00001.jsonl")
    assert [t.key[1:] for t in trajectories if t.seconds["model"] == 1234.5] == [
        (whole[0]["question_id"], whole[0]["sample"])
    ]
    ids = [t.token_ids for t in trajectories]
    assert ids == [
        t.token_ids
        for t in read_trajectories(ran.base / "packed" / "igpo" / "rollouts" / "step_00001.jsonl")
    ]
    assert not list((output / "rollouts").glob("*.partial.jsonl"))
    assert torch.equal(
        load_model(output / "model").lm_head.weight,
        load_model(ran.base / "packed" / "igpo" / "model").lm_head.weight,
    )


def test_igpo_stopped_in_a_rollout_saves_the_steps_before_and_keeps_what_is_finished(ran, tmp_path):
    """In step 1, long before a checkpoint is due: that of step 0 must be there, since its update
    exists nowhere else.
    """
    command = igpo(ran.world, ran.model, tmp_path / "igpo", "--save-every", "100", *PACKED)
    output = tmp_path / "igpo"
    partial = output / "rollouts" / "step_00001.rank0.partial.jsonl"
    code, _ = interrupted(ran.forked, command, lambda: num_lines(partial) >= 2, signal.SIGTERM)
    assert code == STOPPED
    assert (output / "checkpoints" / "latest").read_text() == "step_1\n"
    assert 2 <= num_lines(partial) < 12
    ran.forked.run(command)
    assert timeless(read_rows(output / "metrics.jsonl")) == timeless(
        read_rows(ran.base / "packed" / "igpo" / "metrics.jsonl")
    )


@pytest.mark.dist
@pytest.mark.parametrize(("processes", "sp"), [(2, 1), (4, 2)])
def test_igpo_on_several_processes_has_the_rollouts_and_metrics_of_one(
    ran, tmp_path, processes, sp
):
    """Three questions over two or four processes. Ids are equal, so that all
    metrics are, to rounding.
    """
    launcher = [*TORCHRUN[:-1], f"--nproc_per_node={processes}"]
    run_one(*launcher, *igpo(ran.world, ran.model, tmp_path / "igpo", "--steps", "2", "--sp", sp))
    two, one = (
        timeless(read_rows(base / "igpo" / "metrics.jsonl"))[:2] for base in (tmp_path, ran.base)
    )
    for step in range(2):
        name = f"step_{step:05d}.jsonl"
        by_id = [
            {t.key: t.token_ids for t in read_trajectories(base / "igpo" / "rollouts" / name)}
            for base in (tmp_path, ran.base)
        ]
        assert by_id[0] == by_id[1]
        for key in ("loss", "grad_norm", "advantage_abs_mean", "entropy", "success", "segments"):
            assert two[step][key] == pytest.approx(one[step][key], abs=1e-5, rel=1e-5), key
    assert not list((tmp_path / "igpo" / "rollouts").glob("*.partial.jsonl"))


# What bad input gets


def test_dry_runs_print_config_and_plan_and_write_nothing(ran):
    of_rollouts = ("rollouts", "36", "KV pool per GPU", "rollout hours, a step", "searches, about")
    for result, wanted in zip(ran.dry, (("loss tokens", "6 kept"), of_rollouts), strict=True):
        for text in (
            "config\n",
            "plan\n",
            "parameters",
            "45,792",
            "memory per GPU, total",
            *wanted,
        ):
            assert text in result["out"]
    assert not (ran.base / "dry").exists()


def test_without_a_model_a_dry_run_plans_for_the_papers(ran):
    """4B parameters at 16 bytes over 8 GPUs are 8.0 GB, and a row of 200,000 tokens
    fits without offload.
    """
    assert re.search(r"AdamW +3\.7 GiB", ran.paper["out"]) and re.search(
        r"verdict +fits: 27\.\d GiB", ran.paper["out"]
    )


def bad_models(base, model):
    """Copies of the model directory, each with one fault: {name: directory}."""
    copies = {name: base / name for name in ("no_tag", "shape", "cut", "no_weights", "small_vocab")}
    for copy in copies.values():
        shutil.copytree(model, copy)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [
        token for token in tokenizer["added_tokens"] if token["content"] != "<tool_call>"
    ]
    (copies["no_tag"] / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((model / "config.json").read_text())
    (copies["shape"] / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    (copies["small_vocab"] / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    data = (model / "model.safetensors").read_bytes()
    (copies["cut"] / "model.safetensors").write_bytes(data[: len(data) // 2])
    (copies["no_weights"] / "model.safetensors").unlink()
    return {**copies, "absent": base / "absent"}


def bad_files(base, world):
    """Data files, each with one fault: {name: path}."""
    row = json.loads((world / "sft" / "few.jsonl").read_text().splitlines()[0])
    question = json.loads((world / "questions" / "few.jsonl").read_text().splitlines()[0])
    question["corpus"] = str(world / "corpora" / "train-000.jsonl")
    order = {**row, "messages": [*row["messages"], {"role": "tool", "content": "?"}]}
    (base / "no_url.jsonl").write_text('{"title": "t", "text": "x", "links": []}\n')
    contents = {
        "torn": [row, '{"question": "cut'],
        "order": [row, order],
        "empty": [],
        "half": [{**row, "weight": 0.5}],
        "zero": [{**row, "weight": 0}],
        "long": [{**question, "question": "word " * 1000}],
        "page": [{**question, "corpus": "no_url.jsonl"}],
        "corpus": [{**question, "corpus": "no.jsonl"}],
        "field": [{"id": "1", "question": "?"}],
        "twice": [question, question],
    }
    for name, rows in contents.items():
        (base / f"{name}.rows").with_suffix(".jsonl").write_text(
            "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows)
        )
    return {name: base / f"{name}.jsonl" for name in contents}


def test_bad_input_is_one_line_with_exit_code_2_and_nothing_is_written(ran, tmp_path):
    """All in one process: each is a command line and what its line must name."""
    models = bad_models(tmp_path, ran.model)
    files = bad_files(tmp_path, ran.world)
    output = tmp_path / "output"

    def tune(wanted, *more, model=ran.model, data=None):
        command = sft(ran.world, output, "--model", model, "--init", "weights", *more)
        return [*command, *(["--data", data] if data else [])], wanted

    def reinforce(wanted, *more, model=ran.model, questions=None):
        command = igpo(ran.world, model, output, *more)
        return [*command, *(["--questions", questions] if questions else [])], wanted

    cases = [
        tune("absent", model=models["absent"]),
        tune("lacks <tool_call>", model=models["no_tag"]),
        tune("not [32, 48]", model=models["shape"]),
        tune("truncated", model=models["cut"]),
        tune("no model.safetensors", model=models["no_weights"]),
        tune("650 ids, the model 200", model=models["small_vocab"]),
        tune("torn.jsonl:2: not a JSON row", data=files["torn"]),
        tune("order.jsonl:2: message 7: role 'tool'", data=files["order"]),
        tune("empty.jsonl: no row", data=files["empty"]),
        tune("weight 0.5", data=files["half"]),
        tune("zero.jsonl: no row", data=files["zero"]),
        tune("(6 longer ones)", "--max-length", "10"),
        tune("absent.jsonl: no such", data=tmp_path / "absent.jsonl"),
        tune("did you mean --lr?", "--lrr", "1"),
        tune("'x'", "--lr", "x"),
        tune("--batch-size 0: must be at least 1", "--batch-size", "0"),
        reinforce("absent", model=models["absent"]),
        reinforce("lacks <tool_call>", model=models["no_tag"]),
        reinforce("not [32, 48]", model=models["shape"]),
        reinforce("empty.jsonl: no questions", questions=files["empty"]),
        reinforce("torn.jsonl:", questions=files["torn"]),
        reinforce("field.jsonl:1: field 'ground_truth'", questions=files["field"]),
        reinforce("twice.jsonl:2", questions=files["twice"]),
        reinforce("exceed the context of 1024", questions=files["long"]),
        reinforce("no_url.jsonl:1: a page needs a url", questions=files["page"]),
        reinforce("no.jsonl: no such corpus", questions=files["corpus"]),
        reinforce("set format_pool none", "--ig-turns", "none"),
        reinforce("temperature 0: greedy", "--temperature", "0"),
        reinforce("max_position_embeddings 8192", "--max-context", "9000"),
        reinforce("--steps 0: must be at least 1", "--steps", "0"),
        reinforce("--group-size 1: must be at least 2", "--group-size", "1"),
        reinforce("--top-p 2.0: must be above 0", "--top-p", "2"),
        reinforce("--gamma 1.5: must be at least 0 and at most 1", "--gamma", "1.5"),
        reinforce("unknown argument --ig", "--ig", "all"),
    ]
    results = run_all(*(command for command, _ in cases))
    for result, (_, wanted) in zip(results, cases, strict=True):
        assert result["code"] == 2, (wanted, result)
        assert (
            result["err"].startswith("error: ")
            and result["err"].count("\n") == 1
            and wanted in result["err"]
        ), (wanted, result["err"])
    assert not output.exists()


def test_a_lost_checkpoint_and_other_settings_stop_the_run_in_one_line(ran, tmp_path):
    """To start anew in silence, or to go on with half of each, would throw work away. Flags that
    change no number may differ.
    """
    for name in ("lost", "other"):
        shutil.copytree(ran.base / "sft" / "checkpoints", tmp_path / name / "checkpoints")
    (tmp_path / "lost" / "checkpoints" / "latest").write_text("step_49\n")
    model, data = tmp_path / "wide", tmp_path / "fewer.jsonl"
    shutil.copytree(ran.world / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    data.write_text(
        "".join((ran.world / "sft" / "few.jsonl").read_text().splitlines(keepends=True)[1:])
    )
    free = (
        "--threads",
        "1",
        "--max-tokens-per-gpu",
        "200",
        "--recompute",
        "off",
        "--save-every",
        "7",
        "--keep-checkpoints",
        "1",
        "--log-every",
        "2",
    )
    results = run_all(
        sft(ran.world, tmp_path / "lost"),
        sft(ran.world, tmp_path / "other", "--model", model),
        sft(ran.world, tmp_path / "other", "--lr", "0.01"),
        sft(ran.world, tmp_path / "other", "--data", data),
        igpo(ran.world, ran.model, ran.base / "igpo", "--gamma", "0.9"),
        igpo(ran.world, ran.model, ran.base / "igpo", "--max-turns", "3"),
        sft(ran.world, tmp_path / "other", *free),
    )
    wanted = (
        "names step_49, which is not a whole checkpoint",
        "made with model '",
        "made with lr 0.02, not 0.01",
        "made with data '",
        "made with gamma 0.95, not 0.9",
        "made with max_turns 4, not 3",
    )
    for result, words in zip(results, wanted, strict=False):
        assert result["code"] == 2 and result["err"].count("\n") == 1 and words in result["err"], (
            words,
            result,
        )
    assert results[-1]["code"] == 0, results[-1]["err"]
