"""Is an answer right? Verdicts correct | incorrect | error, from the offline matcher or from a model behind an OpenAI-compatible endpoint.

An outage, a refusal to decide and an answer that cannot be read are `error`, never `incorrect`. Verdicts of a model are cached by content in
a JSONL file, so that an interrupted run pays for none of them twice; errors are not cached.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from venus.chat_api import ChatClient, ChatError
from venus.jsonl import append_jsonl, read_jsonl, repair_tail
from venus.rewards import answer_tokens, exact_match

PROMPT = """Compare a response with the reference answer to a question. Do not solve the question and do not argue for another answer: the \
only matter is whether the response's final answer means the same as the reference.

Question: {question}

Response: {prediction}

Reference answer: {reference}

Reply with exactly three lines:
extracted: the final answer that the response gives, or None
reasoning: what differs between it and the reference, if anything; small deviations of numbers and of spelling do not matter
correct: yes if they agree, no if they do not or if there is no final answer"""
PROMPT_HASH = hashlib.sha256(PROMPT.encode()).hexdigest()[:12]
VERDICT = re.compile(r"^[\s{,>-]*correct\s*:\s*(yes|no)\b", re.MULTILINE | re.IGNORECASE)
EXTRACTED = re.compile(r"^[\s{,>-]*extracted\s*:(.*)", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class Verdict:
    """What the judge says, the answer it read, what it wrote (None: no model was asked), and what failed."""

    verdict: str  # correct | incorrect | error
    extracted: str | None = None
    raw: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Case:
    """What is judged: the prediction against any of the aliases."""

    question: str
    aliases: tuple[str, ...]
    prediction: str


Judge = Callable[[Sequence[Case]], list[Verdict]]


def match(cases: Sequence[Case]) -> list[Verdict]:
    """Judge offline: correct when the normal forms are equal, or an alias's words stand in the prediction next to each other."""
    verdicts = []
    for case in cases:
        said = answer_tokens(_ascii_punctuation(case.prediction))
        wanted = [tokens for alias in case.aliases if (tokens := answer_tokens(_ascii_punctuation(alias)))]
        contained = any(said[k : k + len(tokens)] == tokens for tokens in wanted for k in range(len(said)))
        verdicts.append(Verdict("correct" if contained or exact_match(case.prediction, case.aliases) else "incorrect"))
    return verdicts


def _ascii_punctuation(text: str) -> str:
    """Fold full-width and typographic forms, which the normal form of the rewards keeps: every dash is "-", other such punctuation goes."""
    kinds = ((c, unicodedata.category(c)) for c in unicodedata.normalize("NFKC", text))
    return "".join("-" if kind == "Pd" else "" if kind[0] == "P" and not c.isascii() else c for c, kind in kinds)


def read_verdict(text: str) -> Verdict:
    """Read a judge's reply: the LAST line that begins with `correct:`, markdown, JSON quotes and full-width forms aside; else `error`."""
    plain = re.sub(r'[*_`"]', "", unicodedata.normalize("NFKC", text.rpartition("</think>")[2]))
    verdicts, extracted = VERDICT.findall(plain), EXTRACTED.search(plain)
    if not verdicts:
        return Verdict("error", raw=text, error="no line `correct: yes` or `correct: no`")
    return Verdict("correct" if verdicts[-1].lower() == "yes" else "incorrect", extracted[1].strip(" ,") if extracted else None, text)


class ModelJudge:
    """Asks the model about every case that is no exact match, several at a time. Keeps one digest and one word per verdict in memory."""

    def __init__(self, client: ChatClient, cache: Path, num_threads: int):
        """Open the cache, a JSONL file that may not exist yet; a torn last line is cut off."""
        self.client, self.pool, self._known = client, ThreadPoolExecutor(num_threads), {}
        for where, row in read_jsonl(cache, torn_tail=True) if cache.exists() else ():
            if not {"key", "verdict"} <= row.keys():
                raise ValueError(f"{where}: not a cached verdict; name another file for them")
            self._known[row["key"]] = row["verdict"]
        repair_tail(cache)
        cache.parent.mkdir(parents=True, exist_ok=True)
        self._cache = open(cache, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the judge

    def __call__(self, cases: Sequence[Case]) -> list[Verdict]:
        """Return a verdict per case, in order. ChatRefusedError when the service refuses the client."""
        keys = [self._key(case) for case in cases]
        unknown = {key: case for key, case in zip(keys, cases, strict=True) if key not in self._known}
        asked = {key: self.pool.submit(self._ask, case) for key, case in unknown.items() if not exact_match(case.prediction, case.aliases)}
        wait(asked.values())  # if one was refused, the verdicts of the others are kept all the same
        answers = {}
        for key, future in sorted(asked.items(), key=lambda pair: pair[1].exception() is not None):
            answers[key] = verdict = future.result()
            if verdict.verdict != "error":
                self._known[key] = verdict.verdict
                append_jsonl(self._cache, {"key": key, **vars(verdict), "judge": self.client.model, "prompt_hash": PROMPT_HASH})
        return [answers.get(key) or Verdict(self._known.get(key, "correct")) for key in keys]

    def _key(self, case: Case) -> str:
        parts = [case.question, case.aliases, case.prediction, self.client.base_url, self.client.model, PROMPT_HASH]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def _ask(self, case: Case) -> Verdict:
        prompt = PROMPT.format(question=case.question, prediction=case.prediction, reference=" or ".join(case.aliases))
        try:
            reply = self.client.complete([{"role": "user", "content": prompt}], temperature=0.0)
        except ChatError as error:
            return Verdict("error", error=str(error))
        return Verdict("error", raw=reply.text, error="the reply was cut off") if reply.finish_reason == "length" else read_verdict(reply.text)

    def close(self) -> None:
        """Drop the calls not yet begun and close the cache."""
        self.pool.shutdown(cancel_futures=True)
        self._cache.close()


def parse_judge(spec: str) -> tuple[str, str] | None:
    """Split openai:BASE_URL:MODEL into base url and model, None for `match` and `none`. ValueError for anything else."""
    if spec in ("match", "none"):
        return None
    found = re.fullmatch(r"openai:(https?://[^/\s]+(?:/[^\s:]*)?):(\S+)", spec)
    if not found:
        raise ValueError(f"judge {spec!r}: give match, none or openai:BASE_URL:MODEL, such as openai:http://127.0.0.1:8000/v1:qwen3")
    return found[1], found[2]
