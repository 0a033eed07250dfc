"""A client of one OpenAI-compatible chat endpoint: blocking calls, bounded in time, retried where that can help."""

import json
import random
import re
import time
from dataclasses import dataclass, field

import requests

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504, 524, 529)
SPENT = ("insufficient_quota", "not enough credits", "insufficient balance", "billing")  # a 429 that no waiting cures
MAX_WAIT = 60.0  # seconds before another try, whatever Retry-After says
MAX_BYTES = 1 << 20  # of a response


class ChatError(Exception):
    """A call gave no answer, after all tries: the service is down or busy, or its answer cannot be read. The next call may work."""


class ChatRefusedError(ValueError):
    """The service refuses this client (key, quota, address, model): every further call would fail too, so the run should end."""


@dataclass(frozen=True)
class Completion:
    """The text of an answer; finish_reason `length` means that it was cut off."""

    text: str
    finish_reason: str


@dataclass(frozen=True)
class ChatClient:
    """base_url ends in /v1 or is the full endpoint; timeout: seconds for a whole call, each try; the key is never shown."""

    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 120.0
    tries: int = 4
    first_wait: float = 1.0

    def complete(self, messages: list[dict], **parameters) -> Completion:
        """Return the answer to the messages; parameters (temperature, max_tokens, ..) go into the request as they are.

        ChatRefusedError at once for what no further try can cure, ChatError when the tries are used up. Thread safe.
        """
        for attempt in range(self.tries):
            try:
                return self._try_once({"model": self.model, "messages": messages, **parameters})
            except _RetryError as error:
                if attempt + 1 == self.tries:
                    raise ChatError(f"{self.model} at {self.base_url}: {error} ({self.tries} tries)") from None
                time.sleep(min(error.wait or self.first_wait * 2**attempt * random.uniform(0.5, 1.5), MAX_WAIT))
        raise AssertionError("tries must be at least 1")

    def _try_once(self, body: dict) -> Completion:
        url = self.base_url.rstrip("/")
        url = url if url.endswith("/chat/completions") else url + "/chat/completions"
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            with requests.post(url, json=body, headers=headers, timeout=self.timeout, stream=True, allow_redirects=False) as response:
                return self._read(response, self._body_of(response))
        except requests.RequestException as error:
            raise _RetryError(type(error).__name__) from None  # its text may hold the proxy's address and password

    def _body_of(self, response: requests.Response) -> bytes:
        """Read the body under the deadline: the timeout of `requests` bounds only the wait for the next byte."""
        deadline, body = time.monotonic() + self.timeout, bytearray()
        for byte in response.iter_content(1):  # a larger piece would be waited for until it is full, however slowly it fills
            body += byte
            if time.monotonic() > deadline or len(body) > MAX_BYTES:
                raise _RetryError("the answer is too large" if len(body) > MAX_BYTES else "the answer takes too long")
        return bytes(body)

    def _read(self, response: requests.Response, body: bytes) -> Completion:
        text = body.decode("utf-8", "replace")
        if response.status_code != 200:
            said = " ".join(f"HTTP {response.status_code} {_without(self.api_key, text)}".split())[:300]
            if response.status_code in RETRIED and not any(word in text.lower() for word in SPENT):
                wait = response.headers.get("Retry-After", "")
                raise _RetryError(said, float(wait) if re.fullmatch(r"\d+(\.\d+)?", wait) else None)
            raise ChatRefusedError(f"{self.model} at {self.base_url} refuses: {said}")
        try:
            choice = json.loads(text)["choices"][0]
            return Completion(choice["message"]["content"] or "", choice.get("finish_reason") or "stop")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise _RetryError(f"no chat completion in the answer: {' '.join(text.split())[:200]}") from None


class _RetryError(Exception):
    """One try failed and the next may not; wait: seconds the service asked for."""

    def __init__(self, said: str, wait: float | None = None):
        super().__init__(said)
        self.wait = wait


def _without(secret: str | None, text: str) -> str:
    return text.replace(secret, "***") if secret else text
