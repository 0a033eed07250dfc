import json
import subprocess
import sys

import pytest
from chat_samples import (
    DATA,
    HOSTILE,
    REAL_FILES,
    expected,
    needs_data,
    qwen,
    real,
    tiny_file,
    tiny_spec,
    turns_of,
)

from venus.cli import run_command
from venus.curation.formats import from_messages, load_rows, to_messages
from venus.data import COMMANDS
from venus.protocol import assistant_text, format_answer, format_tool_call
from venus.tokenizer import ChatTokenizer
from venus.trajectory import Trajectory, Turn

SEARCH = assistant_text("look", format_tool_call("search", {"query": ["a"]}))
FINAL = assistant_text("done", format_answer("x"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return ChatTokenizer(tiny_file(tmp_path_factory.mktemp("tiny"), tiny_spec()))


def row(*contents, **extra):
    """A row of question and alternating turns and observations."""
    roles = ["system", *("user", "assistant") * len(contents)]
    messages = [
        {"role": role, "content": text}
        for role, text in zip(roles, ("s", "q?", *contents), strict=False)
    ]
    return {"question": "q?", "gt": "x", "messages": messages, **extra}


def observed(body):
    return f"<tool_response>\n{body}\n</tool_response>"


def run(*args):
    return subprocess.run(
        [sys.executable, "-m", "venus.data", *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
    )


def read_table(text):
    """{file: [rows, turns, searches, visits, tokens, loss tokens, strict-valid]}
    of the printed table.
    """
    lines = [line.split() for line in text.splitlines()[1:]]
    return {name: [int(cell.replace(",", "")) for cell in cells] for name, *cells in lines}


@needs_data
@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_stats_prints_the_expected_figures_of_the_real_files(kind, capsys):
    run_command(
        COMMANDS,
        "",
        [
            "stats",
            str(DATA / "trajectories" / kind),
            "--tokenizer",
            str(DATA / "qwen3" / "tokenizer.json"),
        ],
    )
    printed = read_table(capsys.readouterr().out)
    want = {
        key.partition("/")[2]: value
        for key, value in expected().items()
        if key.startswith(f"{kind}/")
    }
    fields = ("turns", "search", "visit", "tokens", "loss_tokens", "strict_valid_turns")
    want = {
        name.replace("all", "total"): [10 if name == "all" else 1, *(value[f] for f in fields)]
        for name, value in want.items()
    }
    assert printed == want


def test_the_command_prints_a_line_per_file_and_a_total(tmp_path):
    tiny_file(tmp_path, tiny_spec())
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text(
        json.dumps(row(FINAL)) + "\n" + json.dumps(row(SEARCH, observed("b"), FINAL)) + "\n"
    )
    (tmp_path / "rows" / "b.json").write_text(json.dumps(row(SEARCH + "!", observed("b"), FINAL)))
    table = read_table(run("stats", tmp_path / "rows", "--tokenizer", tmp_path).stdout)
    counts = {name: [*cells[:4], cells[6]] for name, cells in table.items()}
    assert counts == {
        "a.jsonl": [2, 3, 1, 0, 3],
        "b.json": [1, 2, 0, 0, 1],
        "total": [3, 5, 1, 0, 4],
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["stats", "absent", "--tokenizer", "."],
            "error: absent: no such .json, .jsonl or .parquet file, nor a directory of them",
        ),
        (
            ["stats", "rows.jsonl", "--tokenizer", "absent"],
            "error: absent: cannot read the tokenizer",
        ),
        (
            ["stats", "rows.jsonl", "--tokenizer", "."],
            "error: rows.jsonl:2: 1 messages that end with system",
        ),
        (
            ["stats", "rows.jsonl", "--tokeniser", "."],
            "error: unknown argument --tokeniser; did you mean --tokenizer?",
        ),
        (
            ["stats", "rows.jsonl", "--tokenizer", ".", "--fast"],
            "error: unknown argument --fast; ",
        ),
        (["stats", "rows.jsonl"], "error: --tokenizer is required: "),
        (["stats", "--tokenizer", "."], "error: --path is required: "),
        (["questions", "--output", "q.jsonl"], "error: --paths is required: "),
        (["count"], "error: no command 'count'; choose one of stats, questions"),
        ([], "error: no command given; choose one of stats, questions"),
    ],
)
def test_bad_input_ends_in_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, args, message):
    tiny_file(tmp_path, tiny_spec())
    (tmp_path / "rows.jsonl").write_text(json.dumps(row(FINAL)) + "\n" + json.dumps(row()) + "\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_code:
        run_command(COMMANDS, "", args)
    printed = capsys.readouterr()
    assert (
        exit_code.value.code == 2
        and printed.err.startswith(message)
        and printed.err.count("\n") == 1
    )


def test_rows_are_read_from_a_file_or_a_directory_in_name_order(tmp_path):
    (tmp_path / "b.json").write_text(json.dumps(row(FINAL, gt="second")))
    (tmp_path / "a.jsonl").write_text(json.dumps(row(FINAL, gt="first", weight=2)) + "\n")
    (tmp_path / "c.json").write_text(
        json.dumps([row(FINAL, gt="third"), {"messages": row(FINAL)["messages"]}])
    )
    (tmp_path / "README.md").write_text("not data")
    rows = load_rows(tmp_path)
    assert [r["gt"] for r in rows] == ["first", "second", "third", None] and rows[0]["weight"] == 2
    assert rows[3]["question"] == "q?"  # the RL files name neither question nor gt
    assert load_rows(tmp_path / "b.json") == rows[1:2]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "r.jsonl",
            '{"question": "q", "messages": []}\n{"messages": [',
            "r.jsonl:2: not a JSON row",
        ),
        ("r.json", '{\n"messages": [\n', "r.json:3: not JSON"),
        ("r.json", '{"conversations": []}', "r.json:1: not an SFT row: no list 'messages'"),
        ("r.json", '[{"messages": []}]', r"r.json\[0\]: question must be a string"),
        (
            "r.jsonl",
            '{"question": "q", "messages": [], "gt": 3}',
            "r.jsonl:1: .* gt a string or a list",
        ),
        (
            "r.jsonl",
            '{"question": "q", "messages": [], "weight": -1}',
            "r.jsonl:1: weight must be a number >= 0, not -1",
        ),
        (
            "r.jsonl",
            '{"question": "q", "messages": [], "weight": NaN}',
            "r.jsonl:1: weight must be a number >= 0, not nan",
        ),
    ],
)
def test_a_bad_row_is_an_error_with_file_and_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_rows(tmp_path / name)


# conversions


@needs_data
@pytest.mark.parametrize("name", ["sft/0001", "rl/0001"])
def test_a_released_row_becomes_a_trajectory_and_comes_back_with_the_same_ids(name):
    (released,) = load_rows(DATA / "trajectories" / f"{name}.json")
    trajectory = from_messages(released, qwen())
    again = from_messages(to_messages(trajectory, qwen()), qwen())
    assert again.token_ids == trajectory.token_ids and again.turns == trajectory.turns
    assert (
        trajectory.num_sampled == expected()[f"{name}.json"]["loss_tokens"]
        and trajectory.run == "released"
    )
    # the newline that the template adds was never sampled
    assert trajectory.token_ids[-1] == qwen().im_end_id


@needs_data
def test_turns_of_the_real_files_carry_actions_and_time_outs():
    statuses, kinds, duplicates = [], [], 0
    for name in REAL_FILES:
        turns = from_messages({"question": "q", **real(name)}, qwen()).turns
        statuses += [turn.tool_status for turn in turns]
        kinds += [turn.action for turn in turns]
        duplicates += sum(turn.duplicate for turn in turns)
        assert len(turns) == len(turns_of(real(name)))
    assert (kinds.count("search"), kinds.count("visit"), kinds.count("malformed")) == (
        234 + 586,
        76 + 95,
        2,
    )
    assert (statuses.count("timeout"), statuses.count(None)) == (
        11,
        320 + 691 - 11,
    ) and duplicates == 2


def test_a_retry_after_a_time_out_is_no_duplicate(tiny):
    """Dedup that registers the failed call keeps the time-out and deletes the page."""
    contents = (
        SEARCH,
        observed("Tool execution timed out after 120 seconds."),
        SEARCH,
        observed("b"),
        SEARCH,
        observed("b"),
        FINAL,
    )
    assert [turn.duplicate for turn in from_messages(row(*contents), tiny).turns] == [
        False,
        False,
        True,
        False,
    ]


def test_messages_survive_the_round_trip(tiny):
    contents = (SEARCH, observed(HOSTILE + "\n"), SEARCH, observed(" ]"), FINAL)
    assert to_messages(from_messages(row(*contents), tiny), tiny) == row(*contents)


def test_sampled_ids_that_encode_otherwise_still_give_their_text(tiny):
    """`search` is one token; a policy may sample it letter by letter."""
    trajectory = from_messages(row(FINAL.replace("done", "search")), tiny)
    start, word = trajectory.prompt_len, tiny.encode("search")
    assert trajectory.token_ids[start : start + len(word)] == word
    letters = [i for letter in "search" for i in tiny.encode(letter)]
    ids = trajectory.token_ids[:start] + letters + trajectory.token_ids[start + len(word) :]
    turns = [Turn(start, len(ids), len(ids), "answer", None, None)]
    resampled = Trajectory(**{**vars(trajectory), "token_ids": ids, "turns": turns})
    assert len(letters) > len(word) and to_messages(resampled, tiny) == to_messages(
        trajectory, tiny
    )


def test_a_row_without_an_answer_has_no_prediction(tiny):
    trajectory = from_messages(row(SEARCH, gt=["x", "y"]), tiny)
    assert (trajectory.prediction, trajectory.stop_reason, trajectory.ground_truth) == (
        None,
        "no_answer",
        ("x", "y"),
    )
