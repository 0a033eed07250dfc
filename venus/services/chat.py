"""A client of one OpenAI-compatible chat endpoint: blocking calls, bounded in time, retried
where that can help.
"""

import math
import re
from dataclasses import dataclass, field

from venus.services.http import CallError as ChatError
from venus.services.http import RefusedError as ChatRefusedError
from venus.services.http import Reply, TryError, exchange, with_tries

MAX_BYTES = 1 << 20  # of a response
# no password: flags are saved with the run
ENDPOINT = re.compile(r"openai:(?!https?://[^/\s]*@)(https?://[^/\s]+(?:/[^\s:]*)?):(\S+)")
TOO_LONG = re.compile(
    r"context.?(length|window)|prompt is too long|too many tokens|reduce the length", re.IGNORECASE
)


class ChatRequestError(ChatRefusedError):
    """The service refuses this request, not the client; too_long: its messages do not fit
    the model's context.
    """

    def __init__(self, said: str, *, too_long: bool):
        super().__init__(said)
        self.too_long = too_long


@dataclass(frozen=True)
class Completion:
    """The text of an answer; finish_reason `length` means that it was cut off; reasoning: thoughts
    that the server keeps apart from the text.
    """

    text: str
    finish_reason: str
    reasoning: str = ""


@dataclass(frozen=True)
class ChatClient:
    """base_url ends in /v1 or is the full endpoint; timeout: seconds for a whole call, each try;
    the key is never shown.
    """

    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 120.0
    tries: int = 4
    first_wait: float = 1.0

    def complete(
        self, messages: list[dict], *, seconds: float = math.inf, **parameters
    ) -> Completion:
        """Return the answer to the messages; parameters (temperature, max_tokens, ..) go into the
        request as they are.

        seconds: for all tries together. ChatRefusedError at once for what no further try can cure
        (ChatRequestError where another request might pass), ChatError when the tries or the time
        are used up. Thread safe.
        """
        body = {"model": self.model, "messages": messages, **parameters}
        return self._with_tries(
            lambda left: _read(self._ask("POST", "/chat/completions", left, body), _completion),
            seconds,
        )

    def models(self) -> list[str]:
        """Names of the models that the endpoint serves. Errors as of `complete`."""
        return self._with_tries(
            lambda left: _read(
                self._ask("GET", "/models", left, None),
                lambda answer: [row["id"] for row in answer["data"]],
            ),
            math.inf,
        )

    def _with_tries(self, attempt, seconds: float):
        try:
            return with_tries(
                attempt, tries=self.tries, first_wait=self.first_wait, seconds=seconds
            )
        except ChatError as error:
            raise ChatError(f"{self.model}: {error}", timed_out=error.timed_out) from None

    def _ask(self, method: str, path: str, left: float, body: dict | None) -> Reply:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        url = self.base_url.rstrip("/").removesuffix("/chat/completions") + path
        reply = exchange(
            method,
            url,
            seconds=min(self.timeout, left),
            max_bytes=MAX_BYTES,
            headers=headers,
            body=body,
        )
        if reply.status != 200:
            reply.raise_if_passing(self.api_key)
            if reply.status in (400, 413, 422) and not reply.spent:
                raise ChatRequestError(
                    f"{self.model} refuses this request: {reply.fault(self.api_key)}",
                    too_long=bool(TOO_LONG.search(reply.text)),
                )
            raise ChatRefusedError(
                f"{self.model} at {self.base_url} refuses: {reply.fault(self.api_key)}"
            )
        return reply


def _completion(answer: dict) -> Completion:
    choice = answer["choices"][0]
    message = choice["message"]
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    return Completion(message["content"] or "", choice.get("finish_reason") or "stop", reasoning)


def _read(reply: Reply, read):
    """What `read` makes of the JSON of an answer; TryError when the answer has another form."""
    try:
        return read(reply.json_object())
    except (KeyError, IndexError, TypeError, AttributeError):
        raise TryError(f"no such answer: {' '.join(reply.text.split())[:200]}") from None


def parse_endpoint(spec: str, flag: str, *others: str) -> tuple[str, str]:
    """Split openai:BASE_URL:MODEL into base url and model; ValueError names the flag
    and what else it takes.
    """
    found = ENDPOINT.fullmatch(spec)
    if not found:
        forms = (
            f"{', '.join(others)} or openai:BASE_URL:MODEL" if others else "openai:BASE_URL:MODEL"
        )
        raise ValueError(
            f"{flag} {spec!r}: give {forms}, such as openai:http://127.0.0.1:8000/v1:qwen3"
        )
    return found[1], found[2]
