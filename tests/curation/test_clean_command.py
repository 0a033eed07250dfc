"""`python -m venus.clean` as a user runs it: files in, files out, counts, workers, interruptions,
the judge, and bad input.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from chat_samples import DATA, needs_data, tiny_file, tiny_spec
from clean_samples import (
    FOUND,
    HIT,
    PYTHON,
    QUESTION,
    SEARCH,
    call,
    conversation,
    final,
    observed,
    raw,
)
from stub_server import completion, serve

from venus.curation.formats import load_rows

ROOT = Path(__file__).resolve().parents[2]
OUTPUTS = ("train.jsonl", "validation.jsonl", "removed.jsonl", "judge_errors.jsonl")


def command(*arguments):
    return [sys.executable, "-m", "venus.clean", *map(str, arguments)]


def run(*arguments, code=0, **environment):
    done = subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


def refusal(*arguments, code=2, **environment):
    """The one line that a run ends in: bad input, or, with code 1, a service that failed."""
    done = run(*arguments, code=code, **environment)
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: "), done.stderr
    return done.stderr


def clean(tmp_path, *arguments, name="out", workers=1, **environment):
    """Run on tmp_path/in.jsonl (or the --input given) and return the output
    directory and its stats.
    """
    given = [] if "--input" in arguments else ["--input", tmp_path / "in.jsonl"]
    run(*given, "--output", tmp_path / name, "--workers", workers, *arguments, **environment)
    return tmp_path / name, json.loads((tmp_path / name / "stats.json").read_text())


def write_rows(path, rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )


def contents(out):
    return {name: (out / name).read_bytes() for name in OUTPUTS}


def many(count, seed=0):
    """Rows of all kinds, each with a question of its own."""
    rng, rows = random.Random(seed), []
    for number in range(count):
        turns = [
            text
            for k in range(rng.choice((1, 2, 60, 120)) if number % 50 == 0 else 2)
            for text in (call(query=[f"q{k}"]), FOUND)
        ]
        kind = rng.randrange(8)
        turns += (
            [PYTHON, observed("1")]
            if kind == 0
            else [call(query=["q0"]), FOUND]
            if kind == 1
            else ["bad", observed("x")]
            if kind == 2
            else []
        )
        messages = [
            {"role": "user", "content": f"q{number}"},
            *conversation(*turns, final("Al" if kind == 3 else "Bo"))[1:],
        ]
        rows.append(
            "{" if kind == 4 else {"question": f"q{number}", "gt": "Bo", "messages": messages}
        )
    return rows


# Input


def test_every_form_of_input_is_read(tmp_path):
    """Files and directories, JSON, JSON lists and JSONL in one run; blank lines are no rows."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "1.json").write_text(json.dumps(raw(final("1"))))
    (tmp_path / "d" / "2.json").write_text(
        json.dumps(
            [
                raw(final("2")),
                {"question": QUESTION, "gt": "Bo", "messages": conversation(final("3"))},
            ]
        )
    )
    (tmp_path / "d" / "3.jsonl").write_text(
        f"{json.dumps(raw(final('4')))}\n\n{json.dumps(raw(final('5')))}"
    )
    (tmp_path / "d" / "README.md").write_text("no rows")
    write_rows(tmp_path / "more.jsonl", [{"messages": conversation(final("6"))}])
    out, stats = clean(
        tmp_path,
        "--input",
        tmp_path / "d",
        tmp_path / "more.jsonl",
        "--judge",
        "none",
        "--validation",
        0,
    )
    assert [row["messages"][2]["content"] for row in load_rows(out / "train.jsonl")] == [
        final(str(k)) for k in range(1, 7)
    ]
    assert stats["rows"]["read"] == 6 and sorted(path.name for path in out.iterdir()) == sorted(
        [*OUTPUTS, "stats.json", "run.json"]
    )


def test_parquet_shards_are_read(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow (extra `parquet`)")
    import pyarrow

    for shard in (0, 1):
        rows = [raw(final(f"{shard}{k}"), system_prompt="5 tools") for k in range(70)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"train-{shard}.parquet")
    out, stats = clean(tmp_path, "--input", tmp_path, "--judge", "none", "--validation", 0)
    assert stats["rows"]["correct"] == 140
    assert [row["messages"][2]["content"] for row in load_rows(out / "train.jsonl")][68:72] == [
        final("068"),
        final("069"),
        final("10"),
        final("11"),
    ]


# Counts


def test_stats_account_for_every_row_and_turn_with_its_reason(tmp_path):
    rows = [
        "{",
        "[]",
        raw(SEARCH),
        raw(SEARCH, FOUND, final("Al")),
        raw(PYTHON, observed("1"), SEARCH, FOUND, SEARCH, FOUND, final()),
        raw(
            "bad",
            observed("x"),
            SEARCH.replace('["a"]', '"a"'),
            FOUND,
            ("user", FOUND),
            ("assistant", final()),
        ),
        {"messages": conversation(final())},
    ]
    write_rows(tmp_path / "in.jsonl", rows)
    out, stats = clean(tmp_path, "--validation", 0)
    assert stats["rows"] == {"read": 7, "aligned": 4, "pruned": 4, "fitting": 3, "correct": 2}
    assert stats["turns"] == {
        "read": 1 + 2 + 4 + 3 + 1,
        "aligned": 2 + 4 + 2 + 1,
        "pruned": 2 + 2 + 2 + 1,
        "fitting": 6,
        "correct": 4,
    }
    assert stats["dropped_rows"] == {
        "not_json": 1,
        "no_messages": 1,
        "no_final_answer": 1,
        "no_ground_truth": 1,
        "incorrect": 1,
    }
    assert stats["dropped_turns"] == {
        "disallowed_tool": 1,
        "duplicate": 1,
        "think_tags": 1,
    } and stats["dropped_observations"] == {"orphan_observation": 1}
    assert (
        stats["pruned_calls"] == {"PythonInterpreter": 1}
        and stats["duplicates"] == {"search": 1}
        and stats["repairs"] == {"call": 1}
    )
    assert stats["turn_buckets"] == {
        when: {"1-50": 2, "51-100": 0, ">100": 0} for when in ("before", "after")
    }
    assert stats["judge"] == {"name": "match"} and stats["tokens"] is None and stats["seconds"] > 0
    removed = [json.loads(line) for line in (out / "removed.jsonl").read_text().splitlines()]
    assert Counter(gone["lost"] for gone in removed) == {"row": 5, "turn": 3, "observation": 1}
    lost = {
        gone["row"].rpartition(":")[2]: gone["turn"] for gone in removed if gone["lost"] == "row"
    }
    assert lost == {"1": None, "2": None, "3": 0, "4": None, "7": None}
    record = json.loads((out / "run.json").read_text())
    assert (
        record["judge"] == {"name": "match"}
        and record["rows"] == stats["rows"]
        and record["config"]["judge"] == "match"
    )


def test_the_table_says_what_the_stats_say(tmp_path):
    write_rows(tmp_path / "in.jsonl", many(30))
    tiny_file(tmp_path, tiny_spec())
    printed = run(
        "--input",
        tmp_path / "in.jsonl",
        "--output",
        tmp_path / "out",
        "--tokenizer",
        tmp_path,
        "--workers",
        1,
    ).stdout
    stats = json.loads((tmp_path / "out" / "stats.json").read_text())
    for step in ("read", "aligned", "pruned", "fitting", "correct"):
        assert f"{step:12}{stats['rows'][step]:12,}{stats['turns'][step]:12,}" in printed
    assert (
        f"not_json {stats['dropped_rows']['not_json']}" in printed
        and f"{stats['tokens']['all']:,} tokens" in printed
    )


def test_the_buckets_of_the_paper_are_counted_before_and_after(tmp_path):
    turns = {
        n: [text for k in range(n - 1) for text in (call(query=[f"q{k}"]), FOUND)]
        for n in (50, 51, 100, 101)
    }
    write_rows(tmp_path / "in.jsonl", [raw(*turns[n], final()) for n in (50, 51, 100, 101)])
    _, stats = clean(tmp_path, "--validation", 0)
    assert stats["turn_buckets"] == {
        "before": {"1-50": 1, "51-100": 2, ">100": 1},
        "after": {"1-50": 1, "51-100": 4, ">100": 5},
    }
    assert stats["train"] == {"rows": 4, "instances": 10}


def test_materialised_copies_stand_far_apart_in_the_file_and_are_as_many_as_the_weights_say(
    tmp_path,
):
    write_rows(tmp_path / "in.jsonl", many(200))
    weighted, _ = clean(tmp_path, name="weighted")
    written, stats = clean(tmp_path, "--materialise", name="written")
    weights = {row["question"]: row["weight"] for row in load_rows(weighted / "train.jsonl")}
    rows = load_rows(written / "train.jsonl")
    assert Counter(row["question"] for row in rows) == weights and len(rows) == stats["train"][
        "instances"
    ] > len(weights)
    # pass by pass: never next to each other
    assert [row["copy"] for row in rows] == sorted(row["copy"] for row in rows)
    again, _ = clean(tmp_path, "--input", written / "train.jsonl", name="again")
    assert (again / "train.jsonl").read_bytes() == (written / "train.jsonl").read_bytes()


# The same whatever way it is run


def test_cleaning_a_clean_file_changes_nothing(tmp_path):
    write_rows(tmp_path / "in.jsonl", many(120))
    first, _ = clean(tmp_path, name="first")
    second, stats = clean(tmp_path, "--input", first / "train.jsonl", name="second")
    assert (first / "train.jsonl").read_bytes() == (second / "train.jsonl").read_bytes() and (
        second / "removed.jsonl"
    ).read_bytes() == b""
    assert stats["rows"]["read"] == stats["rows"]["correct"] > 60


def test_the_number_of_workers_changes_no_byte(tmp_path):
    write_rows(tmp_path / "in.jsonl", many(100))
    assert contents(clean(tmp_path, name="one")[0]) == contents(
        clean(tmp_path, name="three", workers=3)[0]
    )


def start(*arguments):
    return subprocess.Popen(
        command(*arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_progress(process, partial, seconds=60):
    """Wait until a run has saved its first rows."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if (partial / "state.json").exists() and json.loads((partial / "state.json").read_text())[
            "done"
        ]:
            return
        time.sleep(0.01)


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_with_the_bytes_of_an_undisturbed_one(tmp_path):
    """Whatever was written after the last save is cut off and done again."""
    write_rows(tmp_path / "in.jsonl", many(20_000))
    arguments = ("--input", tmp_path / "in.jsonl", "--output", tmp_path / "killed", "--workers", 1)
    rng, kills = random.Random(0), 0
    for _ in range(3):
        process = start(*arguments)
        wait_for_progress(process, tmp_path / "killed.partial")
        time.sleep(rng.random())
        kills += process.poll() is None
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
    if not (tmp_path / "killed").exists():
        run(*arguments)
    whole, stats = clean(tmp_path, name="whole")
    assert (
        kills
        and contents(tmp_path / "killed") == contents(whole)
        and stats["rows"]["read"] == 20_000
    )
    again = json.loads((tmp_path / "killed" / "stats.json").read_text())
    assert {**again, "seconds": 0} == {**stats, "seconds": 0} and not (
        tmp_path / "killed.partial"
    ).exists()


@pytest.mark.slow
def test_ctrl_c_ends_in_one_line_and_the_same_command_goes_on(tmp_path):
    write_rows(tmp_path / "in.jsonl", many(20_000))
    arguments = ("--input", tmp_path / "in.jsonl", "--output", tmp_path / "out", "--workers", 2)
    process = start(*arguments)
    wait_for_progress(process, tmp_path / "out.partial")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (
        process.returncode == 130
        and errors.splitlines()[-1] == "interrupted; run the same command to resume"
        and "Traceback" not in errors
    )
    done = json.loads((tmp_path / "out.partial" / "state.json").read_text())["done"]
    assert 0 < done < 20_000 and not (tmp_path / "out").exists()
    run(*arguments)
    assert json.loads((tmp_path / "out" / "stats.json").read_text())["rows"]["read"] == 20_000


def test_an_interrupted_run_is_not_continued_with_other_settings_or_input(tmp_path):
    write_rows(tmp_path / "in.jsonl", many(50))
    with serve(lambda *_: (401, "no", {})) as stub:
        judge = ("--judge", f"openai:{stub.url}:m")
        assert "refuses: HTTP 401 no" in refusal(
            "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out", *judge, code=1
        )
        partial = tmp_path / "out.partial"
        (partial / "state.json").write_text(
            json.dumps(
                {"settings": {"judge": "match"}, "done": 0, "counts": {}, "seconds": 0, "sizes": {}}
            )
        )
        assert "holds an unfinished run with other settings (judge)" in refusal(
            "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out", *judge
        )


def peak_memory(path, output):
    """Peak bytes of a run, from a process of its own since the largest child counts."""
    words = command("--input", path, "--output", output, "--workers", 1)
    code = (
        f"import resource, subprocess, sys\nsubprocess.run({words!r}, check=True, "
        "capture_output=True)\n"
    )
    code += (
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "
        "'darwin' else 1024))"
    )
    return int(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout
    )


def test_memory_does_not_grow_with_the_rows(tmp_path):
    """30 MB more input, less than 8 MB more memory: 10 % of a copy of the rows would be seen."""
    text = observed(HIT.replace('"s"', json.dumps("x" * 20_000)))
    for count in (50, 1500):
        write_rows(tmp_path / f"{count}.jsonl", [raw(SEARCH, text, final())] * count)
    small, large = (
        peak_memory(tmp_path / f"{count}.jsonl", tmp_path / f"out{count}") for count in (50, 1500)
    )
    assert large - small < 8 << 20


@needs_data
def test_the_real_files_run_through_the_command(tmp_path):
    trajectories = DATA / "trajectories"
    _, sft = clean(tmp_path, "--input", trajectories / "sft", "--judge", "none", name="sft")
    _, rl = clean(tmp_path, "--input", trajectories / "rl", "--judge", "none", name="rl")
    assert (
        sft["rows"]["read"],
        sft["rows"]["correct"],
        sft["turns"]["correct"],
        sft["repairs"],
        sft["duplicates"],
    ) == (10, 10, 320, {"answer": 2}, {})
    assert (
        rl["rows"]["correct"],
        rl["turns"]["read"],
        rl["turns"]["correct"],
        rl["duplicates"],
    ) == (10, 691, 680, {"search": 3, "visit": 8})
    assert rl["turn_buckets"] == {
        "before": {"1-50": 1, "51-100": 8, ">100": 1},
        "after": {"1-50": 1, "51-100": 16, ">100": 5},
    }


# The judge

KEY = "sk-very-secret"


def test_a_model_judges_and_its_errors_lie_apart(tmp_path):
    def reply(body, number):
        prompt = body["messages"][0]["content"]
        if "q9\n" in prompt:
            return 200, completion("I cannot say."), {}
        return 200, completion(f"correct: {'yes' if 'Response: Bo' in prompt else 'no'}"), {}

    answers = ["Al" if k % 3 == 0 else "Bo or so" for k in range(30)]
    talks = [
        [{"role": "user", "content": f"q{k}"}, *conversation(final(answer))[1:]]
        for k, answer in enumerate(answers)
    ]
    rows = [{"question": f"q{k}", "gt": "Bo", "messages": talk} for k, talk in enumerate(talks)]
    write_rows(tmp_path / "in.jsonl", rows)
    with serve(reply) as stub:
        judge = ("--judge", f"openai:{stub.url}:m", "--validation", 0)
        out, stats = clean(tmp_path, *judge, OPENAI_API_KEY=KEY)
        asked = len(stub.requests)
        again, _ = clean(
            tmp_path,
            *judge,
            "--verdicts",
            tmp_path / "out.verdicts.jsonl",
            name="again",
            JUDGE_API_KEY=KEY,
            OPENAI_API_KEY="of another service",
        )
    assert all(request["headers"]["Authorization"] == f"Bearer {KEY}" for request in stub.requests)
    # all but the error, asked twice, came from the cache
    assert asked == 31 and len(stub.requests) == asked + 2 and contents(again) == contents(out)
    assert stats["rows"]["correct"] == 20 and stats["dropped_rows"] == {
        "incorrect": 9,
        "judge_error": 1,
    }
    assert [row["question"] for row in load_rows(out / "judge_errors.jsonl")] == ["q9"]
    assert (
        stats["judge"]["model"] == "m"
        and stats["judge"]["base_url"] == stub.url
        and stats["judge"]["prompt_hash"]
    )
    assert json.loads((out / "run.json").read_text())["judge"] == stats["judge"]
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY.encode() not in written and b"no line `correct: yes`" in written


# Bad input


def test_bad_input_is_one_line_and_leaves_nothing_behind(tmp_path):
    write_rows(tmp_path / "in.jsonl", many(5))
    (tmp_path / "list.json").write_text("[{")
    (tmp_path / "bad.parquet").write_text("x")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    (tmp_path / "empty").mkdir()
    given = ("--input", tmp_path / "in.jsonl", "--output", tmp_path / "out")
    assert "absent: no such .json, .jsonl or .parquet file" in refusal(
        "--input", tmp_path / "absent", "--output", tmp_path / "out"
    )
    assert "empty: no such .json, .jsonl or .parquet file" in refusal(
        "--input", tmp_path / "empty", "--output", tmp_path / "out"
    )
    assert "list.json:1: not JSON" in refusal(
        "--input", tmp_path / "list.json", "--output", tmp_path / "out", "--workers", 1
    )
    assert "bad.parquet: " in refusal(
        "--input", tmp_path / "bad.parquet", "--output", tmp_path / "out2", "--workers", 1
    )
    assert "taken is not empty" in refusal(
        "--input", tmp_path / "in.jsonl", "--output", tmp_path / "taken"
    )
    assert "cannot read the tokenizer" in refusal(*given, "--tokenizer", tmp_path / "absent")
    assert "give match, em, gaia, none or openai" in refusal(*given, "--judge", "gpt")
    assert "must rise" in refusal(*given, "--copies", 1, 2)
    assert "--input is required" in refusal("--output", tmp_path / "out")
    assert "--validation 1.0: must be at least 0 and below 1" in refusal(*given, "--validation", 1)
    assert "give a file or a directory" in refusal(*given, "--input")
    assert "unknown argument --jugde" in refusal(*given, "--jugde", "none")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out2").exists()
    run(*given, "--workers", 1)
    assert "out is not empty" in refusal(*given)
