"""Outcome rewards by rule (EM, F1, GAIA's) and the share of well-formed turns. A judge is a
callable of its own and lives elsewhere.

Normalisation is SQuAD's: lower case, ASCII punctuation deleted (no space in its place), the
articles a, an, the dropped, white space squeezed: "the U.S.A." -> "usa", "J.K. Rowling" -> "jk
rowling". SQuAD cuts tokens at spaces only, which leaves Chinese and Japanese in one piece (a partly
right answer would score 0), so for F1 each Han or kana character is a token; Hangul is written with
spaces and is not cut. Full-width and typographic punctuation is not ASCII and stays, as in SQuAD.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from venus.trajectory import Trajectory

DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")
CJK = (
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
TOKEN = re.compile(f"[{CJK}]|[^\\s{CJK}]+")
WORD = re.compile(f"[{CJK}]|[^\\W{CJK}]+")
INSIDE = re.compile(r"(?<=\w)[.,'’](?=\w)")  # U.S.A, 13,186, O'Brien


def normalize_answer(text: str) -> str:
    """Return `text` in SQuAD's normal form: "The  Beatles!" -> "beatles"."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(DELETE_PUNCTUATION)).split())


def answer_tokens(text: str) -> list[str]:
    """Split the normal form at spaces and around every Han or kana character: "北京 in 2008" ->
    ["北", "京", "in", "2008"].
    """
    return TOKEN.findall(normalize_answer(text))


def exact_match(prediction: str | None, aliases: Sequence[str]) -> float:
    """Return 1.0 if the normal forms of the prediction and of any alias are equal, else
    0.0 (also for None).
    """
    return _best(_exact, prediction, aliases)


def f1_score(prediction: str | None, aliases: Sequence[str]) -> float:
    """Return the multiset token F1 in [0, 1] with the best alias, 0.0 for None: "paris paris paris
    paris" against "paris" -> .4.
    """
    return _best(_multiset_f1, prediction, aliases)


def quasi_match(prediction: str | None, aliases: Sequence[str]) -> float:
    """Return GAIA's quasi-exact match, 1.0 or 0.0, by the form of the alias: a number ("$1,234" ->
    1234), a list cut at commas and semicolons (as long, element by element), or text without case,
    spaces and punctuation. As there, "1,234" in the alias is a list.
    """
    return _best(_quasi, prediction, aliases)


def answer_seen(text: str, aliases: Sequence[str]) -> bool:
    """Whether an alias stands in the text: its words next to each other; case, articles and
    punctuation aside, that inside a word or number too.

    Needs no model and errs to yes: "2" or "Paris" stand in many pages that say
    nothing on the question.
    """
    said = _words(text)
    return any(_words(alias).strip() and _words(alias) in said for alias in aliases)


def _words(text: str) -> str:
    # search results are JSON, where a newline is two characters
    text = unicodedata.normalize("NFKC", text.replace("\\n", " "))
    words = WORD.findall(INSIDE.sub("", text).lower())
    return f" {' '.join(word for word in words if word not in ('a', 'an', 'the'))} "


REWARDS: dict[str, Callable[[str | None, Sequence[str]], float]] = {
    "em": exact_match,
    "f1": f1_score,
    "gaia": quasi_match,
}


def outcome_of(prediction: str | None, aliases: Sequence[str], kind: str) -> float:
    """Return the outcome reward of a final answer in [0, 1]; None (no answer) -> 0.0. ValueError
    for an unknown kind or no alias.
    """
    if kind not in REWARDS:
        raise ValueError(f"outcome reward {kind!r} is none of {', '.join(REWARDS)}")
    return REWARDS[kind](prediction, aliases)


def format_valid_share(trajectories: Iterable[Trajectory]) -> float | None:
    """Return valid turns / turns over all trajectories (every turn counts the same); None
    when there is no turn.
    """
    valid = [turn.format_ok for trajectory in trajectories for turn in trajectory.turns]
    return sum(valid) / len(valid) if valid else None


def _best(
    score: Callable[[str, str], float], prediction: str | None, aliases: Sequence[str]
) -> float:
    if isinstance(aliases, str) or not aliases:
        raise ValueError(f"ground truth {aliases!r} must be a non-empty list of aliases")
    return 0.0 if prediction is None else max(score(prediction, alias) for alias in aliases)


def _exact(prediction: str, alias: str) -> float:
    pair = normalize_answer(prediction), normalize_answer(alias)
    # "The The", "A", "?" vanish under normalisation: then "the" would match them all.
    # Compare what was written
    if not all(pair):
        pair = prediction.strip().lower(), alias.strip().lower()
    return float(pair[0] == pair[1])


def _quasi(prediction: str, alias: str) -> float:
    if re.search("[,;]", alias):
        said, wanted = (re.split("[,;]", text) for text in (prediction, alias))
        return float(
            len(said) == len(wanted)
            and all(_same_element(*pair, drop="") for pair in zip(said, wanted, strict=True))
        )
    return float(_same_element(prediction, alias, drop=string.punctuation))


def _same_element(prediction: str, alias: str, *, drop: str) -> bool:
    """Compare as numbers if the alias is one, else as text without spaces and
    without those of `drop`.
    """
    if _is_number(alias):
        said = prediction.translate(str.maketrans("", "", "$%,")).strip()
        return _is_number(said) and float(said) == float(alias)
    said, wanted = (
        "".join(c for c in text.lower() if not c.isspace() and c not in drop)
        for text in (prediction, alias)
    )
    return said == wanted


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*", text) is not None


def _multiset_f1(prediction: str, alias: str) -> float:
    predicted, gold = answer_tokens(prediction), answer_tokens(alias)
    if not predicted or not gold:
        return _exact(prediction, alias)
    # 2 P R / (P + R)
    return 2 * (Counter(predicted) & Counter(gold)).total() / (len(predicted) + len(gold))
