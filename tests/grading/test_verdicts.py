"""The reading of a judge's reply: labelled lines, JSON, Chinese, one word, lists of
items; and the prompts.
"""

import json

import pytest

from venus.grading.verdicts import PROMPTS, item_scores, read_items, read_verdict, read_word

# Replies that scorers in the field read wrongly or not at all, as the comments say, with the
# verdict their authors meant.
FIELD = [
    # compared as "correct: yes" with "yes": all wrong
    ("extracted_final_answer: Bo\nreasoning: same\ncorrect: yes\nconfidence: 100", "correct"),
    ("**correct:** yes", "correct"),  # these six: no match, so reward 0
    ("**correct**: yes", "correct"),
    ("correct: **yes**", "correct"),
    ('{"correct": "yes"}', "correct"),
    ("correct\uff1ayes", "correct"),
    ("\uff43\uff4f\uff52\uff52\uff45\uff43\uff54\uff1a no", "incorrect"),
    ("incorrect: no\ncorrect: yes", "correct"),  # `incorrect: no` was the first match
    # prose won over the verdict
    ("reasoning: correct: no doubt, it is the same\ncorrect: yes", "correct"),
    ("correct: no doubt they agree\ncorrect: yes", "correct"),
    ("Error: 503 Service Unavailable", "error"),  # an outage, unreadable, so reward 0
    ("", "error"),
    (
        "最终答案: Bo\n解释: 一致\n结论：正确",
        "correct",
    ),  # full width: matched, then cut at the other colon
    ("**结论**: 正确", "correct"),  # bold label: no match
    ("**结论：** **错误**", "incorrect"),
    ("结论:【正确】。", "correct"),
    ("结论: 不正确", "incorrect"),
]
LINES = [
    ("correct: no", "incorrect"),
    ("Correct: YES.", "correct"),
    ("- correct: no", "incorrect"),
    ("4. correct: no", "incorrect"),
    ("> **Correct:** Yes (the same person)", "correct"),
    ("correct:\nyes", "correct"),
    ('{"extracted": "Bo", "correct": true, "reasoning": "it says\\ncorrect: no"}', "correct"),
    ('{"extracted": "Bo", "reasoning": "",\n "correct": "yes"}', "correct"),
    ('```json\n{"reasoning": "", "correct": "no"}\n```', "incorrect"),
    ('{"correct": "yes", cut\n"correct": "no"', "incorrect"),
    ("correct: no\nOn second thoughts:\ncorrect: yes", "correct"),
    ("<think>correct: no</think>correct: yes", "correct"),
    ("correct: yes\n<think>or not?\ncorrect: no", "correct"),
    ("结论: 错误\n再想一想\n结论: 正确", "correct"),
    ("It is correct.", "error"),
    ("correct: perhaps", "error"),
    ("correct: yesterday", "error"),
    ("correct: yes/no", "error"),
    ("correct: yes or no", "error"),
    ("结论: 正确与否难以判断", "error"),
]


@pytest.mark.parametrize(("reply", "verdict"), FIELD + LINES)
def test_the_last_line_that_begins_with_the_label_is_the_verdict(reply, verdict):
    """A reply that cannot be read is no wrong answer."""
    read = read_verdict(reply)
    assert (
        read.verdict == verdict
        and read.raw == reply
        and (read.error is None) == (verdict != "error")
    )


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("Correct", "correct"),
        ("Correct.", "correct"),  # these two read as wrong by "exactly the word, or begins with A"
        ("**Correct**", "correct"),
        # and these two as right, since they begin with A
        ("Although close, Incorrect", "incorrect"),
        ("Answer: Incorrect", "incorrect"),
        ("The names differ.\nIncorrect", "incorrect"),
        ("Incorrect\nNo: they are brothers.\nCorrect", "correct"),
        ('{"verdict": "Incorrect"}', "incorrect"),
        ("<think>Correct</think>\n\nincorrect", "incorrect"),
        ("It is not correct", "error"),
        ("Correctly so", "error"),
        ("Error", "error"),  # counted as wrong elsewhere
        ("", "error"),
    ],
)
def test_the_one_word_is_read_where_it_stands_alone_or_ends_a_line(reply, verdict):
    assert read_word(reply).verdict == verdict


def test_the_extracted_answer_is_kept_where_given():
    assert (
        read_verdict('**extracted:** "Bo Z."\ncorrect: yes\nconfidence: 85 %').extracted == "Bo Z."
    )
    assert read_verdict("最终答案：北京\n结论：正确\n置信度：90%").extracted == "北京"
    assert (
        read_verdict(
            '{"extracted_final_answer": "Bo", "correct": "no", "confidence": 70}'
        ).extracted
        == "Bo"
    )
    assert read_verdict("correct: yes").extracted is None


# Items


def items(details, excessive, wrap="{}"):
    return wrap.format(
        json.dumps(
            {"explanation": "..", "correctness_details": details, "excessive_answers": excessive}
        )
    )


@pytest.mark.parametrize(
    ("found", "missing", "excessive", "precision", "recall", "f1"),
    [
        (2, 0, 0, 1, 1, 1),
        (2, 1, 1, 2 / 3, 2 / 3, 2 / 3),
        (1, 3, 0, 1, 1 / 4, 2 / 5),
        (3, 0, 1, 3 / 4, 1, 6 / 7),
        (0, 2, 3, 0, 0, 0),
        (0, 1, 0, 0, 0, 0),
    ],
)
def test_item_scores_are_precision_recall_and_f1(found, missing, excessive, precision, recall, f1):
    scores = item_scores(found, missing, excessive)
    assert (scores["precision"], scores["recall"], scores["f1"]) == pytest.approx(
        (precision, recall, f1)
    )
    assert scores["correct_with_excessive"] == (missing == 0 and excessive > 0) and scores[
        "fully_incorrect"
    ] == (found == 0)


def test_items_are_counted_and_only_all_of_them_without_another_is_correct():
    assert read_items(items({"Rome": True, "Oslo": True}, [])).verdict == "correct"
    read = read_items(items({"Rome": True, "Oslo": False}, ["Bern"], wrap="So:\n```json\n{}\n```"))
    assert read.verdict == "incorrect" and (read.scores["precision"], read.scores["recall"]) == (
        0.5,
        0.5,
    )
    assert read_items(items({"Rome": True}, ["Bern"])).verdict == "incorrect"


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "correct: yes",
        items({}, []),
        items({"Rome": "yes"}, []),
        items({"Rome": True}, None),
        items(["Rome"], []),
        items({"Rome": True}, [])[:-3],
        "[1]",
        '{"correctness_details": {"Rome": true}}',
    ],
)
def test_items_that_cannot_be_counted_are_an_error(reply):
    read = read_items(reply)
    assert read.verdict == "error" and read.scores is None


# Prompts


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_states_the_case_once_and_braces_in_it_do_no_harm(name):
    asked = PROMPTS[name].text.format(question="Q{0}?", prediction="A {brace}", reference="G}")
    assert (
        all(asked.count(text) == 1 for text in ("Q{0}?", "A {brace}", "G}")) and "{{" not in asked
    )


def test_prompts_have_hashes_of_their_own():
    assert len({prompt.hash for prompt in PROMPTS.values()}) == len(PROMPTS)


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("browsecomp", "extracted: Bo\nreasoning: same\ncorrect: yes\nconfidence: None"),
        ("browsecomp-zh", "最终答案: Bo\n解释: 相同\n结论: 正确\n置信度: 无"),
        ("browsecomp-plus", "extracted: Bo\nreasoning: same\ncorrect: yes\nconfidence: 95%"),
        ("gaia", "Correct"),
        ("xbench", "最终答案: Bo\n解释: 相同\n结论: 正确"),
        (
            "deepsearchqa",
            '{"explanation": "same", "correctness_details": {"Bo": true}, "excessive_answers": []}',
        ),
    ],
)
def test_the_reply_that_a_prompt_asks_for_is_what_its_reader_reads(name, reply):
    assert PROMPTS[name].read(reply).verdict == "correct"


def test_every_prompt_has_its_reply_above():
    assert set(PROMPTS) == {
        "browsecomp",
        "browsecomp-zh",
        "browsecomp-plus",
        "gaia",
        "xbench",
        "deepsearchqa",
    }
