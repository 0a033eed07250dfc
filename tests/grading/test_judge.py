"""The judges: the offline rules, and the model judge with its cache."""

import json
from contextlib import closing

import pytest
from stub_server import completion, serve

from venus.grading.judge import RULES, Case, ModelJudge, match, open_judge, parse_judge
from venus.grading.verdicts import PROMPTS
from venus.services.chat import ChatClient, ChatRefusedError


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
        ("it seats 13,186 people", ("13186",), "correct"),
        ("the U.S.A., then", ("USA",), "correct"),
        ("１９９０年", ("1990",), "correct"),
        ("1.5 km", ("5",), "incorrect"),
        ("?", ("!",), "incorrect"),
        ("anything", ("the",), "incorrect"),
    ],
)
def test_the_matcher_wants_an_alias_whole_or_contained_as_words(prediction, aliases, verdict):
    assert [v.verdict for v in match([case(prediction, *aliases)])] == [verdict]


@pytest.mark.parametrize("rule", RULES)
def test_no_answer_is_incorrect_by_every_rule(rule):
    assert [v.verdict for v in RULES[rule]([case(None), case("Bo")])] == ["incorrect", "correct"]


def test_each_rule_has_its_own_idea_of_equal():
    cases = [
        case("Bo, of course"),
        case("the Bo!"),
        case("$1,234", "1234"),
        case("rome;OSLO", "Rome, Oslo"),
    ]
    verdicts = {name: [v.verdict == "correct" for v in rule(cases)] for name, rule in RULES.items()}
    assert verdicts == {
        "match": [True, True, True, True],
        "em": [False, True, True, False],
        "gaia": [False, False, True, True],
    }


def yes_no(body, number):
    """Says yes to every prediction that holds `Bo`, nothing readable to `?`."""
    prompt = body["messages"][0]["content"]
    said = prompt.partition("Response: ")[2].partition("\n")[0]
    return (
        200,
        completion("hm" if "?" in said else f"correct: {'yes' if 'Bo' in said else 'no'}"),
        {},
    )


def judge_at(stub, path, prompt="browsecomp"):
    return ModelJudge(
        ChatClient(stub.url, "m", timeout=5.0, first_wait=0.001, tries=2), path, 4, prompt
    )


def test_the_model_is_asked_about_all_but_exact_matches_and_each_verdict_is_cached_whole(tmp_path):
    """`?` gets nothing readable: it is asked twice in every run, since errors are not cached."""
    cases = [case(" bo. "), case("Bo Z."), case("Al"), case("?"), case(None)]
    with serve(yes_no) as stub, closing(judge_at(stub, tmp_path / "v.jsonl")) as judge:
        first = judge(cases)
        assert [v.verdict for v in first] == [
            "correct",
            "correct",
            "incorrect",
            "error",
            "incorrect",
        ] and len(stub.requests) == 4
        with closing(judge_at(stub, tmp_path / "v.jsonl")) as again:
            assert again(cases) == first and len(stub.requests) == 6
    rows = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert sorted(row["verdict"] for row in rows) == ["correct", "incorrect"] and all(
        row["raw"] and row["judge"] == "m" for row in rows
    )
    assert {(row["prompt"], row["prompt_hash"]) for row in rows} == {
        ("browsecomp", PROMPTS["browsecomp"].hash)
    }
    assert [v.judge for v in first] == [None, "m", "m", "m", None]


@pytest.mark.parametrize(
    ("said", "gold"),
    [("15", "1.5"), ("5", "-5"), ("10-12", "1012"), ("Bo Jr", "Bo"), ("U.S.", "us")],
)
def test_what_only_the_normal_form_of_the_rewards_makes_equal_is_asked(tmp_path, said, gold):
    """SQuAD's normal form deletes points and signs: by it 15 matched 1.5, and no
    judge was asked.
    """
    with (
        serve(lambda *_: (200, completion("correct: no"), {})) as stub,
        closing(judge_at(stub, tmp_path / "v.jsonl")) as judge,
    ):
        assert [v.verdict for v in judge([case(said, gold)])] == ["incorrect"] and len(
            stub.requests
        ) == 1


def test_a_verdict_is_cached_by_question_gold_answer_judge_and_prompt(tmp_path):
    """Each of them another: asked again. All the same: not."""
    with serve(lambda *_: (200, completion("correct: no\n结论: 错误"), {})) as stub:
        for prompt in ("browsecomp", "browsecomp-plus", "xbench"):
            with closing(judge_at(stub, tmp_path / "v.jsonl", prompt)) as judge:
                judge([case("Al"), case("Al", question="Where?"), case("Al", "Cy"), case("Di")])
        assert len(stub.requests) == 12
        with closing(judge_at(stub, tmp_path / "v.jsonl")) as judge:
            judge([case("Al"), case("Di")])
    assert len(stub.requests) == 12


def test_a_verdict_is_on_disk_before_the_next_one_comes(tmp_path):
    """A killed run loses the calls under way, none that were answered."""
    lines = []

    def reply(body, number):
        lines.append((tmp_path / "v.jsonl").read_text().count("\n"))
        return 200, completion("correct: no"), {}

    with (
        serve(reply) as stub,
        closing(
            ModelJudge(ChatClient(stub.url, "m", timeout=5.0), tmp_path / "v.jsonl", 1)
        ) as judge,
    ):
        judge([case(name) for name in "abcdef"])
    assert lines[-1] >= 3  # of five; the thread may be a call or two ahead of the file


def test_items_are_scored_with_and_without_the_model(tmp_path):
    """Rome and Bern for Rome and Oslo; all of it; nothing."""
    said = '{"correctness_details": {"Rome": true, "Oslo": false}, "excessive_answers": ["Bern"]}'
    with (
        serve(lambda *_: (200, completion(said), {})) as stub,
        closing(judge_at(stub, tmp_path / "v.jsonl", "deepsearchqa")) as judge,
    ):
        verdicts = judge([case(name, "Rome, Oslo") for name in ("Rome, Bern", "rome, oslo", None)])
        (cached,) = judge_at(stub, tmp_path / "v.jsonl", "deepsearchqa")(
            [case("Rome, Bern", "Rome, Oslo")]
        )
    assert [v.scores["f1"] for v in verdicts] == [0.5, 1.0, 0.0] and [
        v.verdict for v in verdicts
    ] == ["incorrect", "correct", "incorrect"]
    assert cached == verdicts[0] and len(stub.requests) == 1


def test_equal_cases_of_one_call_are_asked_about_once_and_order_is_kept(tmp_path):
    with serve(yes_no) as stub:
        judge = judge_at(stub, tmp_path / "v.jsonl")
        assert [v.verdict for v in judge([case("Al"), case("Bo Z."), case("Al")])] == [
            "incorrect",
            "correct",
            "incorrect",
        ]
        judge.close()
    assert len(stub.requests) == 2


def test_an_outage_is_an_error_and_no_wrong_answer(tmp_path):
    with serve(lambda *_: (500, "down", {})) as stub:
        judge = judge_at(stub, tmp_path / "v.jsonl")
        (verdict,) = judge([case("Al")])
        judge.close()
    assert (
        verdict.verdict == "error"
        and "HTTP 500" in verdict.error
        and (tmp_path / "v.jsonl").read_text() == ""
    )


def test_a_refusal_ends_the_run_keeps_the_verdicts_that_came_and_asks_no_further(tmp_path):
    def reply(body, number):
        return (401, "bad key", {}) if number else (200, completion("correct: yes"), {})

    with (
        serve(reply) as stub,
        closing(
            ModelJudge(ChatClient(stub.url, "m", timeout=5.0), tmp_path / "v.jsonl", 1)
        ) as judge,
    ):
        with pytest.raises(ChatRefusedError, match="401"):
            judge([case(f"Bo {k}") for k in range(20)])
        assert len(stub.requests) < 20
    assert json.loads((tmp_path / "v.jsonl").read_text())["verdict"] == "correct"


def test_an_answer_too_long_for_the_judge_is_an_error_of_that_case_alone(tmp_path):
    """Another request that is refused says that the endpoint wants something else: all would
    be, and the run ends.
    """

    def reply(body, number):
        if "long" in body["messages"][0]["content"]:
            return (
                400,
                {
                    "error": {
                        "message": "This model's maximum context length is 8 tokens",
                        "code": 400,
                    }
                },
                {},
            )
        return (
            (400, {"error": {"message": "temperature is not supported"}}, {})
            if "odd" in body["messages"][0]["content"]
            else yes_no(body, number)
        )

    with serve(reply) as stub, closing(judge_at(stub, tmp_path / "v.jsonl")) as judge:
        assert [v.verdict for v in judge([case("a long story"), case("Bo Z.")])] == [
            "error",
            "correct",
        ]
        with pytest.raises(ChatRefusedError, match="temperature is not supported"):
            judge([case("an odd one")])


def test_a_judge_is_opened_by_its_name(tmp_path):
    with open_judge("gaia", None, tmp_path / "v.jsonl", 2) as judge:
        assert [v.verdict for v in judge([case("$7", "7")])] == ["correct"] and not (
            tmp_path / "v.jsonl"
        ).exists()
    with (
        serve(yes_no) as stub,
        open_judge(f"openai:{stub.url}:m", "sk-1", tmp_path / "v.jsonl", 2, prompt="gaia") as judge,
    ):
        assert [v.error for v in judge([case("Bo Z.")])] == [
            "not the one word Correct or Incorrect"
        ]
    assert stub.requests[0]["headers"]["Authorization"] == "Bearer sk-1"


def test_a_reply_that_was_cut_off_is_an_error(tmp_path):
    """Thoughts that never end may hold any line."""
    cut = completion("<think>maybe\ncorrect: yes", "length")
    with (
        serve(lambda *_: (200, cut, {})) as stub,
        closing(judge_at(stub, tmp_path / "v.jsonl")) as judge,
    ):
        (verdict,) = judge([case("Al")])
    assert (verdict.verdict, verdict.error) == ("error", "the reply was cut off")


def test_a_reply_that_cannot_be_read_is_asked_for_once_more(tmp_path):
    with (
        serve(
            lambda body, number: (200, completion("correct: no" if number else "Hm."), {})
        ) as stub,
        closing(judge_at(stub, tmp_path / "v")) as judge,
    ):
        assert [v.verdict for v in judge([case("Al")])] == ["incorrect"]
    assert [request["body"]["temperature"] for request in stub.requests] == [0.0, 1.0]


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
        ("gaia", None),
        ("none", None),
        ("openai:http://127.0.0.1:8000/v1:qwen3", ("http://127.0.0.1:8000/v1", "qwen3")),
        ("openai:https://host/v1:org/model", ("https://host/v1", "org/model")),
        (
            "openai:http://localhost:11434/v1:qwen2.5:7b",
            ("http://localhost:11434/v1", "qwen2.5:7b"),
        ),
        ("openai:http://127.0.0.1:8000:m", ("http://127.0.0.1:8000", "m")),
    ],
)
def test_a_judge_is_named_in_one_word(spec, parts):
    assert parse_judge(spec) == parts


@pytest.mark.parametrize(
    "spec", ["gpt-4", "openai:", "openai:http://host/v1", "openai:host/v1:m", "match:x"]
)
def test_another_judge_is_an_error(spec):
    with pytest.raises(ValueError, match="give match, em, gaia, none or openai:BASE_URL:MODEL"):
        parse_judge(spec)
