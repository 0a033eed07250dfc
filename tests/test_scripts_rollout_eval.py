"""rollout.py and eval.py as a user starts them: in a child process where the exit is the claim,
else run in this one (a child costs seconds).
"""

import dataclasses
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from chat_samples import DATA, needs_data, tiny_file, tiny_spec
from stub_server import completion, serve

import venus.rollout.collect
from venus.files import read_jsonl, write_jsonl
from venus.model.qwen3 import Qwen3, Qwen3Config
from venus.model.weights import copy_tokenizer_files, save_model
from venus.trajectory import Outcome, Question, Trajectory, Turn, read_trajectories
from venus.world.build import WorldConfig, build

ROOT = Path(__file__).resolve().parents[1]
SMALL = (
    "--system-prompt",
    "short",
    "--max-turns",
    "2",
    "--max-turn-tokens",
    "12",
    "--max-observation-tokens",
    "64",
    "--max-context",
    "400",
    "--slots",
    "4",
)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A world of one web a split and, in world/model, a random model."""
    out = tmp_path_factory.mktemp("scripts") / "world"
    build(
        WorldConfig(
            out=str(out),
            train_webs=1,
            dev_webs=1,
            test_webs=1,
            long_webs=0,
            train_questions=4,
            questions_per_split=3,
            sft_rows=25,
        )
    )
    model = Qwen3(Qwen3Config.read(out / "model"))
    model.init_weights(0)
    save_model(model, out / "model")
    return out


def run_child(script, *argv):
    """(exit code, stdout, stderr) of a child process."""
    command = [sys.executable, str(ROOT / script), *map(str, argv)]
    result = subprocess.run(
        command,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
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
    values = {
        "model": world / "model",
        "questions": world / "questions" / "test.jsonl",
        "output": output,
    } | changes
    return [
        word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", value)
    ] + list(SMALL)


def assert_one_line(result, *parts):
    code, stdout, stderr = result
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
    for part in parts:
        assert part in stderr


# From start to end


def test_rollout_writes_valid_trajectories_and_the_record_of_the_run(world, tmp_path):
    code, stdout, stderr = run_child(
        "rollout.py", *arguments(world, tmp_path / "out" / "t.jsonl", samples=2)
    )
    assert (code, "Traceback" in stderr) == (0, False)
    trajectories = read_trajectories(tmp_path / "out" / "t.jsonl")
    assert len({t.key for t in trajectories}) == 6
    assert {t.run for t in trajectories} == {"t"}
    assert stdout == (
        f"{tmp_path}/out/t.jsonl: 6 trajectories, {sum(len(t.turns) for t in trajectories)} turns, "
    ) + (f"{sum(t.num_sampled for t in trajectories)} sampled tokens\n")
    assert all(
        t.manifest["max_turns"] == 2 and len(t.manifest["model"]) == 16 for t in trajectories
    )
    record = json.loads((tmp_path / "out" / "t.run" / "run.json").read_text(encoding="utf-8"))
    assert (record["config"]["samples"], record["seed"]) == (2, 0)
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_rollout_of_two_halves_equals_one(world, run, tmp_path):
    """Half the samples, then all: the first half is kept as it is, the second is what a
    run of its own gives.
    """
    assert run("rollout.py", *arguments(world, tmp_path / "a" / "t.jsonl", samples=2))[0] == 0
    assert run("rollout.py", *arguments(world, tmp_path / "b" / "t.jsonl", samples=1))[0] == 0
    half = (tmp_path / "b" / "t.jsonl").read_text(encoding="utf-8")
    assert (
        run("rollout.py", *arguments(world, tmp_path / "b" / "t.jsonl", samples=2, slots=3))[0] == 0
    )
    assert (tmp_path / "b" / "t.jsonl").read_text(encoding="utf-8").startswith(half)
    one, two = (
        {t.id: t.token_ids for t in read_trajectories(tmp_path / name / "t.jsonl")} for name in "ab"
    )
    assert one == two


def test_eval_rolls_out_grades_and_summarises(world, run, tmp_path):
    code, stdout, _ = run("eval.py", *arguments(world, tmp_path / "e", samples=2, num_questions=2))
    summary = json.loads((tmp_path / "e" / "summary.json").read_text(encoding="utf-8"))
    trajectories = read_trajectories(tmp_path / "e" / "trajectories.jsonl")
    verdicts = [row for _, row in read_jsonl(tmp_path / "e" / "verdicts.jsonl")]
    assert code == 0
    assert "success (em)" in stdout
    assert [(row["run"], row["question_id"], row["sample"]) for row in verdicts] == sorted(
        t.key for t in trajectories
    )
    assert (
        summary["questions"],
        summary["trajectories"],
        summary["excluded"],
        list(summary["pass_at"]),
    ) == (2, 4, 0, ["1", "2"])
    assert summary["run"]["config"]["num_questions"] == 2


@pytest.mark.parametrize("script", ["rollout.py", "eval.py"])
def test_a_dry_run_prints_config_and_plan_and_writes_nothing(world, run, tmp_path, script):
    code, stdout, stderr = run(
        script, *arguments(world, tmp_path / "new" / "t", samples=4), "--dry-run"
    )
    # name, value and, of the config, its source
    lines = dict(line.split()[:2] for line in stdout.splitlines() if len(line.split()) > 1)
    assert (code, stderr) == (0, "")
    assert (lines["samples"], lines["max_turns"], lines["rollouts"], lines["questions"]) == (
        "4",
        "2",
        "12",
        "3",
    )
    assert "KV cache, all rows full" in stdout
    assert not (tmp_path / "new").exists()


@pytest.fixture
def own_limits(world, tmp_path):
    """Make a model directory with an agent.json."""

    def make(values):
        directory = tmp_path / "own"
        shutil.copytree(world / "model", directory)
        (directory / "agent.json").write_text(json.dumps(values), encoding="utf-8")
        return directory

    return make


def test_a_model_brings_its_own_limits_and_protocol(world, run, tmp_path, own_limits):
    """What agent.json says takes the place of the default, and a flag that of agent.json; the
    config says which it was.
    """
    model = own_limits({"max_turns": 7, "system_prompt": "short"})
    questions = world / "questions" / "test.jsonl"
    argv = ["--model", model, "--questions", questions, "--output", tmp_path / "t", "--dry-run"]
    _, stdout, stderr = run("rollout.py", *argv)
    lines = dict(line.split(maxsplit=1) for line in stdout.splitlines() if "  " in line.strip())
    assert (lines["max_turns"], lines["system_prompt"], stderr) == (
        "7  (agent.json)",
        "short  (agent.json)",
        "",
    )
    assert lines["max_context"] == "262144  (default)"
    _, stdout, _ = run("rollout.py", *argv, "--max-turns", "3")
    assert re.search(r"max_turns +3  \(flag\)\n", stdout)
    assert re.search(r"system_prompt +short  \(agent.json\)\n", stdout)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"lr": 1}, "agent.json: 'lr' is no run-time limit; use max_turns"),
        ({"temperature": 0.6}, "agent.json: 'temperature' is no run-time limit"),
        ({"max_turns": 0}, "agent.json: max_turns 0: must be at least 1"),
    ],
)
def test_an_agent_file_that_sets_something_else_is_refused(
    world, run, tmp_path, own_limits, values, part
):
    argv = arguments(world, tmp_path / "new" / "t", model=own_limits(values))
    assert_one_line(run("rollout.py", *argv), part)
    assert not (tmp_path / "new").exists()


def test_the_plan_of_a_benchmark_still_says_where_the_values_come_from(
    world, run, tmp_path, own_limits
):
    """eval.py adds the addresses of the benchmark's copies to --blocked; the config it then had
    knew no sources.
    """
    model = own_limits({"max_turns": 7})
    hop = multi_hop(tmp_path / "hop.json", 2)
    argv = ["--model", model, "--benchmark", "multi-hop", "--data", hop, "--max-context", "8000"]
    code, stdout, _ = run("eval.py", *argv, "--output", tmp_path / "e", "--dry-run")
    assert code == 0 and "hotpotqa" in stdout
    assert re.search(r"max_turns +7  \(agent.json\)\n", stdout)
    assert re.search(r"max_context +8000  \(flag\)\n", stdout)


@pytest.mark.parametrize(
    ("script", "file"), [("rollout.py", "t"), ("eval.py", "t/trajectories.jsonl")]
)
def test_an_interrupted_script_says_how_to_go_on_and_does(
    world, run, tmp_path, monkeypatch, script, file
):
    """Ctrl-C after the second finished rollout; the same command makes the other four, and the
    result is that of one go.
    """
    append, written = venus.rollout.collect.append_jsonl, []

    def interrupted(handle, row):
        append(handle, row)
        written.append(row)
        if len(written) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(venus.rollout.collect, "append_jsonl", interrupted)
        code, _, stderr = run(script, *arguments(world, tmp_path / "t", samples=2))
    # what a run was started with is known while it runs
    assert script == "rollout.py" or (tmp_path / "t" / "run.json").exists()
    assert (code, stderr.splitlines()[-1]) == (130, "interrupted; run the same command to resume")
    assert [row.to_json() for row in read_trajectories(tmp_path / file)] == written
    assert run(script, *arguments(world, tmp_path / "t", samples=2))[0] == 0
    (tmp_path / "whole").mkdir()
    assert run(script, *arguments(world, tmp_path / "whole" / "t", samples=2))[0] == 0
    one, two = (
        {t.id: t.token_ids for t in read_trajectories(path / file)}
        for path in (tmp_path, tmp_path / "whole")
    )
    assert one == two
    assert len(one) == 6


# Prepared trajectories, figures by hand


def turn(action, start, *strings):
    arguments = {
        "search": {"query": list(strings)},
        "visit": {"url": list(strings), "goal": "g"},
    }.get(action)
    return Turn(
        start,
        start + 1,
        start + 1,
        action,
        "ok" if arguments else None,
        arguments,
        format_ok=action != "malformed",
    )


def trajectory(
    name, sample, actions, prediction, *, gold="Paris", stop="answered", status="ok", run="prepared"
):
    """Actions: (kind, strings...) a turn, one token each."""
    turns = [turn(kind, k + 2, *strings) for k, (kind, *strings) in enumerate(actions)]
    return Trajectory(
        run=run,
        question_id=name,
        sample=sample,
        seed=0,
        question=f"{name}?",
        ground_truth=(gold,),
        prompt_len=2,
        token_ids=[1] * (2 + len(turns)),
        log_probs=[],
        turns=turns,
        prediction=prediction,
        outcome=Outcome(None, status),
        stop_reason=stop,
        seconds={"model": 1.5, "tool": 0.5},
        manifest={},
    )


SEARCH = ("search", "a", "b")
OPEN = ("visit", "profile/01")
STALE = ("visit", "archive/01")
ANSWER = ("answer",)
PREPARED = [
    trajectory("p", 0, [SEARCH, OPEN, ANSWER], "the Paris!"),  # correct after normalisation
    trajectory("p", 1, [SEARCH, STALE, OPEN, ANSWER], "Paris France"),  # wrong, F1 2/3
    trajectory("q", 0, [SEARCH, ("malformed",), ANSWER], "Rome", gold="Rome"),  # correct
    trajectory("q", 1, [SEARCH, SEARCH], None, gold="Rome", stop="no_answer"),
    # excluded
    trajectory("q", 2, [SEARCH, ANSWER], "Rome", gold="Rome", stop="time_limit", status="cut_off"),
    trajectory("r", 0, [ANSWER], "Oslo", gold="Bern"),
    trajectory("r", 1, [ANSWER], "Rome", gold="Bern"),
]
QUESTIONS = [
    Question("p", "p?", ("Paris",), None, {"reliable": ["profile/01"]}),
    Question("q", "q?", ("Rome",)),
    Question("r", "r?", ("Bern",)),
]


@pytest.fixture
def prepared(tmp_path):
    tiny_file(tmp_path, tiny_spec())
    write_jsonl(tmp_path / "questions.jsonl", [question.to_json() for question in QUESTIONS])
    write_jsonl(tmp_path / "t.jsonl", [row.to_json() for row in PREPARED])
    return tmp_path


def grade(run, directory, output="graded", trajectories="t.jsonl", *more, **flags):
    extra = [
        word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)
    ]
    inputs = [
        "--trajectories",
        directory / trajectories,
        "--tokenizer",
        directory,
        "--questions",
        directory / "questions.jsonl",
    ]
    return run("eval.py", *inputs, "--output", directory / output, *extra, *more)


def summary_of(directory, output="graded"):
    return json.loads((directory / output / "summary.json").read_text(encoding="utf-8"))


def test_the_summary_of_prepared_trajectories_has_the_figures_of_a_hand_count(run, prepared):
    """p: 1 of 2, q: 1 of 3 (the third was cut off, which is wrong, though it had
    said it), r: 0 of 2.

    pass@2: p 1, q 1 - C(2,2)/C(3,2) = 2/3, r 0. F1 p (1 + 2/3)/2, q 1/3, r 0. Of those
    graded, q is 1 of 2.
    """
    assert grade(run, prepared)[0] == 0
    got = summary_of(prepared)
    intervals = {"success": got["success"], "f1": got["scores"]["f1"], "turns": got["turns"]} | {
        f"pass@{k}": row for k, row in got["pass_at"].items()
    }
    means = {name: row["mean"] for name, row in intervals.items()}
    success = (1 / 2 + 1 / 3) / 3
    assert means == pytest.approx(
        {
            "success": success,
            "f1": (5 / 6 + 1 / 3) / 3,
            "turns": 7 / 3,
            "pass@1": success,
            "pass@2": (1 + 2 / 3) / 3,
        }
    )
    assert (got["questions"], got["trajectories"], got["excluded"]) == (3, 7, 1)
    assert (
        got["graded"],
        got["judge_errors"],
        got["cut_off"],
        got["tool_error"],
        got["no_ground_truth"],
    ) == (6, 0, 1, 0, 0)
    assert got["success_graded"]["mean"] == pytest.approx(1 / 3)
    assert got["any_of_first"]["2"]["mean"] == pytest.approx(2 / 3)
    assert got["majority"]["mean"] == pytest.approx(1 / 3)  # q; p is a tie, which the seed decides
    assert got["turn_histogram"] == {"1": 2, "2": 1, "3": 2, "4": 1}
    assert got["failures"] == dict.fromkeys(got["failures"], 0) | {
        "truncated": 1,
        "format": 1,
        "evidence_not_seen": 3,
    }
    assert (got["name"], got["judge"], got["manifest"]["benchmark"], got["manifest"]["judge"]) == (
        "questions",
        "em",
        None,
        "em",
    )
    assert got["stop_reasons"] == {"answered": 5, "no_answer": 1, "time_limit": 1}
    assert got["format_valid_share"] == 13 / 14
    assert got["reliable_share"] == 2 / 3
    assert got["seconds"] == {"model": 7 * 1.5, "tool": 7 * 0.5}
    assert got["success"]["low"] == 0.0 < got["success"]["high"] <= 0.5


def test_the_tool_use_of_prepared_trajectories_has_the_figures_of_a_hand_count(run, prepared):
    """Kept ones: searches 1 1 1 2, visits 1 2 0 0; correct are the first and third."""
    grade(run, prepared)
    use = summary_of(prepared)["tool_use"]
    assert {
        name: (row["trajectories"], row["searches"], row["visits"], row["browse"])
        for name, row in use.items()
    } == {
        "overall": (6, 5, 3, 3 / 8),
        "correct": (2, 2, 1, 1 / 3),
        "wrong": (4, 3, 2, 2 / 5),
    }
    assert use["overall"]["browse_items"] == 3 / 13  # two queries a search


def test_verdicts_are_found_by_run_question_and_sample(run, prepared):
    """One row a trajectory; an excluded one has no verdict (error) and what it
    said stands beside it.
    """
    grade(run, prepared)
    rows = {
        (row["run"], row["question_id"], row["sample"]): row
        for _, row in read_jsonl(prepared / "graded" / "verdicts.jsonl")
    }
    assert {key[1:]: (row["verdict"], row["extracted"]) for key, row in rows.items()} == {
        ("p", 0): ("correct", "the Paris!"),
        ("p", 1): ("incorrect", "Paris France"),
        ("q", 0): ("correct", "Rome"),
        ("q", 1): ("incorrect", None),
        ("q", 2): ("error", "Rome"),
        ("r", 0): ("incorrect", "Oslo"),
        ("r", 1): ("incorrect", "Rome"),
    }
    assert {key[0] for key in rows} == {"prepared"}
    assert rows["prepared", "p", 1]["scores"] == {"em": 0.0, "f1": pytest.approx(2 / 3)}
    assert rows["prepared", "q", 2]["error"] == "time_limit"
    assert {
        (row["judge"], row["prompt_hash"], row["manifest"]["judge"]) for row in rows.values()
    } == {("em", None, "em")}


def better(name, sample, **changes):
    """The trajectory of that question and sample with other values."""
    [old] = [row for row in PREPARED if (row.question_id, row.sample) == (name, sample)]
    return dataclasses.replace(old, **changes)


def test_the_difference_to_a_baseline_is_paired_by_question(run, prepared):
    """Here p 1, q 1/2, r 1/2 against p 1/2, q 1/3, r 0: differences 1/2, 1/6, 1/2. The order of the
    rows does not matter.
    """
    rows = [
        better("r", 1, prediction="Bern"),
        better("p", 1, prediction="Paris"),
        *(PREPARED[k] for k in (5, 3, 0, 2)),
    ]
    write_jsonl(prepared / "t2.jsonl", [row.to_json() for row in rows])
    grade(run, prepared, "base")
    code, stdout, _ = grade(run, prepared, "better", "t2.jsonl", baseline=prepared / "base")
    got = summary_of(prepared, "better")["difference"]
    assert code == 0
    assert (got["mean"], got["questions"], got["baseline"]) == (
        pytest.approx(7 / 18),
        3,
        str(prepared / "base"),
    )
    assert (got["low"], got["high"]) == (pytest.approx(1 / 6), 0.5)
    assert (got["graded"]["mean"], got["gained"], got["lost"]) == (
        pytest.approx(1 / 3),
        ["p", "q", "r"],
        [],
    )
    assert "difference to baseline" in stdout


def test_a_question_without_a_verdict_on_one_side_leaves_the_graded_difference(run, prepared):
    """All samples of r were cut off: wrong in the difference of the headline, left out of the one
    over graded questions.
    """
    cut = [
        better("r", k, outcome=Outcome(None, "cut_off"), stop_reason="time_limit") for k in (0, 1)
    ]
    write_jsonl(
        prepared / "t2.jsonl",
        [
            row.to_json()
            for row in (better("p", 1, prediction="Paris"), *PREPARED[:1], *PREPARED[2:5], *cut)
        ],
    )
    grade(run, prepared, "base")
    assert grade(run, prepared, "better", "t2.jsonl", baseline=prepared / "base")[0] == 0
    got = summary_of(prepared, "better")["difference"]
    assert (got["graded"]["mean"], got["graded"]["questions"]) == (pytest.approx(1 / 4), 2)
    assert (got["mean"], got["questions"], got["gained"], got["lost"]) == (
        pytest.approx((1 / 2 + 0 + 0) / 3),
        3,
        ["p"],
        [],
    )


def test_a_baseline_of_other_questions_is_refused(run, prepared):
    grade(run, prepared, "base")
    write_jsonl(
        prepared / "t2.jsonl", [row.to_json() for row in PREPARED if row.question_id != "q"]
    )
    result = grade(run, prepared, "better", "t2.jsonl", baseline=prepared / "base")
    assert_one_line(
        (result[0], "", result[2]), "evaluated other questions, 'q' is on one side only"
    )
    assert not (prepared / "better").exists()


def test_a_missing_baseline_is_said_before_the_work(world, run, tmp_path):
    result = run("eval.py", *arguments(world, tmp_path / "e", baseline=tmp_path / "nowhere"))
    assert_one_line(result, "nowhere/verdicts.jsonl: no such file")
    assert not (tmp_path / "e").exists()


def test_a_baseline_made_under_other_settings_is_refused_unless_asked_for(run, prepared):
    """The model may differ, it is what is compared; a judge or a date may not."""
    write_jsonl(
        prepared / "t2.jsonl",
        [
            dataclasses.replace(row, manifest={"model": "b", "date": "2026-03-01"}).to_json()
            for row in PREPARED
        ],
    )
    write_jsonl(
        prepared / "t3.jsonl",
        [
            dataclasses.replace(row, manifest={"model": "c", "date": "2026-03-01"}).to_json()
            for row in PREPARED
        ],
    )
    grade(run, prepared, "base", "t2.jsonl", judge="match")
    result = grade(run, prepared, "other", "t3.jsonl", baseline=prepared / "base")
    assert_one_line(
        result,
        "were not made alike: judge 'em' and 'match'.",
        "--allow-unlike does so all the same",
    )
    assert not (prepared / "other").exists()
    assert (
        grade(run, prepared, "other", "t3.jsonl", "--allow-unlike", baseline=prepared / "base")[0]
        == 0
    )
    assert (
        grade(run, prepared, "same", "t3.jsonl", baseline=prepared / "base", judge="match")[0] == 0
    )
    assert summary_of(prepared, "same")["difference"]["mean"] == 0.0


# A model as judge, benchmarks, the report


def test_a_judge_model_is_asked_once_a_case_and_its_failures_are_counted_wrong(
    run, prepared, monkeypatch
):
    """Two verdicts come, the third reply cannot be read: wrong in the headline, an error in its
    row. The same command asks for that one only.
    """
    down = [True]

    def reply(body, _):
        said = body["messages"][0]["content"]
        if "Response: Rome" in said and down[0]:
            return 200, completion("I cannot say."), {}
        return (
            200,
            completion(
                "extracted: it\nreasoning: -\ncorrect: "
                f"{'yes' if 'Paris France' in said else 'no'}\nconfidence: 90"
            ),
            {},
        )

    monkeypatch.setenv("JUDGE_API_KEY", "secret-77")
    rows = [better("r", 1, prediction="Rome"), better("p", 1), better("r", 0)]
    write_jsonl(prepared / "t.jsonl", [row.to_json() for row in rows])
    with serve(reply) as stub:
        judge = f"openai:{stub.url}:grader"
        code, stdout, stderr = grade(run, prepared, judge=judge)
        assert (code, stderr) == (0, "")
        first = summary_of(prepared)
        assert (
            len(stub.requests) >= 3
            and stub.requests[0]["headers"]["Authorization"] == "Bearer secret-77"
        )
        down[0] = False
        asked = len(stub.requests)
        grade(run, prepared, judge=judge)
        assert [
            ("Response: Rome" in request["body"]["messages"][0]["content"])
            for request in stub.requests[asked:]
        ] == [True]
    # p right; r: one wrong, one without a verdict
    assert (first["success"]["mean"], first["success_graded"]["mean"]) == (0.5, 0.5)
    assert (first["graded"], first["judge_errors"], first["failures"]["judge_error"]) == (2, 1, 1)
    assert "1 judge_errors" in stdout and "success (grader)" in stdout
    got = summary_of(prepared)
    assert (got["judge_errors"], got["graded"], got["judge"]) == (0, 3, "grader")
    assert len(got["prompt_hash"]) == 12 and got["manifest"]["prompt_hash"] == got["prompt_hash"]
    assert "secret-77" not in "".join(
        path.read_text(encoding="utf-8") for path in (prepared / "graded").iterdir()
    )


def multi_hop(path, count):
    rows = [
        {"_id": f"m{k}", "question": f"m{k}?", "answer": "Paris", "type": "bridge"}
        for k in range(count)
    ]
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def test_other_runners_rollouts_of_a_benchmark_are_graded_by_the_text_of_the_question(
    run, prepared
):
    """Tongyi's rows have no ids; their own answers are not asked. A page of a copy of the
    benchmark is flagged.
    """
    talk = [
        {"role": "user", "content": "m0?"},
        {"role": "assistant", "content": "<think>\nt\n</think>\n\n<answer>\nParis\n</answer>"},
    ]
    leak = [
        talk[0],
        {
            "role": "assistant",
            "content": (
                '<think>\nt\n</think>\n\n<tool_call>\n{"name": "search", "arguments": {"query": '
                '["x"]}}\n</tool_call>'
            ),
        },
        {
            "role": "user",
            "content": "<tool_response>\nhttps://hub.example/datasets/hotpotqa/x\n</tool_response>",
        },
        talk[1],
    ]
    rows = [
        {
            "question": "m0?",
            "answer": "",
            "messages": which,
            "prediction": "x",
            "termination": "answer",
        }
        for which in (talk, leak)
    ]
    write_jsonl(
        prepared / "iter.jsonl",
        [
            *rows,
            {
                "question": "no such question?",
                "answer": "",
                "messages": talk,
                "termination": "answer",
            },
        ],
    )
    source = ["--benchmark", "multi-hop", "--data", multi_hop(prepared / "hop.json", 2)]
    code, stdout, stderr = run(
        "eval.py",
        "--trajectories",
        prepared / "iter.jsonl",
        "--tokenizer",
        prepared,
        *source,
        "--output",
        prepared / "graded",
    )
    assert (code, stderr) == (0, "")
    got = summary_of(prepared)
    assert (
        got["name"],
        got["trajectories"],
        got["success"]["mean"],
        got["manifest"]["benchmark"],
    ) == ("multi-hop", 2, 1.0, "multi-hop")
    assert (got["leaks"]["suspected"], got["leaks"]["strings"]) == (1, {"hotpotqa": 1})
    assert "leak suspected" in stdout


def test_a_benchmark_is_rolled_out_over_its_corpus(world, run, tmp_path):
    source = [
        "--benchmark",
        "multi-hop",
        "--data",
        multi_hop(tmp_path / "hop.json", 2),
        "--corpus",
        world / "corpora" / "train-000.jsonl",
    ]
    argv = ["--model", world / "model", *source, "--output", tmp_path / "e", *SMALL]
    code, stdout, _ = run("eval.py", *argv, "--dry-run")
    assert code == 0 and not (tmp_path / "e").exists()
    code, _, _ = run("eval.py", *argv, "--report", tmp_path / "r.html")
    summary = summary_of(tmp_path, "e")
    assert (code, summary["name"], summary["trajectories"], len(summary["manifest"]["corpus"])) == (
        0,
        "multi-hop",
        2,
        12,
    )
    assert summary["manifest"]["max_turns"] == 2 and "model" in summary["manifest"]
    assert "m0" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_a_dry_run_estimates_what_the_judge_costs(world, run, tmp_path):
    """2 x 3 calls; (a prompt of some 1,100 characters + 400 for the answer + question) /
    4 + 150 tokens each.
    """
    source = [
        "--benchmark",
        "multi-hop",
        "--data",
        multi_hop(tmp_path / "hop.json", 2),
        "--judge",
        "openai:http://127.0.0.1:9/v1:m",
        "--samples",
        3,
    ]
    code, stdout, _ = run(
        "eval.py",
        "--model",
        world / "model",
        *source,
        "--output",
        tmp_path / "e",
        *SMALL,
        "--dry-run",
    )
    lines = {
        line.strip().split("  ")[0]: line.split()[-1]
        for line in stdout.splitlines()
        if line.startswith("  ")
    }
    assert (code, lines["judge calls, at most"]) == (0, "6")
    assert 6 * 400 < int(lines["judge tokens, about"].replace(",", "")) < 6 * 700


def test_the_report_shows_the_evaluation_beside_its_baseline(run, prepared):
    grade(run, prepared, "base")
    code, _, stderr = grade(
        run, prepared, "here", baseline=prepared / "base", report=prepared / "out" / "report.html"
    )
    page = (prepared / "out" / "report.html").read_text(encoding="utf-8")
    assert (code, stderr) == (0, "")
    assert "base" in page and "here" in page


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "turns", "micro", "macro"), [("sft", 320, 0.245, 0.264), ("rl", 691, 0.140, 0.151)]
)
def test_the_released_trajectories_have_their_known_turns_and_browse_ratios(
    run, tmp_path, kind, turns, micro, macro
):
    """The RL files have no ground truth: tool use is all that can be said of them."""
    flags = [
        "--trajectories",
        DATA / "trajectories" / kind,
        "--tokenizer",
        DATA / "qwen3",
        "--judge",
        "match",
        "--output",
        tmp_path / "e",
    ]
    code, stdout, stderr = run("eval.py", *flags, "--report", tmp_path / "r.html")
    got = summary_of(tmp_path, "e")
    use = got["tool_use"]["overall"]
    assert (code, stderr, got["num_turns"], got["trajectories"]) == (0, "", turns, 10)
    assert (use["browse"], use["browse_macro"]) == (
        pytest.approx(micro, abs=5e-4),
        pytest.approx(macro, abs=5e-4),
    )
    # every call holds one item
    assert (use["browse_items"], use["browse_items_macro"]) == (use["browse"], use["browse_macro"])
    assert f"{100 * micro:5.1f} %" in stdout
    assert (got["success"] is None) == (kind == "rl")
    assert (tmp_path / "r.html").stat().st_size > 100_000


def test_samples_count_in_their_order_and_not_in_that_of_the_file(run, prepared):
    """A file of rollouts holds the shortest first. Taken as they stand, any-of-first-1 is the
    success of the quick ones: here 2/3 and not 0.
    """
    rows = [
        better(name, k, prediction=t.ground_truth[0] if k else "no")
        for t in PREPARED[::2]
        for name in t.question_id[:1]
        for k in (1, 0)
    ]
    rows = list({(t.question_id, t.sample): t for t in rows}.values())
    assert [t.sample for t in rows[:2]] == [1, 0]
    write_jsonl(prepared / "t.jsonl", [row.to_json() for row in rows])
    grade(run, prepared)
    got = summary_of(prepared)
    assert (got["any_of_first"]["1"]["mean"], got["success"]["mean"]) == (0.0, 0.5)


def test_the_directory_of_an_evaluation_stands_for_its_trajectories(world, run, tmp_path):
    """Its verdicts, summary and record lie beside them and are no trajectories."""
    run("eval.py", *arguments(world, tmp_path / "e"))
    flags = [
        "--trajectories",
        tmp_path / "e",
        "--tokenizer",
        world / "model",
        "--output",
        tmp_path / "again",
    ]
    code, stdout, stderr = run("eval.py", *flags)
    assert (code, stderr, summary_of(tmp_path, "again")["success"]) == (
        0,
        "",
        summary_of(tmp_path, "e")["success"],
    )


def test_nothing_is_printed_of_what_there_is_none_of(run, prepared):
    _, stdout, _ = grade(run, prepared)
    assert (
        "questions: 3 questions, 7 trajectories" in stdout
        and "1 cut_off" in stdout
        and "tries again" not in stdout
    )
    write_jsonl(prepared / "t.jsonl", [better("r", 0, ground_truth=()).to_json()])
    code, stdout, _ = run(
        "eval.py",
        "--trajectories",
        prepared / "t.jsonl",
        "--tokenizer",
        prepared,
        "--output",
        prepared / "bare",
    )
    assert code == 0 and {line.split("  ")[1] for line in stdout.splitlines()[1:]} == {
        "turns",
        "format-valid turns",
        "stop reasons",
        "without a verdict",
    }


def test_the_plan_of_a_remote_policy_needs_no_model_and_names_none(world, run, tmp_path):
    """--model is then the directory of a tokenizer alone; a plan that reads its config.json, and
    counts its cache, speaks of a model that is not used.
    """
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "tokenizer.json").write_bytes(
        (world / "model" / "tokenizer.json").read_bytes()
    )
    for script in ("rollout.py", "eval.py"):
        argv = arguments(
            world,
            tmp_path / "new" / "t",
            model=tmp_path / "m",
            policy="openai:http://127.0.0.1:9/v1:m",
        )
        code, stdout, stderr = run(script, *argv, "--dry-run")
        assert (
            (code, stderr) == (0, "")
            and "rollouts  " in stdout
            and "KV cache" not in stdout
            and "parameters" not in stdout
        )


def test_the_doctor_of_an_evaluation_tries_its_judge(world, run, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "secret-78")
    with serve(lambda body, _: (401, {"error": {"message": "no such key secret-78"}}, {})) as stub:
        code, stdout, _ = run(
            "eval.py", *arguments(world, tmp_path / "e", judge=f"openai:{stub.url}:m"), "--doctor"
        )
    assert (
        code == 1
        and "works  model" in stdout
        and "FAILS  judge      refused" in stdout
        and "check JUDGE_API_KEY" in stdout
    )
    assert "secret-78" not in stdout and not (tmp_path / "e").exists()


# Trajectories that cannot be graded


def test_trajectories_of_other_questions_are_passed_over(run, prepared):
    write_jsonl(
        prepared / "t.jsonl",
        [row.to_json() for row in (*PREPARED, trajectory("other", 0, [ANSWER], "x"))],
    )
    grade(run, prepared)
    assert summary_of(prepared)["trajectories"] == 7


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ([trajectory("other", 0, [ANSWER], "x")], "no trajectory of the questions in"),
        ([*PREPARED, PREPARED[3]], "q/1 of run 'prepared' occurs twice"),
        ([better("p", 0, question="p2?")], "p/0 of run 'prepared' answers another question than"),
        (
            [PREPARED[0], better("p", 1, manifest={"date": "2026-03-01"})],
            "p/0 of run 'prepared' and p/1 of run 'prepared' were not made alike: date",
        ),
    ],
    ids=["none", "twice", "other", "unlike"],
)
def test_unfit_trajectories_are_one_line_and_nothing_is_written(run, prepared, rows, part):
    write_jsonl(prepared / "t.jsonl", [row.to_json() for row in rows])
    assert_one_line(grade(run, prepared), part)
    assert not (prepared / "graded").exists()


def test_rollouts_of_which_none_ended_are_no_evaluation(run, prepared):
    write_jsonl(prepared / "t.jsonl", [PREPARED[4].to_json()])
    assert_one_line(grade(run, prepared), "all 1 rollouts are excluded from statistics")
    assert not (prepared / "graded" / "summary.json").exists()


def test_a_malformed_trajectory_row_is_named_by_file_and_line(run, prepared):
    with open(prepared / "t.jsonl", "a", encoding="utf-8") as handle:
        handle.write('{"schema": 1}\n')
    assert_one_line(grade(run, prepared), f"{prepared}/t.jsonl:8: ")
    assert not (prepared / "graded").exists()


# Bad input: one line, exit code 2, nothing written


@pytest.mark.parametrize("script", ["rollout.py", "eval.py"])
def test_an_unknown_flag_ends_a_child_process_with_one_line(world, tmp_path, script):
    assert_one_line(
        run_child(script, *arguments(world, tmp_path / "new" / "t"), "--sample", "3"),
        "unknown argument --sample; did you mean --samples?",
    )


BAD_FLAGS = [
    ({"temperature": "-1"}, "temperature -1.0"),
    ({"top_p": "0"}, "--top-p 0.0: must be above 0"),
    ({"slots": "0"}, "slots 0"),
    ({"samples": "0"}, "samples"),
    ({"max_turns": "0"}, "--max-turns 0: must be at least 1"),
    ({"num_questions": "-1"}, "--num-questions -1: must be at least 1"),
    ({"num_questions": "0"}, "--num-questions 0: must be at least 1"),
    ({"threads": "0"}, "threads 0"),
    ({"max_turn_tokens": "many"}, "'many'"),
    ({"tool_seconds": "nan"}, "'nan' is not finite"),
]


@pytest.mark.parametrize("script", ["rollout.py", "eval.py"])
@pytest.mark.parametrize(("change", "part"), BAD_FLAGS, ids=lambda value: str(value)[:30])
def test_a_bad_value_of_a_flag_is_named(world, run, tmp_path, script, change, part):
    argv = arguments(world, tmp_path / "new" / "t") + [
        word for name, value in change.items() for word in (f"--{name.replace('_', '-')}", value)
    ]
    assert_one_line(run(script, *argv), part)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("both", [True, False])
def test_eval_takes_either_a_model_or_trajectories(world, run, tmp_path, both):
    argv = ["--model", world / "model", "--trajectories", "t.jsonl"] if both else []
    result = run(
        "eval.py",
        *argv,
        "--questions",
        world / "questions" / "test.jsonl",
        "--output",
        tmp_path / "new",
    )
    assert_one_line(result, "give either --model, to roll out, or --trajectories, to grade")


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--model", "m"], "give --questions or --benchmark: what shall the model be asked?"),
        (
            ["--model", "m", "--benchmark", "gaia-text"],
            "give either --questions, or --benchmark with its --data",
        ),
        (
            ["--model", "m", "--benchmark", "gaia-text", "--data", "d", "--questions", "q"],
            "give either --questions, or --benchmark with its --data",
        ),
        (["--trajectories", "t.jsonl"], "give --tokenizer, the directory"),
        (
            ["--trajectories", "t.jsonl", "--tokenizer", "d", "--num-questions", "1"],
            "--num-questions needs --questions or --benchmark",
        ),
        (
            ["--model", "m", "--questions", "q", "--partial"],
            "--corpus, --canary and --partial belong to a --benchmark",
        ),
        (
            ["--model", "m", "--benchmark", "browsecomp", "--data", "d"],
            "browsecomp needs a judge: --judge openai:BASE_URL:MODEL",
        ),
        (["--model", "m", "--questions", "q", "--judge", "none"], "an evaluation needs a judge"),
        (["--model", "m", "--questions", "q", "--judge", "gpt"], "judge 'gpt': give match"),
    ],
)
def test_flags_that_do_not_go_together_are_named(run, tmp_path, argv, part):
    assert_one_line(run("eval.py", *argv, "--output", tmp_path / "new"), part)
    assert not (tmp_path / "new").exists()


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
    spec["added_tokens"] = [
        token for token in spec["added_tokens"] if token["content"] != "<think>"
    ]
    write(models["foreign"] / "tokenizer.json", json.dumps(spec))
    write(directory / "nourl.jsonl", page + '{"title": "t", "text": "x"}\n')
    return {
        "no questions file": ({"questions": directory / "none.jsonl"}, "none.jsonl: no such file"),
        "empty questions file": (
            {"questions": write(directory / "empty.jsonl", "")},
            "empty.jsonl: no questions in the file",
        ),
        "broken question row": (
            {"questions": write(directory / "q1.jsonl", ROW + "{]\n")},
            "q1.jsonl:2: not a JSON row",
        ),
        "question without answer": (
            {"questions": write(directory / "q2.jsonl", ROW + '{"id": "b", "question": "b?"}\n')},
            "q2.jsonl:2: field 'ground_truth'",
        ),
        "no corpus named": (
            {"questions": write(directory / "q3.jsonl", ROW.replace(', "corpus": "c.jsonl"', ""))},
            "the question names no corpus",
        ),
        "no corpus file": (
            {"questions": write(directory / "q4.jsonl", ROW.replace("c.jsonl", "gone.jsonl"))},
            "gone.jsonl: no such corpus file",
        ),
        "page without url": (
            {"questions": write(directory / "q5.jsonl", ROW.replace("c.jsonl", "nourl.jsonl"))},
            "nourl.jsonl:2: a page needs a url",
        ),
        "long prompt": (
            {"questions": write(directory / "q6.jsonl", ROW.replace("a?", "why " * 200))},
            "question a: a prompt of",
        ),
        "no model": ({"model": directory / "nowhere"}, "nowhere/config.json: no such file"),
        "no config": ({"model": models["bare"]}, "bare/config.json: no such file"),
        "truncated weights": (
            {"model": models["cut"]},
            "cut/model.safetensors: truncated or not a safetensors file",
        ),
        "wrong shapes": ({"model": models["shape"]}, "model.layers.0.mlp.down_proj.weight is"),
        "foreign tokenizer": ({"model": models["foreign"]}, "added_tokens lacks <think>"),
        "context beyond the model": (
            {"max_context": 9000},
            "max_context 9000 exceeds the model's max_position_embeddings 8192",
        ),
    }


CASES = (
    "no questions file",
    "empty questions file",
    "broken question row",
    "question without answer",
    "no corpus named",
    "no corpus file",
    "page without url",
    "long prompt",
    "no model",
    "no config",
    "truncated weights",
    "wrong shapes",
    "foreign tokenizer",
    "context beyond the model",
)


@pytest.fixture(scope="module")
def broken(world, tmp_path_factory):
    return broken_inputs(world, tmp_path_factory.mktemp("broken"))


@pytest.mark.parametrize("script", ["rollout.py", "eval.py"])
@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_and_nothing_is_written(world, run, broken, tmp_path, script, case):
    assert set(CASES) == set(broken)
    changes, part = broken[case]
    argv = arguments(
        world,
        tmp_path / "new" / "t",
        **{name: value for name, value in changes.items() if name != "max_context"},
    )
    argv += [
        word
        for name in changes.keys() & {"max_context"}
        for word in ("--max-context", changes[name])
    ]
    assert_one_line(run(script, *argv), part)
    assert not (tmp_path / "new").exists()


def test_a_refused_resume_leaves_rollouts_and_record_as_they_were(world, run, tmp_path):
    """The record of the refused command had replaced that of the run which made the file."""
    assert run("rollout.py", *arguments(world, tmp_path / "t.jsonl"))[0] == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(before) == 2
    assert_one_line(
        run("rollout.py", *arguments(world, tmp_path / "t.jsonl", seed=1)),
        "made under other settings; give another output",
    )
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
