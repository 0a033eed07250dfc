"""What a judge is asked, benchmark by benchmark, and how its reply is read: as a verdict, correct
| incorrect | error.

The prompts follow the outlines of the benchmarks' own, in other words; their hashes are recorded,
since scores under two prompts do not compare.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """What the judge says and why. None: not given.

    extracted   the answer it read in the response
    scores      item_scores, where items are judged
    raw         what the model wrote
    error       what failed
    judge, prompt, prompt_hash
                the model and what it was asked; all None: decided without one
    """

    verdict: str  # correct | incorrect | error
    extracted: str | None = None
    scores: dict | None = None
    raw: str | None = None
    error: str | None = None
    judge: str | None = None
    prompt: str | None = None
    prompt_hash: str | None = None


# ---- the replies of a model

# at the beginning of a line: prose and `incorrect: no` hold the word too
LABEL = r"^[\s{,>#\-\d.)]*(?:%s)\s*:\s*"
# `no doubt` is no `no`, `yes/no` is the form that was asked for
END = r"(?=\s*(?:$|[-.,;:!()\[\]{}。】—]))"
FLAGS = re.MULTILINE | re.IGNORECASE
VERDICT = re.compile(
    LABEL % "correct|结论" + r"[\[【(]?\s*(yes|no|true|false|正确|不正确|错误)" + END, FLAGS
)
EXTRACTED = re.compile(
    LABEL.removesuffix(r"\s*") % "extracted(?: ?final ?answer)?|最终答案" + "(.*)", FLAGS
)
ONE_WORD = re.compile(r"(?:^|[,:;])\s*(correct|incorrect)[.!]?\s*$", FLAGS)


def _plain_and_json(text: str) -> tuple[str, dict]:
    """Return a reply without its thoughts, full-width forms folded, and the JSON object in it ({}
    for none), which becomes lines `key: value`.
    """
    text = unicodedata.normalize("NFKC", text.rpartition("</think>")[2].partition("<think>")[0])
    start, end = text.find("{"), text.rfind("}") + 1
    try:
        found = json.loads(text[start:end]) if 0 <= start < end else {}
    except (ValueError, RecursionError):
        return text, {}
    lines = [f"{key}: {' '.join(str(value).split())}" for key, value in found.items()]
    return "\n".join([text[: max(start, 0)], *lines, text[end:]]), found


def read_verdict(text: str) -> Verdict:
    """Read a reply in labelled lines, English or Chinese, or JSON: the LAST line that begins with
    `correct:`, markdown aside, counts; else `error`.
    """
    plain = re.sub(r'[*_`"]', "", _plain_and_json(text)[0])
    verdicts, extracted = VERDICT.findall(plain), EXTRACTED.findall(plain)
    if not verdicts:
        return Verdict("error", raw=text, error="no line `correct: yes` or `correct: no`")
    right = verdicts[-1].lower() in ("yes", "true", "正确")
    return Verdict(
        "correct" if right else "incorrect",
        extracted[-1].strip(" ,") if extracted else None,
        raw=text,
    )


def read_word(text: str) -> Verdict:
    """Read the reply `Correct` or `Incorrect`: the last line that is, or behind a comma or colon
    ends with, one of the words; else `error`.
    """
    words = ONE_WORD.findall(re.sub(r'[*_`"]', "", _plain_and_json(text)[0]))
    if not words:
        return Verdict("error", raw=text, error="not the one word Correct or Incorrect")
    return Verdict(words[-1].lower(), raw=text)


def read_items(text: str) -> Verdict:
    """Read DeepSearchQA's JSON, {correctness_details: {expected item: bool}, excessive_answers:
    [..]}; correct = all items and no other.
    """
    _, found = _plain_and_json(text)
    details, excessive = found.get("correctness_details"), found.get("excessive_answers")
    if (
        not isinstance(excessive, list)
        or not isinstance(details, dict)
        or not details
        or not all(type(v) is bool for v in details.values())
    ):
        return Verdict(
            "error", raw=text, error="no JSON object with correctness_details and excessive_answers"
        )
    scores = item_scores(
        sum(details.values()), len(details) - sum(details.values()), len(excessive)
    )
    return Verdict("correct" if scores["f1"] == 1 else "incorrect", scores=scores, raw=text)


def item_scores(found: int, missing: int, excessive: int) -> dict:
    """Precision, recall and F1 of one answer's items (0.0 when none was found), and DeepSearchQA's
    two classes between right and wrong.
    """
    return {
        "precision": found / (found + excessive) if found else 0.0,
        "recall": found / (found + missing) if found else 0.0,
        "f1": 2 * found / (2 * found + missing + excessive) if found else 0.0,
        "correct_with_excessive": found > 0 == missing and excessive > 0,
        "fully_incorrect": found == 0,
    }


# ---- what a model is asked


@dataclass(frozen=True)
class Prompt:
    """A question to the judge (fields: question, prediction, reference) and the
    reader of its reply.
    """

    text: str
    read: Callable[[str], Verdict] = read_verdict

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]


GIVEN = "Question: {question}\n\nResponse: {prediction}\n\nReference answer: {reference}\n\n"
COMPARE = """Compare a response with the reference answer to a question. Do not solve the question \
and do not argue for another answer: the only matter is whether the response's final answer means \
the same as the reference."""
LINES = """Reply with exactly four lines:
extracted: the final answer that the response gives, or None
reasoning: what differs between it and the reference, if anything; \
small deviations of numbers and of spelling do not matter
correct: yes if they agree, no if they do not or if there is no final answer
confidence: the percentage of certainty that the response itself states, or None"""
CHINESE = """请比较回答与参考答案。不要自己解题,也不要替别的答案辩护:\
唯一要判断的是,回答的最终答案与参考答案意思是否相同。

问题: {question}

回答: {prediction}

参考答案: {reference}

请严格按以下几行输出:
最终答案: 回答给出的最终答案,没有则写“无”
解释: 它与参考答案有何不同;数值上的细微误差和写法、语言上的差别不算不同
结论: 一致写“正确”,不一致或没有最终答案写“错误”"""
PROMPTS = {
    "browsecomp": Prompt(f"{COMPARE}\n\n{GIVEN}{LINES}"),
    "browsecomp-zh": Prompt(CHINESE + "\n置信度: 回答自己声明的把握(百分数),没有则写“无”"),
    "browsecomp-plus": Prompt(
        f"{COMPARE} Another form of the same name, date or number agrees with it, and so "
        "does an answer that adds more detail, "
        f"as long as nothing in it contradicts the reference.\n\n{GIVEN}{LINES}"
    ),
    "gaia": Prompt(
        f"{COMPARE}\n\n{GIVEN}Reply with one word and nothing else, Correct or Incorrect.",
        read_word,
    ),
    "xbench": Prompt(CHINESE),
    "deepsearchqa": Prompt(
        f"""{COMPARE} The reference may list several items. Go through them one by one, \
in any order.

{GIVEN}Reply with one JSON object and nothing else:
{{{{"explanation": "how the two differ", "correctness_details": {{{{"each item of the reference": \
whether the response's answer has it, true or false}}}}, \
"excessive_answers": ["each item of the response's answer that is none of the reference"]}}}}""",
        read_items,
    ),
}
