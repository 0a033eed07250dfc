"""Why trajectories failed, what looks leaked, what may be compared; and other runners' records
read as trajectories.
"""

import dataclasses
import json

import pytest
from agent_fakes import answer, search, tiny_tokenizer, visit

from venus.curation.formats import read_rollouts
from venus.grading import summary
from venus.grading.grade import (
    FAILURES,
    failure_of,
    grade_trajectories,
    is_call,
    leaks_of,
    observations,
)
from venus.grading.judge import RULES
from venus.grading.summary import check_alike, shared_manifest, summarise, unlike
from venus.grading.verdicts import Verdict
from venus.rl.rewards import answer_seen
from venus.trajectory import Outcome, Question


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tiny"))


def messages(*contents):
    """[question, turn, observation, turn, ..]; observations without their tags."""
    tagged = [
        text if k % 2 else f"<tool_response>\n{text}\n</tool_response>"
        for k, text in enumerate(contents)
    ]
    return [
        {"role": ("user", "assistant")[k % 2], "content": text}
        for k, text in enumerate(["Who?", *tagged[1:]])
    ]


def rollouts(tmp_path, tokenizer, *rows, name="rows.jsonl"):
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return read_rollouts([str(tmp_path / name)], tokenizer)


@pytest.fixture
def made(tmp_path, tiny):
    """made(*contents, gt=..) -> the trajectory of such a conversation."""

    def make(*contents, gt="Ada", **changes):
        [trajectory] = rollouts(tmp_path, tiny, {"messages": messages("Who?", *contents), "gt": gt})
        return dataclasses.replace(trajectory, **changes)

    return make


# ---- was the answer seen?


@pytest.mark.parametrize(
    ("text", "alias", "seen"),
    [
        # a newline inside JSON is two characters
        ('[{"title": "The Life of\\nAda  Lovelace"}]', "Ada Lovelace", True),
        ("by ADA-LOVELACE.", "Ada Lovelace", True),
        ("Ada, the Lovelace", "Ada Lovelace", True),  # articles aside
        ("Lovelace, Ada", "Ada Lovelace", False),
        ("Adan Lovelace", "Ada Lovelace", False),
        ("born in 1815", "815", False),
        ("U.S.A.", "the U.S.A.", True),
        ("位于北京市", "北京", True),
        ("[Ada Lovelace](http://x)", "Ada Lovelace", True),
        ("all 13,186 seats", "13186", True),
        ("anything", "?", False),
    ],
)
def test_an_answer_is_seen_when_its_words_stand_side_by_side(text, alias, seen):
    assert answer_seen(text, [alias]) is seen


def test_any_alias_will_do():
    assert answer_seen("Countess of Lovelace", ["Ada", "the Countess of Lovelace"])


# ---- why it failed


def why(trajectory, tokenizer, verdict="incorrect"):
    return failure_of(trajectory, verdict, observations(trajectory, tokenizer), tokenizer)


def test_the_classes_of_failure_are_told_apart(made, tiny):
    found, missed = (
        made(search("s"), page, answer("Bob")) for page in ("Ada was here", "nobody was here")
    )
    no_answer = made(search("s"), "Ada was here", "<think>\nhm\n</think>\n\nAda")
    same = [part for _ in range(3) for part in (search("s"), "Ada")]
    cases = {
        "evidence_seen": found,
        "evidence_not_seen": missed,
        "format": no_answer,
        "loop": made(*same, search("s"), "Ada", answer("Bob")),
        "truncated": dataclasses.replace(found, stop_reason="turn_limit"),
        "infrastructure": dataclasses.replace(
            found, stop_reason="model_error", outcome=Outcome(None, "tool_error")
        ),
    }
    assert {name: why(trajectory, tiny) for name, trajectory in cases.items()} == {
        name: name for name in cases
    }
    assert why(found, tiny, "error") == "judge_error"
    assert set(cases) | {"judge_error"} == set(FAILURES)


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (("error", "ok"), "infrastructure"),
        (("timeout", "empty"), "infrastructure"),
        (("empty", "ok"), "evidence_not_seen"),
    ],
)
def test_evidence_that_no_service_gave_was_not_missed_by_the_policy(made, tiny, statuses, expected):
    """The search service was down for the whole rollout. `evidence_not_seen` would send the reader
    to the policy, which did ask.
    """
    t = made(search("s"), "The search failed.", visit("u"), "x", answer("Bob"))
    for turn, status in zip(t.turns, statuses, strict=False):
        turn.tool_status = status
    assert why(t, tiny) == expected
    t.turns.insert(1, dataclasses.replace(t.turns[0], tool_status="ok"))
    assert why(t, tiny) == "evidence_not_seen"  # one of its searches was answered


def test_a_correct_trajectory_and_one_without_ground_truth_did_not_fail(made, tiny):
    assert why(made(answer("Ada")), tiny, "correct") is None
    assert why(made(answer("Ada"), gt=[]), tiny, "error") is None


def test_the_earlier_class_wins(made, tiny):
    """A rollout that went round in circles until its limit and never answered is a loop; one that
    the clock ended was not misjudged.
    """
    circles = made(
        *[part for _ in range(4) for part in (search("s"), "x")],
        "<think>\nhm\n</think>\n\n",
        stop_reason="turn_limit",
    )
    assert why(circles, tiny) == "loop"
    cut = made(
        search("s"),
        "Ada",
        answer("Bob"),
        stop_reason="time_limit",
        outcome=Outcome(None, "cut_off"),
    )
    assert why(cut, tiny, "error") == "truncated"


def test_a_few_repeated_calls_are_no_loop(made, tiny):
    """Two of three calls repeat: too few. Three of seven: less than half."""
    few = [part for _ in range(3) for part in (search("s"), "x")]
    assert why(made(*few, answer("Bob")), tiny) == "evidence_not_seen"
    others = [part for name in "abc" for part in (search(name), "x")]
    assert why(made(*others, *few, search("s"), "x", answer("Bob")), tiny) == "evidence_not_seen"
    assert why(made(*others[:4], *few, search("s"), "x", answer("Bob")), tiny) == "loop"


def test_a_last_turn_that_repeats_its_end_is_a_loop(made, tiny):
    sentence = "I should search for this person once more to be sure of it. "
    assert (
        why(made(search("s"), "x", f"<think>\n{sentence * 7}", stop_reason="token_limit"), tiny)
        == "loop"
    )
    assert (
        why(made(search("s"), "x", f"<think>\n{sentence * 3}", stop_reason="token_limit"), tiny)
        == "truncated"
    )


def test_a_call_in_the_last_turn_was_not_made(made):
    assert [
        is_call(turn) for turn in made(search("s"), "x", visit("u"), "y", search("t")).turns
    ] == [True, True, False]


# ---- leaks


def test_copies_of_a_benchmark_are_found_by_address_and_canary(made, tiny):
    """Only addresses count for the block-list: `musique` is a word of French pages too."""
    clean = made(search("s"), "la musique est belle, https://fr.example/page", answer("Ada"))
    shown = made(
        search("s"),
        '[{"url": "https://hub.example/datasets/MuSiQue/x.csv", "snippet": "q"}]',
        answer("Ada"),
    )
    opened = made(visit("hub.example/musique"), "404", answer("Ada"))
    canary = made(search("s"), "BENCH:canary-77", answer("Ada"))
    found = [
        leaks_of(t, observations(t, tiny), ("musique", "browsecomp"), "canary-77")
        for t in (clean, shown, opened, canary)
    ]
    assert found == [[], ["musique"], ["musique"], ["canary-77"]]
    assert leaks_of(canary, observations(canary, tiny), (), None) == []


# ---- rows and figures


MANIFEST = {"benchmark": "b", "judge": "em", "prompt_hash": None}


def graded(trajectories, tokenizer, judge=RULES["em"], **options):
    options = {
        "items": False,
        "addresses": ("musique",),
        "canaries": {},
        "manifest": MANIFEST,
    } | options
    return grade_trajectories(trajectories, judge, tokenizer, **options)


def figures(trajectories, rows):
    return summarise([Question("q", "Who?", ("Ada",))], trajectories, rows, seed=0, resamples=200)


def test_leaked_trajectories_are_flagged_and_the_success_without_them_stands_beside(made, tiny):
    """Right by reading the answer key, wrong without it."""
    leaked = made(search("s"), "https://x.example/musique: Ada", answer("Ada"))
    honest = made(search("s"), "nothing", answer("Bob"), sample=1)
    rows = graded([leaked, honest], tiny)
    assert [row["leaks"] for row in rows] == [["musique"], []]
    got = figures([leaked, honest], rows)
    assert (got["success"]["mean"], got["leaks"]["suspected"], got["leaks"]["success"]["mean"]) == (
        0.5,
        1,
        0.0,
    )
    assert got["leaks"]["strings"] == {"musique": 1}


def test_a_judge_that_fails_leaves_wrong_in_the_headline_and_nothing_in_the_graded_figure(
    made, tiny
):
    """Right, wrong and not judged: 1/3 with its number of errors beside it, 1/2 of those graded."""
    trajectories = [made(answer("Ada"), sample=k) for k in range(3)]
    verdicts = [
        Verdict("correct", "Ada", raw="correct: yes"),
        Verdict("incorrect", "Ada"),
        Verdict("error", error="the service is down"),
    ]
    rows = graded(trajectories, tiny, judge=lambda cases: verdicts[: len(cases)])
    got = figures(trajectories, rows)
    assert (got["success"]["mean"], got["success_graded"]["mean"]) == (pytest.approx(1 / 3), 0.5)
    assert (
        got["graded"],
        got["judge_errors"],
        got["excluded"],
        got["failures"]["judge_error"],
    ) == (2, 1, 0, 1)
    assert [(row["verdict"], row["raw"], row["error"]) for row in rows][::2] == [
        ("correct", "correct: yes", None),
        ("error", None, "the service is down"),
    ]
    assert got["pass_at"]["3"]["mean"] == 1.0
    assert {name: use["trajectories"] for name, use in got["tool_use"].items()} == {
        "overall": 3,
        "correct": 1,
        "wrong": 1,
    }


def test_what_did_not_end_or_has_no_ground_truth_is_not_judged(made, tiny):
    asked = []
    cut = made(answer("Ada"), stop_reason="straggler", outcome=Outcome(None, "cut_off"))
    unlabelled = made(answer("Ada"), gt=[], sample=1)
    rows = graded(
        [cut, unlabelled, made(answer("Ada"), sample=2)],
        tiny,
        judge=lambda cases: [asked.append(case) or Verdict("correct") for case in cases],
    )
    assert len(asked) == 1
    assert [(row["verdict"], row["error"], row["failure"]) for row in rows] == [
        ("error", "straggler", "truncated"),
        ("error", "no ground truth", None),
        ("correct", None, None),
    ]


def test_item_scores_pass_through_and_are_not_mixed_with_word_f1(made, tiny):
    """DeepSearchQA's F1 is over a list's items; where the judge failed it is 0, not the F1 of the
    answer's words, which would be 1.
    """
    trajectories = [made(answer("Ada"), sample=k) for k in range(2)]
    items = {"precision": 1.0, "recall": 0.5, "f1": 2 / 3}
    verdicts = [Verdict("incorrect", scores=items), Verdict("error", error="unreadable")]
    rows = graded(trajectories, tiny, judge=lambda _: verdicts, items=True)
    assert rows[0]["scores"] == {"em": 1.0, **items} and rows[1]["scores"] == {"em": 1.0}
    got = figures(trajectories, rows)
    assert {name: interval["mean"] for name, interval in got["scores"].items()} == pytest.approx(
        {"em": 1.0, "precision": 0.5, "recall": 0.25, "f1": 1 / 3}
    )


def test_tool_use_tokens_and_duplicates_of_a_hand_count(made, tiny):
    """Searches of two queries and of one (the same again: a duplicate), a visit; the search of the
    last turn was not made.
    """
    t = made(
        search("a", "b"), "x", search("b"), "x", search("b"), "x", visit("u"), "y", search("c")
    )
    got = figures([t], graded([t], tiny))
    use = got["tool_use"]["overall"]
    assert (use["searches"], use["visits"], use["queries"], use["urls"]) == (3, 1, 4, 1)
    assert got["duplicate_calls"] == {"calls": 4, "duplicates": 1, "share": 0.25}
    assert got["tool_status"] == {"search": {"unknown": 3}, "visit": {"unknown": 1}}
    assert got["tokens"]["sampled"]["total"] == t.num_sampled
    assert got["tokens"]["context"] == {
        "mean": len(t.token_ids),
        "median": len(t.token_ids),
        "most": len(t.token_ids),
        "total": len(t.token_ids),
    }
    assert (got["turn_histogram"], got["num_turns"]) == ({"5": 1}, 5)


def test_trajectories_without_ground_truth_have_tool_use_and_no_success(made, tiny):
    t = made(search("a"), "x", answer("Ada"), gt=[])
    got = figures([t], graded([t], tiny))
    assert (got["success"], got["pass_at"], got["majority"], got["no_ground_truth"]) == (
        None,
        None,
        None,
        1,
    )
    assert (
        got["tool_use"]["overall"]["searches"] == 1
        and got["tool_use"]["wrong"]["trajectories"] == 0
    )


# ---- manifests


def test_unlike_manifests_are_refused_with_every_field(made):
    here, there = {"judge": "em", "date": None, "model": "a"}, {"judge": "gpt", "model": "b"}
    assert unlike(here, there) == ["date", "judge"]
    with pytest.raises(
        ValueError,
        match="x and y were not made alike: date None and 'absent'; judge 'em' and 'gpt'",
    ):
        check_alike([("x", here), ("y", there)])
    check_alike([("x", here), ("y", here | {"model": "b", "policy": "openai:b"})])
    with pytest.raises(ValueError, match="model 'a' and 'b'"):
        check_alike([("x", here), ("y", here | {"model": "b"})], free=())


def test_a_difference_needs_the_same_questions_and_ground_truths(made, tiny):
    rows = graded([made(answer("Ada")), made(answer("Bob"), sample=1)], tiny)
    unlabelled = graded([made(answer("Ada"), gt=[])], tiny)
    got = summary.difference(rows, rows[:1], "base", seed=0, resamples=50)
    assert (got["mean"], got["graded"]["mean"], got["gained"], got["lost"]) == (
        -0.5,
        -0.5,
        [],
        [rows[0]["question_id"]],
    )
    with pytest.raises(ValueError, match="base: evaluated other questions"):
        summary.difference(rows, unlabelled, "base", seed=0, resamples=50)
    with pytest.raises(ValueError, match="base: no question has a ground truth"):
        summary.difference(unlabelled, unlabelled, "base", seed=0, resamples=50)


def test_a_field_that_differs_among_rows_is_shared_as_its_values():
    rows = [{"manifest": {"judge": "em", "date": date}} for date in ("b", "a", "b")]
    assert shared_manifest(rows) == {"judge": "em", "date": {"several": ["'a'", "'b'"]}}


def test_the_questions_and_pages_of_an_evaluation_have_a_fingerprint(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"url": "u", "text": "x"}\n')
    questions = [
        Question("a", "a?", ("x",), str(tmp_path / "c.jsonl")),
        Question("b", "b?", ("y",), str(tmp_path / "c.jsonl")),
    ]
    first = summary.questions_manifest(questions)
    assert summary.questions_manifest(questions[::-1]) == first
    other = summary.questions_manifest(
        [questions[0], dataclasses.replace(questions[1], ground_truth=("z",))]
    )
    assert other["questions"] != first["questions"] and other["corpus"] == first["corpus"]
    (tmp_path / "c.jsonl").write_text('{"url": "u", "text": "y"}\n')
    assert summary.questions_manifest(questions)["corpus"] != first["corpus"]
    assert summary.questions_manifest([Question("a", "a?", ("x",))])["corpus"] is None


# ---- other runners' records


TALK = messages("Who?", search("s"), "x", answer("Ada"))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"termination": "answer", "answer": "Ada", "prediction": "Ada"},
            ("answered", "ok", ("Ada",)),
        ),
        ({"termination": "answered_token_limit"}, ("context_limit", "ok", ())),
        (
            {"termination": "exceed available llm calls", "answer": "Ada"},
            ("turn_limit", "ok", ("Ada",)),
        ),
        ({"termination": "No answer found after 2h30mins"}, ("time_limit", "cut_off", ())),
        ({"termination": "llm_error"}, ("model_error", "tool_error", ())),
        ({"request_id": "r", "sample_idx": 0, "finished": True}, ("answered", "ok", ())),
        ({"request_id": "r", "sample_idx": 0, "finished": False}, ("straggler", "cut_off", ())),
        ({"gt": ["Ada", "A. L."]}, ("answered", "ok", ("Ada", "A. L."))),
    ],
)
def test_the_end_of_other_runners_rollouts_is_read_as_ours(tmp_path, tiny, row, expected):
    [t] = rollouts(tmp_path, tiny, {"question": "Who?", "messages": TALK, **row})
    assert (t.stop_reason, t.outcome.status, t.ground_truth) == expected
    assert (t.prediction, len(t.turns), t.manifest) == ("Ada", 2, {"source": "released"})


def test_a_rollout_that_ended_in_an_observation_keeps_its_turns(tmp_path, tiny):
    """Out of time after a tool's answer: the row ends with a user message, to
    which no turn belongs.
    """
    [t] = rollouts(
        tmp_path,
        tiny,
        {"question": "Who?", "messages": TALK[:-1], "termination": "timeout", "prediction": None},
    )
    assert (len(t.turns), t.turns[-1].action, t.prediction, t.stop_reason) == (
        1,
        "search",
        None,
        "time_limit",
    )


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [], "error": "Timeout", "answer": "Ada"},
        {"messages": None, "termination": "exception", "answer": "Ada"},
    ],
)
def test_a_rollout_that_failed_before_its_first_turn_is_infrastructure(tmp_path, tiny, row):
    [t] = rollouts(tmp_path, tiny, {"question": "Who?", **row})
    assert (t.turns, t.stop_reason, t.outcome.status, t.ground_truth) == (
        [],
        "model_error",
        "tool_error",
        ("Ada",),
    )
    assert why(t, tiny, "error") == "infrastructure"
    assert tiny.decode(t.token_ids).endswith("<think>\n")


def test_samples_without_a_number_are_counted_by_question_over_files(tmp_path, tiny):
    """Tongyi writes iter1.jsonl, iter2.jsonl, ..: a rollout of every question in each."""
    for name in ("iter1.jsonl", "iter2.jsonl"):
        rows = [
            {"question": text, "answer": "Ada", "messages": TALK, "termination": "answer"}
            for text in ("Who?", "Which?")
        ]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for paths in (
        [str(tmp_path)],
        [str(tmp_path / "iter*.jsonl")],
        [str(tmp_path / "iter1.jsonl"), str(tmp_path / "iter2.jsonl")],
    ):
        read = read_rollouts(paths, tiny)
        assert [(t.question, t.sample) for t in read] == [
            ("Who?", 0),
            ("Which?", 0),
            ("Who?", 1),
            ("Which?", 1),
        ]
        assert len({t.key for t in read}) == 4


@pytest.mark.parametrize(
    ("row", "part"),
    [
        (
            {"messages": TALK, "termination": "bored"},
            r"rows.jsonl:1: termination 'bored' is none of answered, ",
        ),
        ({"messages": []}, "rows.jsonl:1: question must be a string"),
        (
            {"question": "Who?", "messages": []},
            "rows.jsonl:1: .*no turns, but stop_reason is no_answer",
        ),
        (
            {"question": "Who?", "messages": TALK[:1] + TALK[2:]},
            "rows.jsonl:1: message 1: role 'user', expected 'assistant'",
        ),
        ({"question": "Who?"}, "rows.jsonl:1: not an SFT row: no list 'messages'"),
        ({"schema": 2}, "rows.jsonl:1: not a trajectory of schema 1"),
    ],
)
def test_a_row_that_is_no_rollout_is_named_by_file_and_line(tmp_path, tiny, row, part):
    with pytest.raises(ValueError, match=part):
        rollouts(tmp_path, tiny, row)


def test_our_own_rows_and_theirs_may_stand_side_by_side(tmp_path, tiny, made):
    ours = made(answer("Ada"), run="mine")
    read = rollouts(tmp_path, tiny, ours.to_json(), {"question": "Who?", "messages": TALK})
    assert read[0] == ours and read[1].run == "released"
