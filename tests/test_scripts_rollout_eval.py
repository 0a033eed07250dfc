"""rollout.py and eval.py as a user starts them: in a child process where the exit is the claim, else run in this one (a child costs seconds)."""

import dataclasses
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import venus.collect
from venus.jsonl import read_jsonl, write_jsonl
from venus.model import Qwen3, Qwen3Config
from venus.trajectory import Outcome, Question, Trajectory, Turn, read_trajectories
from venus.weights import copy_tokenizer_files, save_model
from venus.world import WorldConfig, build

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--system-prompt", "short", "--max-turns", "2", "--max-turn-tokens", "12", "--max-observation-tokens", "64", "--max-context", "400", "--slots", "4")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A world of one web a split and, in world/model, a random model."""
    out = tmp_path_factory.mktemp("scripts") / "world"
    build(WorldConfig(
        out=str(out), train_webs=1, dev_webs=1, test_webs=1, long_webs=0, train_questions=4, questions_per_split=3, sft_rows=25,
    ))  # fmt: skip
    model = Qwen3(Qwen3Config.read(out / "model"))
    model.init_weights(0)
    save_model(model, out / "model")
    return out


def run_child(script, *argv):
    """(exit code, stdout, stderr) of a child process."""
    command = [sys.executable, str(ROOT / script), *map(str, argv)]
    result = subprocess.run(command, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False)
    return result.returncode, result.stdout, result.stderr


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a script as __main__ in this process: (exit code, stdout, stderr)."""

    def call(script, *argv):
        monkeypatch.setattr(sys, "argv", [script, *map(str, argv)])
        code = 0
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as ended:
            code = ended.code or 0
        return code, *capsys.readouterr()

    return call


def arguments(world, output, **changes):
    """The flags of a small rollout or evaluation, some changed."""
    values = {"model": world / "model", "questions": world / "questions" / "test.jsonl", "output": output} | changes
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", value)] + list(SMALL)


def assert_one_line(result, *parts):
    code, stdout, stderr = result
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
    for part in parts:
        assert part in stderr


# From start to end


def test_rollout_writes_valid_trajectories_and_the_record_of_the_run(world, tmp_path):
    code, stdout, stderr = run_child("rollout.py", *arguments(world, tmp_path / "out" / "t.jsonl", samples=2))
    assert (code, "Traceback" in stderr) == (0, False)
    trajectories = read_trajectories(tmp_path / "out" / "t.jsonl")
    assert len({t.key for t in trajectories}) == 6
    assert {t.run for t in trajectories} == {"t"}
    assert stdout == f"{tmp_path}/out/t.jsonl: 6 trajectories, {sum(len(t.turns) for t in trajectories)} turns, " + (
        f"{sum(t.num_sampled for t in trajectories)} sampled tokens\n"
    )
    assert all(t.manifest["max_turns"] == 2 and len(t.manifest["model"]) == 16 for t in trajectories)
    record = json.loads((tmp_path / "out" / "t.run" / "run.json").read_text(encoding="utf-8"))
    assert (record["config"]["samples"], record["seed"]) == (2, 0)
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_rollout_of_two_halves_equals_one(world, run, tmp_path):
    """Half the samples, then all: the first half is kept as it is, the second is what a run of its own gives."""
    assert run("rollout.py", *arguments(world, tmp_path / "a" / "t.jsonl", samples=2))[0] == 0
    assert run("rollout.py", *arguments(world, tmp_path / "b" / "t.jsonl", samples=1))[0] == 0
    half = (tmp_path / "b" / "t.jsonl").read_text(encoding="utf-8")
    assert run("rollout.py", *arguments(world, tmp_path / "b" / "t.jsonl", samples=2, slots=3))[0] == 0
    assert (tmp_path / "b" / "t.jsonl").read_text(encoding="utf-8").startswith(half)
    one, two = ({t.id: t.token_ids for t in read_trajectories(tmp_path / name / "t.jsonl")} for name in "ab")
    assert one == two


def test_eval_rolls_out_grades_and_summarises(world, run, tmp_path):
    code, stdout, _ = run("eval.py", *arguments(world, tmp_path / "e", samples=2, num_questions=2))
    summary = json.loads((tmp_path / "e" / "summary.json").read_text(encoding="utf-8"))
    trajectories = read_trajectories(tmp_path / "e" / "trajectories.jsonl")
    verdicts = [row for _, row in read_jsonl(tmp_path / "e" / "verdicts.jsonl")]
    assert code == 0
    assert "success (exact match)" in stdout
    assert [(row["run"], row["question_id"], row["sample"]) for row in verdicts] == sorted(t.key for t in trajectories)
    assert (summary["questions"], summary["trajectories"], summary["excluded"], list(summary["pass_at"])) == (2, 4, 0, ["1", "2"])
    assert summary["run"]["config"]["num_questions"] == 2


@pytest.mark.parametrize("script", ["rollout.py", "eval.py"])
def test_a_dry_run_prints_config_and_plan_and_writes_nothing(world, run, tmp_path, script):
    code, stdout, stderr = run(script, *arguments(world, tmp_path / "new" / "t", samples=4), "--dry-run")
    lines = dict(line.split(maxsplit=1) for line in stdout.splitlines() if len(line.split()) == 2)
    assert (code, stderr) == (0, "")
    assert (lines["samples"], lines["max_turns"], lines["rollouts"], lines["questions"]) == ("4", "2", "12", "3")
    assert "KV cache, all slots full" in stdout
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("script", "file"), [("rollout.py", "t"), ("eval.py", "t/trajectories.jsonl")])
def test_an_interrupted_script_says_how_to_go_on_and_does(world, run, tmp_path, monkeypatch, script, file):
    """Ctrl-C after the second finished rollout; the same command makes the other four, and the result is that of one go."""
    append, written = venus.collect.append_jsonl, []

    def interrupted(handle, row):
        append(handle, row)
        written.append(row)
        if len(written) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(venus.collect, "append_jsonl", interrupted)
        code, _, stderr = run(script, *arguments(world, tmp_path / "t", samples=2))
    assert (code, stderr.splitlines()[-1]) == (130, "interrupted; run the same command to resume")
    assert [row.to_json() for row in read_trajectories(tmp_path / file)] == written
    assert run(script, *arguments(world, tmp_path / "t", samples=2))[0] == 0
    (tmp_path / "whole").mkdir()
    assert run(script, *arguments(world, tmp_path / "whole" / "t", samples=2))[0] == 0
    one, two = ({t.id: t.token_ids for t in read_trajectories(path / file)} for path in (tmp_path, tmp_path / "whole"))
    assert one == two
    assert len(one) == 6


# Prepared trajectories, figures by hand


def turn(action, start, *strings):
    arguments = {"search": {"query": list(strings)}, "visit": {"url": list(strings), "goal": "g"}}.get(action)
    return Turn(start, start + 1, start + 1, action, "ok" if arguments else None, arguments, format_ok=action != "malformed")


def trajectory(name, sample, actions, prediction, *, gold="Paris", stop="answered", status="ok", run="prepared"):
    """Actions: (kind, strings...) a turn, one token each."""
    turns = [turn(kind, k + 2, *strings) for k, (kind, *strings) in enumerate(actions)]
    return Trajectory(
        run=run, question_id=name, sample=sample, seed=0, question=f"{name}?", ground_truth=(gold,), prompt_len=2,
        token_ids=[1] * (2 + len(turns)), log_probs=[], turns=turns, prediction=prediction, outcome=Outcome(None, status), stop_reason=stop,
        seconds={"model": 1.5, "tool": 0.5}, manifest={},
    )  # fmt: skip


SEARCH, OPEN, STALE, ANSWER = ("search", "a", "b"), ("visit", "profile/01"), ("visit", "archive/01"), ("answer",)
PREPARED = [
    trajectory("p", 0, [SEARCH, OPEN, ANSWER], "the Paris!"),  # correct after normalisation
    trajectory("p", 1, [SEARCH, STALE, OPEN, ANSWER], "Paris France"),  # wrong, F1 2/3
    trajectory("q", 0, [SEARCH, ("malformed",), ANSWER], "Rome", gold="Rome"),  # correct
    trajectory("q", 1, [SEARCH, SEARCH], None, gold="Rome", stop="no_answer"),
    trajectory("q", 2, [SEARCH, ANSWER], "Rome", gold="Rome", stop="time_limit", status="cut_off"),  # excluded
    trajectory("r", 0, [ANSWER], "Oslo", gold="Bern"),
    trajectory("r", 1, [ANSWER], "Rome", gold="Bern"),
]
QUESTIONS = [
    Question("p", "p?", ("Paris",), None, {"reliable": ["profile/01"]}), Question("q", "q?", ("Rome",)), Question("r", "r?", ("Bern",)),
]  # fmt: skip


@pytest.fixture
def prepared(tmp_path):
    write_jsonl(tmp_path / "questions.jsonl", [question.to_json() for question in QUESTIONS])
    write_jsonl(tmp_path / "t.jsonl", [row.to_json() for row in PREPARED])
    return tmp_path


def grade(run, directory, output="graded", trajectories="t.jsonl", **flags):
    extra = [word for name, value in flags.items() for word in (f"--{name}", value)]
    return run("eval.py", "--trajectories", directory / trajectories, "--questions", directory / "questions.jsonl", "--output", directory / output, *extra)


def summary_of(directory, output="graded"):
    return json.loads((directory / output / "summary.json").read_text(encoding="utf-8"))


def test_the_summary_of_prepared_trajectories_has_the_figures_of_a_hand_count(run, prepared):
    """p: 1 of 2, q: 1 of 2 (a third is excluded), r: 0 of 2. Success 1/3; pass@2 2/3; F1 p (1 + 2/3)/2, q 1/2, r 0."""
    assert grade(run, prepared)[0] == 0
    got = summary_of(prepared)
    means = {name: got[name]["mean"] for name in ("success", "f1", "turns")} | {f"pass@{k}": row["mean"] for k, row in got["pass_at"].items()}
    assert means == pytest.approx({"success": 1 / 3, "f1": (5 / 6 + 1 / 2) / 3, "turns": (3.5 + 2.5 + 1) / 3, "pass@1": 1 / 3, "pass@2": 2 / 3})
    assert (got["questions"], got["trajectories"], got["excluded"]) == (3, 7, 1)
    assert got["stop_reasons"] == {"answered": 5, "no_answer": 1, "time_limit": 1}
    assert got["format_valid_share"] == 13 / 14
    assert got["reliable_share"] == 2 / 3
    assert got["seconds"] == {"model": 7 * 1.5, "tool": 7 * 0.5}
    assert got["success"]["low"] == 0.0 < got["success"]["high"] == 0.5


def test_the_tool_use_of_prepared_trajectories_has_the_figures_of_a_hand_count(run, prepared):
    """Kept ones: searches 1 1 1 2, visits 1 2 0 0; correct are the first and third."""
    grade(run, prepared)
    use = summary_of(prepared)["tool_use"]
    assert {name: (row["trajectories"], row["searches"], row["visits"], row["browse"]) for name, row in use.items()} == {
        "overall": (6, 5, 3, 3 / 8), "correct": (2, 2, 1, 1 / 3), "wrong": (4, 3, 2, 2 / 5),
    }  # fmt: skip
    assert use["overall"]["browse_items"] == 3 / 13  # two queries a search


def test_verdicts_are_found_by_run_question_and_sample(run, prepared):
    """One row a trajectory; an excluded one has no verdict (error) and what it said stands beside it."""
    grade(run, prepared)
    rows = {(row["run"], row["question_id"], row["sample"]): row for _, row in read_jsonl(prepared / "graded" / "verdicts.jsonl")}
    assert {key[1:]: (row["verdict"], row["extracted"]) for key, row in rows.items()} == {
        ("p", 0): ("correct", "the Paris!"), ("p", 1): ("incorrect", "Paris France"), ("q", 0): ("correct", "Rome"),
        ("q", 1): ("incorrect", None), ("q", 2): ("error", "Rome"), ("r", 0): ("incorrect", "Oslo"), ("r", 1): ("incorrect", "Rome"),
    }  # fmt: skip
    assert {key[0] for key in rows} == {"prepared"}
    assert rows["prepared", "p", 1]["raw"] == {"em": 0.0, "f1": pytest.approx(2 / 3)}
    assert {(row["judge"], row["prompt_hash"]) for row in rows.values()} == {("em", None)}


def better(name, sample, **changes):
    """The trajectory of that question and sample with other values."""
    [old] = [row for row in PREPARED if (row.question_id, row.sample) == (name, sample)]
    return dataclasses.replace(old, **changes)


def test_the_difference_to_a_baseline_is_paired_by_question(run, prepared):
    """Here p 1, q 1/2, r 1/2 against p 1/2, q 1/2, r 0: differences 1/2, 0, 1/2. The order of the rows does not matter."""
    rows = [better("r", 1, prediction="Bern"), better("p", 1, prediction="Paris"), *(PREPARED[k] for k in (5, 3, 0, 2))]
    write_jsonl(prepared / "t2.jsonl", [row.to_json() for row in rows])
    grade(run, prepared, "base")
    code, stdout, _ = grade(run, prepared, "better", "t2.jsonl", baseline=prepared / "base")
    got = summary_of(prepared, "better")["difference"]
    assert code == 0
    assert (got["mean"], got["questions"], got["baseline"]) == (pytest.approx(1 / 3), 3, str(prepared / "base"))
    assert got["low"] == 0.0 < got["high"] == 0.5
    assert "difference to baseline" in stdout


def test_a_question_without_a_verdict_on_one_side_leaves_the_difference(run, prepared):
    """All samples of r were cut off: p and q are still compared."""
    cut = [better("r", k, outcome=Outcome(None, "cut_off"), stop_reason="time_limit") for k in (0, 1)]
    write_jsonl(prepared / "t2.jsonl", [row.to_json() for row in (better("p", 1, prediction="Paris"), *PREPARED[:1], *PREPARED[2:5], *cut)])
    grade(run, prepared, "base")
    assert grade(run, prepared, "better", "t2.jsonl", baseline=prepared / "base")[0] == 0
    got = summary_of(prepared, "better")["difference"]
    assert (got["mean"], got["questions"]) == (pytest.approx(1 / 4), 2)


def test_a_baseline_of_other_questions_is_refused(run, prepared):
    grade(run, prepared, "base")
    write_jsonl(prepared / "t2.jsonl", [row.to_json() for row in PREPARED if row.question_id != "q"])
    result = grade(run, prepared, "better", "t2.jsonl", baseline=prepared / "base")
    assert_one_line((result[0], "", result[2]), "evaluated other questions, 'q' is on one side only")
    assert not (prepared / "better").exists()


def test_a_missing_baseline_is_said_before_the_work(world, run, tmp_path):
    result = run("eval.py", *arguments(world, tmp_path / "e", baseline=tmp_path / "nowhere"))
    assert_one_line(result, "nowhere/verdicts.jsonl: no such file")
    assert not (tmp_path / "e").exists()


# Trajectories that cannot be graded


def test_trajectories_of_other_questions_are_passed_over(run, prepared):
    write_jsonl(prepared / "t.jsonl", [row.to_json() for row in (*PREPARED, trajectory("other", 0, [ANSWER], "x"))])
    grade(run, prepared)
    assert summary_of(prepared)["trajectories"] == 7


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ([trajectory("other", 0, [ANSWER], "x")], "holds no trajectory of the questions in"),
        ([*PREPARED, PREPARED[3]], "q/1 of run 'prepared' occurs twice"),
        ([better("p", 0, question="p2?")], "p/0 answers another question than"),
        ([PREPARED[4]], "all 1 rollouts are excluded from statistics"),
    ],
    ids=["none", "twice", "other", "excluded"],
)
def test_unfit_trajectories_are_one_line_and_nothing_is_written(run, prepared, rows, part):
    write_jsonl(prepared / "t.jsonl", [row.to_json() for row in rows])
    assert_one_line(grade(run, prepared), part)
    assert not (prepared / "graded").exists()


def test_a_malformed_trajectory_row_is_named_by_file_and_line(run, prepared):
    with open(prepared / "t.jsonl", "a", encoding="utf-8") as handle:
        handle.write('{"schema": 1}\n')
    assert_one_line(grade(run, prepared), f"{prepared}/t.jsonl:8: ")
    assert not (prepared / "graded").exists()


# Bad input: one line, exit code 2, nothing written


@pytest.mark.parametrize("script", ["rollout.py", "eval.py"])
def test_an_unknown_flag_ends_a_child_process_with_one_line(world, tmp_path, script):
    assert_one_line(run_child(script, *arguments(world, tmp_path / "new" / "t"), "--sample", "3"), "unknown argument --sample; did you mean --samples?")


BAD_FLAGS = [
    ({"temperature": "-1"}, "temperature -1.0"), ({"top_p": "0"}, "top_p 0.0"), ({"slots": "0"}, "slots 0"), ({"samples": "0"}, "samples"),
    ({"max_turns": "0"}, "max_turns 0"), ({"num_questions": "-1"}, "num_questions"), ({"num_questions": "0"}, "num_questions"),
    ({"threads": "0"}, "threads 0"), ({"max_turn_tokens": "many"}, "'many'"), ({"tool_seconds": "nan"}, "'nan' is not finite"),
]  # fmt: skip


@pytest.mark.parametrize("script", ["rollout.py", "eval.py"])
@pytest.mark.parametrize(("change", "part"), BAD_FLAGS, ids=lambda value: str(value)[:30])
def test_a_bad_value_of_a_flag_is_named(world, run, tmp_path, script, change, part):
    argv = arguments(world, tmp_path / "new" / "t") + [word for name, value in change.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert_one_line(run(script, *argv), part)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("both", [True, False])
def test_eval_takes_either_a_model_or_trajectories(world, run, tmp_path, both):
    argv = ["--model", world / "model", "--trajectories", "t.jsonl"] if both else []
    result = run("eval.py", *argv, "--questions", world / "questions" / "test.jsonl", "--output", tmp_path / "new")
    assert_one_line(result, "give either --model, to roll out, or --trajectories, to grade")


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


ROW = '{"id": "a", "question": "a?", "ground_truth": "x", "corpus": "c.jsonl"}\n'


def broken_inputs(world, directory):
    """name -> (flags, part of the message) of an input that cannot be used."""
    good, page = directory / "c.jsonl", '{"url": "u", "title": "t", "text": "x"}\n'
    write(good, page)
    models = {name: directory / name for name in ("bare", "cut", "foreign", "shape")}
    for name, path in models.items():
        path.mkdir()
        copy_tokenizer_files(world / "model", path)
        if name != "bare":
            for file in ("config.json", "model.safetensors"):
                shutil.copyfile(world / "model" / file, path / file)
    cut = models["cut"] / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1000])
    config = json.loads((world / "model" / "config.json").read_text(encoding="utf-8"))
    write(models["shape"] / "config.json", json.dumps(config | {"intermediate_size": 128}))
    spec = json.loads((world / "model" / "tokenizer.json").read_text(encoding="utf-8"))
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] != "<think>"]
    write(models["foreign"] / "tokenizer.json", json.dumps(spec))
    write(directory / "nourl.jsonl", page + '{"title": "t", "text": "x"}\n')
    return {
        "no questions file": ({"questions": directory / "none.jsonl"}, "none.jsonl: no such file"),
        "empty questions file": ({"questions": write(directory / "empty.jsonl", "")}, "empty.jsonl: no questions in the file"),
        "broken question row": ({"questions": write(directory / "q1.jsonl", ROW + "{]\n")}, "q1.jsonl:2: not a JSON row"),
        "question without answer": ({"questions": write(directory / "q2.jsonl", ROW + '{"id": "b", "question": "b?"}\n')}, "q2.jsonl:2: field 'ground_truth'"),
        "no corpus named": ({"questions": write(directory / "q3.jsonl", ROW.replace(', "corpus": "c.jsonl"', ""))}, "the question names no corpus"),
        "no corpus file": ({"questions": write(directory / "q4.jsonl", ROW.replace("c.jsonl", "gone.jsonl"))}, "gone.jsonl: no such corpus file"),
        "page without url": ({"questions": write(directory / "q5.jsonl", ROW.replace("c.jsonl", "nourl.jsonl"))}, "nourl.jsonl:2: a page needs a url"),
        "long prompt": ({"questions": write(directory / "q6.jsonl", ROW.replace("a?", "why " * 200))}, "question a: a prompt of"),
        "no model": ({"model": directory / "nowhere"}, "nowhere/config.json: no such file"),
        "no config": ({"model": models["bare"]}, "bare/config.json: no such file"),
        "truncated weights": ({"model": models["cut"]}, "cut/model.safetensors: truncated or not a safetensors file"),
        "wrong shapes": ({"model": models["shape"]}, "model.layers.0.mlp.down_proj.weight is"),
        "foreign tokenizer": ({"model": models["foreign"]}, "added_tokens lacks <think>"),
        "context beyond the model": ({"max_context": 9000}, "max_context 9000 exceeds the model's max_position_embeddings 8192"),
    }


CASES = (
    "no questions file", "empty questions file", "broken question row", "question without answer", "no corpus named", "no corpus file",
    "page without url", "long prompt", "no model", "no config", "truncated weights", "wrong shapes", "foreign tokenizer", "context beyond the model",
)  # fmt: skip


@pytest.fixture(scope="module")
def broken(world, tmp_path_factory):
    return broken_inputs(world, tmp_path_factory.mktemp("broken"))


@pytest.mark.parametrize("script", ["rollout.py", "eval.py"])
@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_and_nothing_is_written(world, run, broken, tmp_path, script, case):
    assert set(CASES) == set(broken)
    changes, part = broken[case]
    argv = arguments(world, tmp_path / "new" / "t", **{name: value for name, value in changes.items() if name != "max_context"})
    argv += [word for name in changes.keys() & {"max_context"} for word in ("--max-context", changes[name])]
    assert_one_line(run(script, *argv), part)
    assert not (tmp_path / "new").exists()


def test_a_refused_resume_leaves_rollouts_and_record_as_they_were(world, run, tmp_path):
    """The record of the refused command had replaced that of the run which made the file."""
    assert run("rollout.py", *arguments(world, tmp_path / "t.jsonl"))[0] == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(before) == 2
    assert_one_line(run("rollout.py", *arguments(world, tmp_path / "t.jsonl", seed=1)), "made under other settings; give another output")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
