import json

import pytest
from chat_samples import needs_data, qwen

from venus.files import append_jsonl, read_jsonl, repair_tail, write_jsonl
from venus.trajectory import Outcome, Question, Trajectory, Turn, read_questions, read_trajectories


def make(**changes) -> Trajectory:
    """Prompt of 3, search [3, 5) with observation [5, 8), answer [8, 10)."""
    turns = [
        Turn(3, 5, 8, "search", "ok", {"query": ["a"]}, info_gain=0.0),
        Turn(8, 10, 10, "answer", None, None),
    ]
    values = dict(
        run="r",
        question_id="q",
        sample=1,
        seed=7,
        question="Q?",
        ground_truth=("a", "b"),
        prompt_len=3,
        token_ids=list(range(10)),
        log_probs=[-0.5, -1.0, -0.25, 0.0],
        turns=turns,
        prediction="a",
        outcome=Outcome(1.0, "ok"),
        stop_reason="answered",
        seconds={"model": 0.5, "tool": 0.0},
        manifest={"v": 1},
    )
    return Trajectory(**{**values, **changes})


def question(**changes) -> dict:
    return {"id": "q", "question": "Q?", "ground_truth": ["a"], **changes}


def test_the_mask_is_one_on_sampled_tokens_only():
    assert make().sampled_mask() == [0, 0, 0, 1, 1, 0, 0, 0, 1, 1]


def test_a_trajectory_survives_jsonl_unchanged_and_a_gain_of_zero_stays_zero(tmp_path):
    write_jsonl(tmp_path / "t.jsonl", [make().to_json()])
    (read,) = read_trajectories(tmp_path / "t.jsonl")
    assert read == make()
    assert [turn.info_gain for turn in read.turns] == [0.0, None]


@needs_data
def test_sampled_ids_are_never_decoded_and_encoded_again(tmp_path):
    """trl 5224, verl 6719: a policy that samples hel + lo was trained on the one token hello, whose
    log-prob nobody had recorded.
    """
    assert qwen().decode([49122, 385]) == "hello" and qwen().encode("hello") == [14990]
    ids = [151644, 49122, 385, 151645]
    sampled = make(
        prompt_len=1, token_ids=ids, log_probs=[], turns=[Turn(1, 4, 4, "answer", None, None)]
    )
    write_jsonl(tmp_path / "t.jsonl", [sampled.to_json()])
    (read,) = read_trajectories(tmp_path / "t.jsonl")
    assert read.token_ids == ids and read.sampled_mask() == [0, 1, 1, 1]


@needs_data
def test_a_turn_that_ends_inside_a_token_of_the_stop_string_keeps_that_token(tmp_path):
    """Engines cut a stop string out of the text; re-encoding what is left gives another last id
    (`>` for `>` + newline).
    """
    sampled = qwen().encode("<answer>x</answer>\n")
    assert qwen().encode("<answer>x</answer>")[-1] != sampled[-1]
    turns = [Turn(1, 1 + len(sampled), 1 + len(sampled), "answer", None, None)]
    write_jsonl(
        tmp_path / "t.jsonl",
        [make(prompt_len=1, token_ids=[0, *sampled], log_probs=[], turns=turns).to_json()],
    )
    assert read_trajectories(tmp_path / "t.jsonl")[0].token_ids[1:] == sampled


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_len": 2}, "a span ends at token 2"),
        ({"token_ids": list(range(11))}, "the end is at 11"),
        ({"log_probs": [-1.0]}, "1 log_probs for 4 sampled tokens"),
        ({"log_probs": [float("nan")] * 4}, "is nan"),
        ({"stop_reason": "tired"}, "stop_reason 'tired'"),
        (
            {"turns": [], "token_ids": [0, 1, 2], "log_probs": []},
            "no turns, but stop_reason is answered",
        ),
    ],
)
def test_a_broken_trajectory_cannot_be_made(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_a_gap_between_turns_cannot_be_made():
    with pytest.raises(ValueError, match="q/1.* a span ends at token 8, the next of 2 turns"):
        make(turns=[Turn(3, 5, 8, "search", "ok", {}), Turn(9, 10, 10, "answer", None, None)])


def test_a_failed_model_may_leave_no_turn():
    assert (
        make(turns=[], token_ids=[0, 1, 2], log_probs=[], stop_reason="model_error").num_sampled
        == 0
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((5, 5, 8, "search", None, None), "start < end"),
        ((3, 5, 4, "search", None, None), "end <= obs_end"),
        ((3, 5, 8, "python", None, None), "action 'python'"),
        ((3, 5, 8, "search", "late", None), "tool_status 'late'"),
        ((3, 5, 8, "malformed", None, None), "malformed means exactly"),
    ],
)
def test_a_broken_turn_cannot_be_made(args, message):
    with pytest.raises(ValueError, match=message):
        Turn(*args)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "schema 2"),
        ({"token_ids": ["1"]}, "'token_ids' must be a list of int"),
        ({"sample": True}, "'sample' cannot be 'True'"),
        ({"outcome": {"value": 1.0}}, "field 'status' is missing"),
        ({"reward": 1.0}, "unknown field 'reward'"),
    ],
)
def test_a_bad_trajectory_row_is_an_error_with_file_and_line(tmp_path, changes, message):
    write_jsonl(tmp_path / "t.jsonl", [make().to_json(), {**make().to_json(), **changes}])
    with pytest.raises(ValueError, match=f"t.jsonl:2: .*{message}"):
        read_trajectories(tmp_path / "t.jsonl")


def test_a_corpus_path_is_relative_to_its_question_file(tmp_path):
    (tmp_path / "questions").mkdir()
    write_jsonl(
        tmp_path / "questions" / "q.jsonl",
        [question(corpus="../corpora/c.jsonl", ground_truth="a")],
    )
    (read,) = read_questions(tmp_path / "questions" / "q.jsonl")
    assert read == Question("q", "Q?", ("a",), str(tmp_path / "corpora" / "c.jsonl"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no questions"),
        ([question(), question()], "q.jsonl:2: id 'q' occurs twice"),
        ([question(), question(id="r", ground_truth=[])], "q.jsonl:2: field 'ground_truth'"),
        ([question(ground_truth=[" "])], "q.jsonl:1: field 'ground_truth'"),
        ([question(answer="a")], "q.jsonl:1: unknown field 'answer'"),
        ([question(id=3)], "q.jsonl:1: field 'id' cannot be '3'"),
        ([{"id": "q", "ground_truth": "a"}], "q.jsonl:1: field 'question' is missing"),
        ([question(question=" ")], "q.jsonl:1: .*must not be empty"),
    ],
)
def test_a_bad_question_file_is_an_error_with_file_and_line(tmp_path, rows, message):
    write_jsonl(tmp_path / "q.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        read_questions(tmp_path / "q.jsonl")


def test_a_missing_file_is_a_one_line_error(tmp_path):
    with pytest.raises(ValueError, match="absent.jsonl: no such file"):
        read_questions(tmp_path / "absent.jsonl")


def test_a_malformed_row_is_an_error_with_file_and_line(tmp_path):
    (tmp_path / "r.jsonl").write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(ValueError, match="r.jsonl:2: not a JSON row"):
        list(read_jsonl(tmp_path / "r.jsonl", torn_tail=True))


@pytest.mark.parametrize(
    "tail",
    [b'{"n": 2, "te', b'{"n": 2}', b'{"n": "\xc3', b'{"n": 2, \n', b"\x00\x00\x00", b"[2]\n"],
)
def test_a_torn_last_row_is_skipped_cut_off_and_written_again(tmp_path, tail):
    """After a crash the last line is a prefix of a row. Read as a row it stops the resume; appended
    to, it swallows the next row.
    """
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"n": 0}\n{"n": 1}\n' + tail)
    assert [row["n"] for _, row in read_jsonl(path, torn_tail=True)] == [0, 1]
    repair_tail(path)
    with open(path, "a", encoding="utf-8") as handle:
        append_jsonl(handle, {"n": 2})
    assert [row["n"] for _, row in read_jsonl(path)] == [0, 1, 2]


def test_a_sound_file_is_left_alone_by_the_repair(tmp_path):
    path = tmp_path / "r.jsonl"
    for content in (b"", b'{"n": 0}\n', b'{"n": 0}\n\n'):
        path.write_bytes(content)
        repair_tail(path)
        assert path.read_bytes() == content
    repair_tail(tmp_path / "absent.jsonl")
    assert not (tmp_path / "absent.jsonl").exists()


def test_a_file_without_final_newline_is_read_whole_unless_it_may_be_torn(tmp_path):
    (tmp_path / "r.jsonl").write_text('{"n": 0}\n{"n": 1}')
    assert [row["n"] for _, row in read_jsonl(tmp_path / "r.jsonl")] == [0, 1]


def test_a_row_stays_one_line_whatever_its_text_holds(tmp_path):
    """str.splitlines breaks at U+2028 and a lone surrogate cannot be written as UTF-8:
    both occur in web text.
    """
    rows = [{"text": "a\u2028b\x85c\r\n"}, {"text": "half \ud83d"}, {"text": "中文"}]
    write_jsonl(tmp_path / "r.jsonl", rows)
    assert [row for _, row in read_jsonl(tmp_path / "r.jsonl")] == rows
    assert "中文" in (tmp_path / "r.jsonl").read_text(encoding="utf-8")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    write_jsonl(tmp_path / "r.jsonl", [{"n": 0}])
    with pytest.raises(ValueError, match="JSON compliant"):
        write_jsonl(tmp_path / "r.jsonl", [{"n": 1}, {"n": float("inf")}])
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]
    assert json.loads((tmp_path / "r.jsonl").read_text()) == {"n": 0}
