"""`python -m venus.data questions`: question sets of three forms become ours. `rows`: where they
and all other rows are read from.
"""

import json
from pathlib import Path

import pytest

from venus.cli import run_command
from venus.data import COMMANDS
from venus.files import aliases_of, count_lines, decode, raw_rows, row_files, rows_of
from venus.trajectory import read_questions

REDSEARCHER = {"problem": "Who?", "answer": "Bo", "difficulty": "easy"}
RELEASED = {
    "data_source": "2wiki",
    "prompt": [{"role": "user", "content": "Where?"}],
    "ability": "qa",
    "reward_model": {"ground_truth": "Rome<|answer_split|>Roma", "style": "rule"},
    "extra_info": {"index": 3, "split": "test"},
}
OURS = {
    "id": "a",
    "question": "When?",
    "ground_truth": ["1", "one"],
    "corpus": "pages/c.jsonl",
    "meta": {"hops": 2},
}


def convert(tmp_path, *rows, suffix=".jsonl"):
    source = tmp_path / f"in{suffix}"
    source.write_text(
        "".join(json.dumps(row) + "\n" for row in rows) if suffix == ".jsonl" else json.dumps(rows)
    )
    run_command(COMMANDS, "", ["questions", str(source), "--output", str(tmp_path / "out.jsonl")])
    return read_questions(tmp_path / "out.jsonl")


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_all_three_forms_become_ours_in_order(tmp_path, suffix):
    first, second, third = convert(tmp_path, REDSEARCHER, RELEASED, OURS, suffix=suffix)
    assert (first.id, first.question, first.ground_truth, first.meta) == (
        "in-00000",
        "Who?",
        ("Bo",),
        {"difficulty": "easy"},
    )
    assert (second.id, second.question, second.ground_truth) == (
        "in-00001",
        "Where?",
        ("Rome", "Roma"),
    )
    assert second.meta == {key: RELEASED[key] for key in ("data_source", "ability", "extra_info")}
    assert (third.id, third.question, third.ground_truth, third.meta) == (
        "a",
        "When?",
        ("1", "one"),
        {"hops": 2},
    )


def test_the_released_parquet_is_read(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow (extra `parquet`)")
    import pyarrow

    rows = [RELEASED, {**RELEASED, "reward_model": {"ground_truth": "Oslo", "style": "rule"}}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test.parquet")
    run_command(
        COMMANDS,
        "",
        ["questions", str(tmp_path / "test.parquet"), "--output", str(tmp_path / "out.jsonl")],
    )
    assert [q.ground_truth for q in read_questions(tmp_path / "out.jsonl")] == [
        ("Rome", "Roma"),
        ("Oslo",),
    ]


def test_a_corpus_path_stays_that_of_the_same_file(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "q.jsonl").write_text(json.dumps(OURS) + "\n")
    run_command(
        COMMANDS, "", ["questions", str(tmp_path / "in"), "--output", str(tmp_path / "out.jsonl")]
    )
    assert (
        Path(read_questions(tmp_path / "out.jsonl")[0].corpus)
        == tmp_path / "in" / "pages" / "c.jsonl"
    )


def test_what_was_written_converts_to_itself(tmp_path):
    convert(tmp_path, REDSEARCHER, RELEASED, OURS)
    run_command(
        COMMANDS,
        "",
        ["questions", str(tmp_path / "out.jsonl"), "--output", str(tmp_path / "again.jsonl")],
    )
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("answer", "aliases"),
    [
        ("Bo", ["Bo"]),
        ("Bo<|answer_split|> Bo A. <|answer_split|>", ["Bo", "Bo A."]),
        (["Bo", "Al<|answer_split|>X"], ["Bo", "Al", "X"]),
        (" ", []),
        ([], []),
        (["Bo", 5], []),
        (5, []),
        (None, []),
    ],
)
def test_accepted_answers_are_split_and_stripped(answer, aliases):
    assert aliases_of(answer) == aliases


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "Who?"}, "in.jsonl:1: field 'ground_truth' must be a string or a list"),
        ({"problem": "Who?", "answer": 5}, "in.jsonl:1: field 'ground_truth' must be"),
        ({"answer": "Bo"}, "in.jsonl:1: field 'question' cannot be 'None'"),
        ({**RELEASED, "prompt": None}, "in.jsonl:1: field 'question' cannot be 'None'"),
        ({**RELEASED, "reward_model": None}, "in.jsonl:1: field 'ground_truth' must be"),
        (
            {"question": "Who?", "ground_truth": ["Bo"], "hops": 2},
            "in.jsonl:1: unknown field 'hops'",
        ),
        ([], "in.jsonl:1: a row must be a JSON object"),
    ],
)
def test_a_bad_question_is_one_line_with_its_place_and_nothing_is_written(
    tmp_path, capsys, row, message
):
    with pytest.raises(SystemExit) as exit_code:
        convert(tmp_path, row)
    printed = capsys.readouterr().err
    assert exit_code.value.code == 2 and message in printed and printed.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_ids_that_meet_and_empty_files_are_errors(tmp_path, capsys):
    for rows, message in (
        ((OURS, OURS), "in.jsonl:2: id 'a' occurs twice"),
        ((), "no questions in the input"),
    ):
        with pytest.raises(SystemExit):
            convert(tmp_path, *rows)
        assert message in capsys.readouterr().err


# Rows in files


def test_files_are_listed_by_name_and_other_files_are_none_of_ours(tmp_path):
    for name in ("b.json", "a.jsonl", "c.parquet", "d.txt"):
        (tmp_path / name).write_text("")
    assert [file.name for file in row_files(tmp_path)] == ["a.jsonl", "b.json", "c.parquet"]
    with pytest.raises(ValueError, match="d.txt: no such .json, .jsonl or .parquet file"):
        row_files(tmp_path / "d.txt")


def test_raw_rows_hands_out_what_rows_of_would_stop_at(tmp_path):
    (tmp_path / "r.jsonl").write_bytes(b'{"a": 1}\n\n{broken\n[1]')
    (tmp_path / "one.json").write_bytes(b' {"a": 1,\n]')
    (tmp_path / "list.json").write_bytes(b' [{"a": 1}, 2]')
    rows = [
        (where.rpartition("/")[2], row)
        for file in row_files(tmp_path)
        for where, row in raw_rows(file)
    ]
    assert rows == [
        ("list.json[0]", {"a": 1}),
        ("list.json[1]", 2),
        ("one.json:1", b' {"a": 1,\n]'),
        ("r.jsonl:1", b'{"a": 1}\n'),
        ("r.jsonl:3", b"{broken\n"),
        ("r.jsonl:4", b"[1]"),
    ]
    with pytest.raises(ValueError, match=r"one.json:2: not JSON"):
        list(rows_of(tmp_path / "one.json"))
    with pytest.raises(ValueError, match="x:1: not JSON"):
        decode(b"\xff", "x")
    assert [count_lines(file) for file in row_files(tmp_path)] == [1, 1, 3]


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ValueError, match="pip install 'venus.parquet.'"):
        list(rows_of(tmp_path / "x.parquet"))
