"""Outcome rewards against vectors of SQuAD's scorer, worked out by hand."""

import pytest

from venus.rl.rewards import (
    answer_tokens,
    exact_match,
    f1_score,
    format_valid_share,
    normalize_answer,
    outcome_of,
)
from venus.trajectory import Outcome, Trajectory, Turn

# prediction, gold, exact match, multiset F1 (SQuAD normal form)
VECTORS = [
    ("paris paris paris paris", "paris", 0.0, 0.4),
    ("the U.S.A.", "USA", 1.0, 1.0),
    ("J.K. Rowling", "JK Rowling", 1.0, 1.0),
    ("The Beatles", "Beatles", 1.0, 1.0),
    ("Duran Duran, 1981", "Duran Duran", 0.0, 0.8),
    ("in Paris, France", "Paris", 0.0, 0.5),
    ("London", "Paris", 0.0, 0.0),
    ("", "Paris", 0.0, 0.0),
]


@pytest.mark.parametrize(("prediction", "gold", "em"), [row[:3] for row in VECTORS])
def test_exact_match_vectors(prediction, gold, em):
    assert exact_match(prediction, [gold]) == em


@pytest.mark.parametrize(
    ("prediction", "gold", "f1"), [(row[0], row[1], row[3]) for row in VECTORS]
)
def test_multiset_f1_vectors(prediction, gold, f1):
    assert f1_score(prediction, [gold]) == pytest.approx(f1, abs=1e-12)


def test_normal_form_deletes_punctuation_articles_and_case():
    assert normalize_answer("  The  Beatles' (an English band)\n") == "beatles english band"


def test_article_inside_a_word_stays():
    assert normalize_answer("Anthea Theatre") == "anthea theatre"


def test_best_alias_counts():
    """IGPO's in-place edit of the aliases left the training reward with the first one only."""
    assert [score("NYC", ["New York City", "NYC"]) for score in (exact_match, f1_score)] == [
        1.0,
        1.0,
    ]


@pytest.mark.parametrize("score", [exact_match, f1_score])
def test_no_answer_earns_nothing(score):
    assert score(None, ["Paris"]) == 0.0


def test_f1_cuts_chinese_into_characters():
    """SQuAD's tokens are cut at spaces: "北京大学" would be one token and "北京" wrong altogether.
    P = 2/2, R = 2/4, F1 = 2/3.
    """
    assert f1_score("北京", ["北京大学"]) == pytest.approx(2 / 3, abs=1e-12)


def test_tokens_of_mixed_text():
    assert answer_tokens("東京タワー opened in 1958年, 서울 타워") == [
        *"東京タワー",
        "opened",
        "in",
        "1958",
        "年",
        "서울",
        "타워",
    ]


@pytest.mark.parametrize(
    ("prediction", "gold", "expected"),
    [("the", "A", 0.0), ("?!", "A", 0.0), (" a ", "A", 1.0), ("", "The", 0.0)],
)
def test_gold_that_normalises_to_nothing_is_compared_as_written(prediction, gold, expected):
    """The normal form of "A" is empty, and so is that of "the" or "?!": an empty answer
    would be exactly right.
    """
    assert exact_match(prediction, [gold]) == f1_score(prediction, [gold]) == expected


@pytest.mark.parametrize("aliases", ["Paris", [], ()])
def test_aliases_must_be_a_list(aliases):
    """A bare string would be scored against each of its letters, the best one counting."""
    with pytest.raises(ValueError, match="non-empty list of aliases"):
        exact_match("P", aliases)


@pytest.mark.parametrize(("kind", "value"), [("em", 0.0), ("f1", 0.4)])
def test_outcome_by_kind(kind, value):
    assert outcome_of("paris paris paris paris", ["paris"], kind) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "alias", "score"),
    [
        ("17", "17", 1),
        ("$1,234.50", "1234.5", 1),
        (" 17 % ", "17", 1),
        ("-5", "5", 0),
        ("seventeen", "17", 0),
        ("", "17", 0),
        ("1e3", "1000", 1),
        ("rome; OSLO", "Rome, Oslo", 1),
        ("Oslo, Rome", "Rome, Oslo", 0),
        ("Rome", "Rome, Oslo", 0),
        ("1.0, two", "1;Two", 1),
        ("1, 3", "1, 2", 0),
        ("St Peters burg!", "St. Petersburg", 1),
        ("Saint Petersburg", "St. Petersburg", 0),
        ("St Petersburg, Oslo", "St. Petersburg, Oslo", 0),
        ("1234", "1,234", 0),
        ("inf", "inf", 1),
        ("inf", "7", 0),
        ("nan", "nan", 1),
        (None, "17", 0),
    ],
)
def test_gaias_quasi_exact_match_goes_by_the_form_of_the_alias(prediction, alias, score):
    """A number, a list (in order, punctuation kept) or text. A thousands comma in the alias makes a
    list of it, as in GAIA's scorer.
    """
    assert outcome_of(prediction, [alias], "gaia") == score


def test_unknown_outcome_kind_is_named():
    with pytest.raises(ValueError, match="outcome reward 'bleu' is none of em, f1"):
        outcome_of("x", ["x"], "bleu")


def trajectory(*actions):
    turns = [
        Turn(2 + t, 3 + t, 3 + t, action, None, None, format_ok=action != "malformed")
        for t, action in enumerate(actions)
    ]
    stop = "answered" if turns else "model_error"
    return Trajectory(
        "run",
        "q",
        0,
        0,
        "?",
        ("x",),
        2,
        [0] * (2 + len(turns)),
        [],
        turns,
        None,
        Outcome(0.0, "ok"),
        stop,
        {},
        {},
    )


def test_format_share_counts_every_turn_once():
    """3 of 4 turns, not the mean 5/6 of the trajectories' own shares."""
    assert (
        format_valid_share([trajectory("search", "malformed", "answer"), trajectory("answer")])
        == 0.75
    )


def test_format_share_of_no_turn_is_absent():
    assert format_valid_share([trajectory()]) is None
