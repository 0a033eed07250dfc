"""Verdicts: the offline matcher, the reading of a judge's reply, and the model judge with its cache."""

import json

import pytest
from stub_server import completion, serve

from venus.chat_api import ChatClient, ChatRefusedError
from venus.judge import Case, ModelJudge, match, parse_judge, read_verdict


def case(prediction, *aliases, question="Who?"):
    return Case(question, aliases or ("Bo",), prediction)


@pytest.mark.parametrize(
    ("prediction", "aliases", "verdict"),
    [
        ("Bo", ("Bo",), "correct"),
        ("**the BO!**", ("Bo",), "correct"),
        ("It was Bo, I think", ("Bo",), "correct"),
        ("The Boat", ("Bo",), "incorrect"),
        ("Al", ("Bo", "Al"), "correct"),
        ("Paul Beneke (1440-1480)", ("Paul  Beneke",), "correct"),
        ("Paul X. Beneke", ("Paul Beneke",), "incorrect"),
        ("“Doubtful Victory”.", ("Doubtful Victory",), "correct"),
        ("Season\u202fEight of early\u201109", ("early-09",), "correct"),
        ("答案是北京。", ("北京",), "correct"),
        ("?", ("!",), "incorrect"),
        ("anything", ("the",), "incorrect"),
    ],
)
def test_the_matcher_wants_an_alias_whole_or_contained_as_words(prediction, aliases, verdict):
    assert [v.verdict for v in match([case(prediction, *aliases)])] == [verdict]


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("extracted: Bo\nreasoning: same\ncorrect: yes", "correct"),
        ("correct: no", "incorrect"),
        ("**correct:** yes", "correct"),
        ("**correct**: yes", "correct"),
        ("correct: **yes**", "correct"),
        ("Correct: YES.", "correct"),
        ("- correct: no", "incorrect"),
        ('{"extracted": "Bo", "reasoning": "",\n "correct": "yes"}', "correct"),
        ("correct\uff1ayes", "correct"),
        ("incorrect: no\ncorrect: yes", "correct"),
        ("reasoning: correct: no doubt, it is the same\ncorrect: yes", "correct"),
        ("correct: no\nOn second thoughts:\ncorrect: yes", "correct"),
        ("<think>correct: no</think>correct: yes", "correct"),
        ("It is correct.", "error"),
        ("correct: perhaps", "error"),
        ("correct: yesterday", "error"),
        ("", "error"),
    ],
)
def test_a_reply_is_read_at_the_beginning_of_its_lines_and_the_last_counts(reply, verdict):
    """A reply that cannot be read is no wrong answer."""
    read = read_verdict(reply)
    assert read.verdict == verdict and read.raw == reply and (read.error is None) == (verdict != "error")


def test_the_extracted_answer_is_kept():
    assert read_verdict('**extracted:** "Bo Z."\ncorrect: yes').extracted == "Bo Z."


def yes_no(body, number):
    """Says yes to every prediction that holds `Bo`, nothing readable to `?`."""
    prompt = body["messages"][0]["content"]
    said = prompt.partition("Response: ")[2].partition("\n")[0]
    return 200, completion("hm" if "?" in said else f"correct: {'yes' if 'Bo' in said else 'no'}"), {}


def judge_at(stub, path, **settings):
    return ModelJudge(ChatClient(stub.url, "m", timeout=5.0, first_wait=0.001, tries=2, **settings), path, 4)


def test_the_model_is_asked_about_all_but_exact_matches_and_each_verdict_is_cached(tmp_path):
    cases = [case("Bo"), case("Bo Z."), case("Al"), case("?")]
    with serve(yes_no) as stub:
        judge = judge_at(stub, tmp_path / "v.jsonl")
        assert [v.verdict for v in judge(cases)] == ["correct", "correct", "incorrect", "error"] and len(stub.requests) == 3
        judge.close()
        judge = judge_at(stub, tmp_path / "v.jsonl")
        assert [v.verdict for v in judge(cases)] == ["correct", "correct", "incorrect", "error"] and len(stub.requests) == 4  # the error again
        judge.close()
    rows = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert [row["verdict"] for row in rows] == ["correct", "incorrect"] and all(row["raw"] and row["prompt_hash"] and row["judge"] == "m" for row in rows)


def test_equal_cases_of_one_call_are_asked_about_once_and_order_is_kept(tmp_path):
    with serve(yes_no) as stub:
        judge = judge_at(stub, tmp_path / "v.jsonl")
        assert [v.verdict for v in judge([case("Al"), case("Bo Z."), case("Al")])] == ["incorrect", "correct", "incorrect"]
        judge.close()
    assert len(stub.requests) == 2


def test_an_outage_is_an_error_and_no_wrong_answer(tmp_path):
    with serve(lambda *_: (500, "down", {})) as stub:
        judge = judge_at(stub, tmp_path / "v.jsonl")
        (verdict,) = judge([case("Al")])
        judge.close()
    assert verdict.verdict == "error" and "HTTP 500" in verdict.error and (tmp_path / "v.jsonl").read_text() == ""


def test_a_refusal_ends_the_run_and_keeps_the_verdicts_that_came(tmp_path):
    def reply(body, number):
        return (401, "bad key", {}) if "Al" in body["messages"][0]["content"] else yes_no(body, number)

    with serve(reply) as stub:
        judge = judge_at(stub, tmp_path / "v.jsonl")
        with pytest.raises(ChatRefusedError, match="401"):
            judge([case("Al"), case("Bo Z.")])
        judge.close()
    assert json.loads((tmp_path / "v.jsonl").read_text())["verdict"] == "correct"


def test_a_reply_that_was_cut_off_is_an_error(tmp_path):
    """Thoughts that never end may hold any line."""
    with serve(lambda *_: (200, completion("<think>maybe\ncorrect: yes", "length"), {})) as stub:
        (verdict,) = judge_at(stub, tmp_path / "v.jsonl")([case("Al")])
    assert (verdict.verdict, verdict.error) == ("error", "the reply was cut off")


def test_a_torn_last_verdict_is_asked_for_again(tmp_path):
    path = tmp_path / "v.jsonl"
    with serve(yes_no) as stub:
        judge_at(stub, path)([case("Al"), case("Bo Z.")])
        path.write_text(path.read_text()[:-20])
        judge_at(stub, path)([case("Al"), case("Bo Z.")])
    assert len(stub.requests) == 3 and len(path.read_text().splitlines()) == 2


def test_a_file_of_other_things_is_no_cache(tmp_path):
    """It is left as it is, its last line too."""
    text = '{"question": "q"}\n{"question'
    (tmp_path / "v.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"v.jsonl:1: not a cached verdict"):
        ModelJudge(ChatClient("http://h/v1", "m"), tmp_path / "v.jsonl", 1)
    assert (tmp_path / "v.jsonl").read_text() == text


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("match", None),
        ("none", None),
        ("openai:http://127.0.0.1:8000/v1:qwen3", ("http://127.0.0.1:8000/v1", "qwen3")),
        ("openai:https://host/v1:org/model", ("https://host/v1", "org/model")),
        ("openai:http://localhost:11434/v1:qwen2.5:7b", ("http://localhost:11434/v1", "qwen2.5:7b")),
        ("openai:http://127.0.0.1:8000:m", ("http://127.0.0.1:8000", "m")),
    ],
)
def test_a_judge_is_named_in_one_word(spec, parts):
    assert parse_judge(spec) == parts


@pytest.mark.parametrize("spec", ["gpt-4", "openai:", "openai:http://host/v1", "openai:host/v1:m", "match:x"])
def test_another_judge_is_an_error(spec):
    with pytest.raises(ValueError, match="give match, none or openai:BASE_URL:MODEL"):
        parse_judge(spec)
