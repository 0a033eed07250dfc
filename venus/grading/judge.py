"""Is an answer right? Verdicts correct | incorrect | error, by a rule or from a model behind an
OpenAI-compatible endpoint.

An outage, a refusal to decide and an answer that cannot be read are `error`, never `incorrect`.
Verdicts of a model are cached by content in a JSONL file, so that an interrupted run pays for none
of them twice; errors are not cached.
"""

import hashlib
import json
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

from venus.cli import Options, option
from venus.files import append_jsonl, read_jsonl, repair_tail
from venus.grading.verdicts import PROMPTS, Verdict, item_scores, read_items
from venus.rl.rewards import answer_seen, exact_match, outcome_of
from venus.services.chat import ChatClient, ChatError, ChatRequestError, parse_endpoint


@dataclass(frozen=True)
class Case:
    """What is judged: the prediction (None: no answer) against any of the aliases."""

    question: str
    aliases: tuple[str, ...]
    prediction: str | None


Judge = Callable[[Sequence[Case]], list[Verdict]]

PROMPT = "browsecomp"  # of a model, where no benchmark says
SECONDS = 600.0  # for all tries of a reply


@dataclass(frozen=True)
class JudgeOptions(Options):
    """Flags of whatever asks a judge."""

    judge_calls: int = option(
        16, group="judge", help="judge calls under way at once, of each process", least=1
    )


# ---- rules


def _by_rule(is_right: Callable[[Case], bool]) -> Judge:
    return lambda cases: [
        Verdict("correct" if is_right(case) else "incorrect", case.prediction) for case in cases
    ]


# offline: correct when the normal forms are equal, or an alias's words stand in the
# prediction next to each other
match: Judge = _by_rule(
    lambda case: (
        exact_match(case.prediction, case.aliases)
        or answer_seen(case.prediction or "", case.aliases)
    )
)
RULES = {"match": match} | {
    kind: _by_rule(lambda case, kind=kind: outcome_of(case.prediction, case.aliases, kind) == 1.0)
    for kind in ("em", "gaia")
}


# ---- a model


class ModelJudge:
    """Asks the model about every case that is neither an exact match nor without an answer, several
    at a time. Use it within `closing`.
    """

    def __init__(
        self,
        client: ChatClient,
        cache: Path,
        num_threads: int,
        prompt: str = PROMPT,
        seconds: float = SECONDS,
    ):
        """Open the cache, a JSONL file that may not exist yet; a torn last line is cut off."""
        self.client = client
        self.pool = ThreadPoolExecutor(num_threads)
        self.prompt = PROMPTS[prompt]
        self.seconds = seconds
        self._known = {}
        self._origin = {"judge": client.model, "prompt": prompt, "prompt_hash": self.prompt.hash}
        names = {field.name for field in fields(Verdict)}
        for where, row in read_jsonl(cache, torn_tail=True) if cache.exists() else ():
            if not {"key", "verdict"} <= row.keys() <= names | {"key"}:
                raise ValueError(f"{where}: not a cached verdict; name another file for them")
            key = row.pop("key")
            self._known[key] = Verdict(**row)
        repair_tail(cache)
        cache.parent.mkdir(parents=True, exist_ok=True)
        # it lives as long as the judge
        self._cache = open(cache, "a", encoding="utf-8")  # noqa: SIM115

    def __call__(self, cases: Sequence[Case]) -> list[Verdict]:
        """Return a verdict per case, in order. ChatRefusedError when the service refuses the
        client; what had come by then is cached.
        """
        keys = [self._key(case) for case in cases]
        by_key = dict(zip(keys, cases, strict=True))
        verdicts = {
            key: self._known.get(key) or self._plainly(case) for key, case in by_key.items()
        }
        asked = {
            self.pool.submit(self._ask, case): key
            for key, case in by_key.items()
            if verdicts[key] is None
        }
        refusal = None
        # written as they come, so that a killed run has paid for none in vain
        for future in as_completed(asked):
            try:
                verdicts[asked[future]] = verdict = future.result()
            except CancelledError:
                continue
            except ValueError as error:
                refusal = refusal or error
                for other in asked:
                    other.cancel()
                continue
            if verdict.verdict != "error":
                self._known[asked[future]] = verdict
                append_jsonl(self._cache, {"key": asked[future], **vars(verdict)})
        if refusal:
            raise refusal
        return [verdicts[key] for key in keys]

    def _key(self, case: Case) -> str:
        parts = [
            case.question,
            case.aliases,
            case.prediction,
            self.client.base_url,
            self.client.model,
            self.prompt.hash,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def _plainly(self, case: Case) -> Verdict | None:
        """Decide what needs no model: no answer, or the words of an alias. (`exact_match` ignores
        punctuation, but 1.5 is not 15.)
        """
        items = self.prompt.read is read_items
        prediction = _folded(case.prediction or "")
        if not prediction:
            return Verdict("incorrect", scores=item_scores(0, 1, 0) if items else None)
        if prediction not in map(_folded, case.aliases):
            return None
        return Verdict("correct", case.prediction, scores=item_scores(1, 0, 0) if items else None)

    def _ask(self, case: Case) -> Verdict:
        prompt = self.prompt.text.format(
            question=case.question, prediction=case.prediction, reference=" or ".join(case.aliases)
        )
        for temperature in (0.0, 1.0):  # a reply that cannot be read is asked for once more
            try:
                reply = self.client.complete(
                    [{"role": "user", "content": prompt}],
                    seconds=self.seconds,
                    temperature=temperature,
                )
            except (ChatError, ChatRequestError) as error:
                if isinstance(error, ChatRequestError) and not error.too_long:
                    raise
                return Verdict("error", error=str(error), **self._origin)
            if reply.finish_reason == "length":
                verdict = Verdict("error", raw=reply.text, error="the reply was cut off")
            else:
                verdict = self.prompt.read(reply.text)
            if verdict.verdict != "error":
                break
        return replace(verdict, **self._origin)

    def close(self) -> None:
        """Drop the calls not yet begun and close the cache."""
        self.pool.shutdown(cancel_futures=True)
        self._cache.close()


def _folded(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(" .*`\"'“”")


def parse_judge(spec: str) -> tuple[str, str] | None:
    """Split openai:BASE_URL:MODEL into base url and model, None for the name of a rule and `none`.
    ValueError for anything else.
    """
    rules = (*RULES, "none")
    return None if spec in rules else parse_endpoint(spec, "judge", *rules)


@contextmanager
def open_judge(
    spec: str,
    key: str | None,
    cache: Path,
    num_threads: int,
    *,
    prompt: str = PROMPT,
    seconds: float = SECONDS,
) -> Iterator[Judge]:
    """Yield the judge that `spec` names (`none`: one that is never asked); a model's verdicts are
    cached in `cache`.
    """
    endpoint = parse_judge(spec)
    if endpoint is None:
        yield RULES.get(spec, match)
        return
    client = ChatClient(*endpoint, key)
    with closing(ModelJudge(client, cache, num_threads, prompt, seconds)) as judge:
        yield judge
