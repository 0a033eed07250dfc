"""train_sft.py and train_igpo.py as a user runs them: alone, interrupted, under torchrun, with bad input.

A run is seconds, most of it importing torch, so a few runs are shared by many tests. `ran` holds them: SFT of 60 steps that ends with a model
which searches and visits, then IGPO from there.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import tiny_runs
import torch
from tiny_runs import ROLLOUT, ROOT, read_rows, run_all, run_one

from venus.trajectory import read_trajectories
from venus.weights import load_model

pytestmark = pytest.mark.slow
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
STEPS, LR = 60, 0.02  # of SFT: one batch of six rows an epoch
CLOCK = ("tokens_per_second", "loss_tokens_per_second", "seconds_")  # what two equal runs may differ in


def sft(world, output, *more):
    words = ["train_sft.py", "--model", world / "model", "--data", world / "sft" / "few.jsonl", "--output", output, "--init", "random"]
    return [*words, "--epochs", str(STEPS), "--batch-size", "6", "--lr", str(LR), "--max-length", "1000", "--save-every", "10", *more]


def igpo(world, model, output, *more):
    words = ["train_igpo.py", "--model", model, "--questions", world / "questions" / "few.jsonl", "--output", output, *ROLLOUT]
    return [*words, "--questions-per-step", "3", "--group-size", "4", "--steps", "3", "--lr", "1e-3", "--save-every", "1", *more]


def timeless(rows):
    return [{key: value for key, value in row.items() if not key.startswith(CLOCK)} for row in rows]


def wait_for(condition, process):
    """Poll until the condition holds; the process must live until then."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, f"exit code {process.poll()} before it was interrupted"
        time.sleep(0.002)


def interrupted(command, condition, how):
    """Start a command line, send the signal `how` once the condition holds, and return (exit code, stderr)."""
    words = [sys.executable, *map(str, command)]
    process = subprocess.Popen(words, cwd=ROOT, env=tiny_runs.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(condition, process)
    os.kill(process.pid, how)
    return process.wait(timeout=60), process.communicate()[1]


def num_lines(path):
    return path.read_text().count("\n") if path.exists() else 0


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """world, and the outputs of one uninterrupted process: SFT `sft`; from its model IGPO `igpo` and the flag pair `grpo`; dry runs."""
    world, base = tiny_runs.tiny_world(tmp_path_factory), tmp_path_factory.mktemp("ran")
    model = base / "sft" / "model"
    pair = ("--format-pool", "none", "--steps", "1", "--updates", "2")
    results = run_all(
        sft(world, base / "sft"), igpo(world, model, base / "igpo"), igpo(world, model, base / "grpo", "--ig-turns", "none", *pair),
        sft(world, base / "dry", "--dry-run"), igpo(world, model, base / "dry", "--dry-run"),
    )  # fmt: skip
    assert [result["code"] for result in results] == [0] * 5, [result["err"][-1000:] for result in results]
    return SimpleNamespace(world=world, base=base, model=model, dry=results[3:])


# SFT


def test_sft_learns_and_writes_metrics_run_record_checkpoint_and_model(ran):
    rows = read_rows(ran.base / "sft" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert rows[0]["loss"] == pytest.approx(6.5, abs=0.3)  # ln 650: uniform over the vocabulary
    assert rows[-1]["loss"] < 0.5
    assert set(rows[0]) == {"step", "loss", "lr", "grad_norm", "loss_tokens", "tokens", "loss_tokens_per_second"}
    record = json.loads((ran.base / "sft" / "run.json").read_text())
    assert record["config"]["lr"] == LR and record["world_size"] == 1
    assert sorted(path.name for path in (ran.base / "sft" / "checkpoints").iterdir()) == ["latest", f"step_{STEPS}"]
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in ran.model.iterdir()} == names


def test_sft_warms_up_linearly_and_follows_the_cosine_to_zero(ran):
    """6 of 60 steps of warm-up that starts above 0, then the cosine; half-way between steps 6 and 60 it is half."""
    rates = [row["lr"] for row in read_rows(ran.base / "sft" / "metrics.jsonl")]
    assert rates[:7] == pytest.approx([LR / 6, LR / 3, LR / 2, LR * 2 / 3, LR * 5 / 6, LR, LR])
    assert rates[33] == pytest.approx(LR / 2)
    assert rates[-1] < LR / 100 and rates[6:] == sorted(rates[6:], reverse=True)


def test_sft_interrupted_by_ctrl_c_resumes_to_the_same_losses_and_weights_bit_for_bit(ran, tmp_path):
    """Killed some steps after the checkpoint of step 10 or 20: those steps are done again, and their metrics rows are not doubled."""
    command = sft(ran.world, tmp_path / "sft")
    metrics = tmp_path / "sft" / "metrics.jsonl"
    code, errors = interrupted(command, lambda: num_lines(metrics) >= 13, signal.SIGINT)
    assert code == 130 and "interrupted; run the same command to resume" in errors and "Traceback" not in errors
    assert 13 <= num_lines(metrics) < STEPS
    run_one(*command)
    assert timeless(read_rows(metrics)) == timeless(read_rows(ran.base / "sft" / "metrics.jsonl"))
    weights = (tmp_path / "sft" / "model" / "model.safetensors").read_bytes()
    assert weights == (ran.model / "model.safetensors").read_bytes()


@pytest.mark.dist
def test_sft_on_two_processes_has_the_metrics_of_one_and_is_resumed_by_one(ran, tmp_path):
    """6 rows over 2 processes, interrupted, taken up by 1: loss and gradient norm equal those of one process throughout, to fp32 rounding.

    The first 3 steps to 1e-5. Later ones drift: Adam at this learning rate multiplies a difference from step to step.
    """
    command = sft(ran.world, tmp_path / "sft")
    metrics = tmp_path / "sft" / "metrics.jsonl"
    code, _ = interrupted([*TORCHRUN, *command], lambda: num_lines(metrics) >= 13, signal.SIGINT)
    assert code != 0
    two = read_rows(metrics)
    assert 13 <= len(two) < STEPS
    first = int((tmp_path / "sft" / "checkpoints" / "latest").read_text().removeprefix("step_"))
    run_one(*command)
    assert json.loads((tmp_path / "sft" / "run.json").read_text())["world_size"] == 1
    one, resumed = read_rows(ran.base / "sft" / "metrics.jsonl"), read_rows(metrics)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in two[:3]] == pytest.approx([row[key] for row in one[:3]], rel=1e-5, abs=1e-5)
        assert [row[key] for row in resumed[first : first + 2]] == pytest.approx([row[key] for row in two[first : first + 2]], rel=1e-4, abs=1e-4)
    assert [row["step"] for row in resumed] == list(range(STEPS))
    assert resumed[-1]["loss"] < 0.5


# IGPO

METRICS = {
    "success", "outcome", "info_gain_mean", "info_gain_positive_share", "info_gain_by_turn", "format_valid_share", "turns", "searches", "visits",
    "browse_ratio", "groups", "zero_variance_groups", "segments", "scored_turns", "advantage_abs_mean", "kl", "clip_share", "entropy",
    "sampler_gap_mean", "sampler_gap_max", "trajectories", "excluded", "tokens_per_second", "seconds_rollout", "seconds_info_gain",
    "seconds_update", "seconds_step", "loss", "grad_norm", "trained_tokens",
}  # fmt: skip


def test_igpo_reports_what_a_step_did(ran):
    rows = read_rows(ran.base / "igpo" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row.keys() >= METRICS for row in rows)
    assert sum(row["scored_turns"] for row in rows) > 0 and all(row["visits"] + row["searches"] > 0 for row in rows)
    assert rows[0]["kl"] == 0.0 and rows[-1]["kl"] > 0
    assert all(row["clip_share"] == 0.0 and row["trajectories"] == 12 and row["excluded"] == 0 for row in rows)


def test_the_trainers_log_probs_are_the_samplers(ran):
    """Cached decoding in a batch against packed training: 1e-4 at most, 1e-5 on average, in fp32 with one set of weights."""
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
                is_scored = turn.action == "visit" and turn.tool_status in ("ok", "empty") and k + 1 < len(trajectory.turns)
                assert (turn.info_gain is not None) == is_scored
                scored += is_scored
    assert scored > 0
    assert not list((ran.base / "igpo" / "rollouts").glob("*.partial.jsonl"))


def test_a_fixed_question_set_is_shuffled_and_each_question_taken_once_an_epoch(ran):
    """6 questions in steps of 3: the two steps of the first epoch share no question."""
    steps = [{t.question_id for t in read_trajectories(ran.base / "igpo" / "rollouts" / f"step_{step:05d}.jsonl")} for step in range(2)]
    assert not steps[0] & steps[1]


def test_grpo_is_two_flags_and_scores_nothing(ran):
    """Two updates of the same rollouts besides: the second one's ratios are not 1, against recomputed old log-probs."""
    (row,) = read_rows(ran.base / "grpo" / "metrics.jsonl")
    assert row["scored_turns"] == 0 and row["info_gain_mean"] is None
    trajectories = read_trajectories(ran.base / "grpo" / "rollouts" / "step_00000.jsonl")
    assert all(turn.info_gain is None and turn.advantage is not None for t in trajectories for turn in t.turns)


def test_igpo_killed_during_rollouts_takes_up_the_finished_ones_and_does_nothing_twice(ran, tmp_path):
    """Killed hard in step 1. One of the finished rollouts is marked: it must come back as it is, and the metrics as if nothing had happened."""
    command, output = igpo(ran.world, ran.model, tmp_path / "igpo"), tmp_path / "igpo"
    partial = output / "rollouts" / "step_00001.rank0.partial.jsonl"
    code, _ = interrupted(command, lambda: num_lines(partial) >= 2, signal.SIGKILL)
    assert code == -signal.SIGKILL
    finished = partial.read_bytes().splitlines(keepends=True)
    whole = [json.loads(line) for line in finished if line.endswith(b"\n")]
    assert 2 <= len(whole) < 12
    whole[0]["seconds"] = {"model": 1234.5, "tool": 0.0}
    partial.write_text("".join(json.dumps(row) + "\n" for row in whole) + '{"torn')
    run_one(*command)
    assert timeless(read_rows(output / "metrics.jsonl")) == timeless(read_rows(ran.base / "igpo" / "metrics.jsonl"))
    trajectories = read_trajectories(output / "rollouts" / "step_00001.jsonl")
    assert [t.key[1:] for t in trajectories if t.seconds["model"] == 1234.5] == [(whole[0]["question_id"], whole[0]["sample"])]
    ids = [t.token_ids for t in trajectories]
    assert ids == [t.token_ids for t in read_trajectories(ran.base / "igpo" / "rollouts" / "step_00001.jsonl")]
    assert not list((output / "rollouts").glob("*.partial.jsonl"))
    assert torch.equal(load_model(output / "model").lm_head.weight, load_model(ran.base / "igpo" / "model").lm_head.weight)


@pytest.mark.dist
def test_igpo_on_two_processes_has_the_rollouts_and_metrics_of_one(ran, tmp_path):
    """Three questions over two processes. Ids are equal, so that all metrics are, to rounding."""
    run_one(*TORCHRUN, *igpo(ran.world, ran.model, tmp_path / "igpo", "--steps", "2"))
    two, one = (timeless(read_rows(base / "igpo" / "metrics.jsonl"))[:2] for base in (tmp_path, ran.base))
    for step in range(2):
        name = f"step_{step:05d}.jsonl"
        by_id = [{t.key: t.token_ids for t in read_trajectories(base / "igpo" / "rollouts" / name)} for base in (tmp_path, ran.base)]
        assert by_id[0] == by_id[1]
        for key in ("loss", "grad_norm", "advantage_abs_mean", "entropy", "success", "segments"):
            assert two[step][key] == pytest.approx(one[step][key], abs=1e-5, rel=1e-5), key
    assert not list((tmp_path / "igpo" / "rollouts").glob("*.partial.jsonl"))


# What bad input gets


def test_dry_runs_print_config_and_plan_and_write_nothing(ran):
    for result, wanted in zip(ran.dry, (("loss tokens", "6 kept"), ("rollouts", "36")), strict=True):
        for text in ("config\n", "plan\n", "parameters", "45,792", "memory, total", *wanted):
            assert text in result["out"]
    assert not (ran.base / "dry").exists()


def bad_models(base, model):
    """Copies of the model directory, each with one fault: {name: directory}."""
    copies = {name: base / name for name in ("no_tag", "shape", "cut", "no_weights", "small_vocab")}
    for copy in copies.values():
        shutil.copytree(model, copy)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] != "<tool_call>"]
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
        "torn": [row, '{"question": "cut'], "order": [row, order], "empty": [], "half": [{**row, "weight": 0.5}], "zero": [{**row, "weight": 0}],
        "long": [{**question, "question": "word " * 1000}], "page": [{**question, "corpus": "no_url.jsonl"}], "corpus": [{**question, "corpus": "no.jsonl"}],
        "field": [{"id": "1", "question": "?"}], "twice": [question, question],
    }  # fmt: skip
    for name, rows in contents.items():
        (base / f"{name}.rows").with_suffix(".jsonl").write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return {name: base / f"{name}.jsonl" for name in contents}


def test_bad_input_is_one_line_with_exit_code_2_and_nothing_is_written(ran, tmp_path):
    """All in one process: each is a command line and what its line must name."""
    models, files, output = bad_models(tmp_path, ran.model), bad_files(tmp_path, ran.world), tmp_path / "output"

    def tune(wanted, *more, model=ran.model, data=None):
        command = sft(ran.world, output, "--model", model, "--init", "weights", *more)
        return [*command, *(["--data", data] if data else [])], wanted

    def reinforce(wanted, *more, model=ran.model, questions=None):
        command = igpo(ran.world, model, output, *more)
        return [*command, *(["--questions", questions] if questions else [])], wanted

    cases = [
        tune("absent", model=models["absent"]), tune("lacks <tool_call>", model=models["no_tag"]), tune("not [32, 48]", model=models["shape"]),
        tune("truncated", model=models["cut"]), tune("no model.safetensors", model=models["no_weights"]),
        tune("650 ids, the model 200", model=models["small_vocab"]), tune("torn.jsonl:2: not a JSON row", data=files["torn"]),
        tune("order.jsonl:2: message 7: role 'tool'", data=files["order"]), tune("empty.jsonl: no row", data=files["empty"]),
        tune("weight 0.5", data=files["half"]), tune("zero.jsonl: no row", data=files["zero"]), tune("(6 longer ones)", "--max-length", "10"),
        tune("absent.jsonl: no such", data=tmp_path / "absent.jsonl"), tune("did you mean --lr?", "--lrr", "1"), tune("'x'", "--lr", "x"),
        tune("must be positive", "--batch-size", "0"),
        reinforce("absent", model=models["absent"]), reinforce("lacks <tool_call>", model=models["no_tag"]),
        reinforce("not [32, 48]", model=models["shape"]),
        reinforce("empty.jsonl: no questions", questions=files["empty"]), reinforce("torn.jsonl:", questions=files["torn"]),
        reinforce("field.jsonl:1: field 'ground_truth'", questions=files["field"]), reinforce("twice.jsonl:2", questions=files["twice"]),
        reinforce("exceed the context of 1024", questions=files["long"]), reinforce("no_url.jsonl:1: a page needs a url", questions=files["page"]),
        reinforce("no.jsonl: no such corpus", questions=files["corpus"]), reinforce("set format_pool none", "--ig-turns", "none"),
        reinforce("temperature 0: greedy", "--temperature", "0"), reinforce("max_position_embeddings 8192", "--max-context", "9000"),
        reinforce("steps 0: must be at least 1", "--steps", "0"), reinforce("group_size 1: must be at least 2", "--group-size", "1"),
        reinforce("top_p 2", "--top-p", "2"), reinforce("gamma is 1.5", "--gamma", "1.5"), reinforce("unknown argument --ig", "--ig", "all"),
    ]  # fmt: skip
    results = run_all(*(command for command, _ in cases))
    for result, (_, wanted) in zip(results, cases, strict=True):
        assert result["code"] == 2, (wanted, result)
        assert result["err"].startswith("error: ") and result["err"].count("\n") == 1 and wanted in result["err"], (wanted, result["err"])
    assert not output.exists()


def test_a_lost_checkpoint_stops_the_run_in_one_line(ran, tmp_path):
    """`latest` without its checkpoint, and one of another model: to start anew in silence would throw work away."""
    for name in ("lost", "other"):
        shutil.copytree(ran.base / "sft" / "checkpoints", tmp_path / name / "checkpoints")
    (tmp_path / "lost" / "checkpoints" / "latest").write_text("step_50\n")
    model = tmp_path / "wide"
    shutil.copytree(ran.world / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    lost, other = run_all(sft(ran.world, tmp_path / "lost"), sft(ran.world, tmp_path / "other", "--model", model))
    for result, wanted in ((lost, "names step_50, which is not a whole checkpoint"), (other, "the state of another model")):
        assert result["code"] == 2 and result["err"].count("\n") == 1 and wanted in result["err"]
