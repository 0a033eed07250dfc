"""One HTTP request, bounded as a whole, and one rule for when another try may help. All that leaves
this machine leaves it here.
"""

import contextlib
import email.utils
import ipaddress
import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504, 524, 529)
# a 429 that no waiting cures
SPENT = ("insufficient_quota", "not enough credits", "insufficient balance", "billing")
TOO_LATE = "the answer takes too long"
MAX_WAIT = 60.0  # seconds before another try, whatever Retry-After says
NAT64 = ipaddress.ip_network("64:ff9b::/96")
T = TypeVar("T")


class CallError(Exception):
    """A call gave no answer, after all tries: the service is down, busy or too slow, or its answer
    cannot be read. The next call may work.
    """

    def __init__(self, said: str, *, timed_out: bool = False):
        super().__init__(said)
        self.timed_out = timed_out


class RefusedError(ValueError):
    """The service refuses this client (key, quota, address, model): every further call would fail
    too, so the run should end.
    """

    exit_code = 1


class AddressError(RefusedError):
    """An address that cannot be asked, or that a model may not make us ask."""

    exit_code = 2  # it was given by a flag: what a model asks for ends no run


class TryError(Exception):
    """One try failed and the next may not; wait: seconds the service asked for."""

    def __init__(self, said: str, wait: float | None = None, *, timed_out: bool = False):
        super().__init__(said)
        self.wait, self.timed_out = wait, timed_out


@dataclass(frozen=True)
class Reply:
    """What a service answered; the names of `headers` are matched in any case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def fault(self, key: str | None) -> str:
        """The status and the service's own words in one line, without the key."""
        text = _message(self.text)
        if key:
            text = text.replace(key, "***")
        return " ".join(f"HTTP {self.status} {text}".split())[:300]

    def raise_if_passing(self, key: str | None) -> None:
        """TryError for a fault that passes. A spent quota does not, whatever its status."""
        if self.status in RETRIED and not self.spent:
            raise TryError(self.fault(key), retry_after(self.headers))

    @property
    def spent(self) -> bool:
        return self.status != 200 and any(word in self.text.lower() for word in SPENT)

    def json_object(self) -> dict:
        """The JSON object in the body; TryError when it is something else."""
        answer = json_or_none(self.text)
        if not isinstance(answer, dict):
            raise TryError(f"no JSON object in the answer: {' '.join(self.text.split())[:200]}")
        return answer


def json_or_none(text: str) -> object:
    """The JSON value that a text is; None for any other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _message(text: str) -> str:
    """The message of an error in the shapes of OpenAI, vLLM, Ollama, Serper, Jina and FastAPI; any
    other text as it is.
    """
    error = json_or_none(text)
    if isinstance(error, dict):
        error = error.get("error", error)
    if isinstance(error, dict):
        names = ("readableMessage", "message", "detail", "code")
        return next((str(error[name]) for name in names if error.get(name)), text)
    return error if isinstance(error, str) else text


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that Retry-After asks for, given as a number or as a date; None without it."""
    value = headers.get("Retry-After", "")
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    with contextlib.suppress(ValueError, TypeError, OverflowError):  # no date either
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    return None


def with_tries(
    attempt: Callable[[float], T], *, tries: int, first_wait: float, seconds: float
) -> T:
    """Return what attempt(seconds left) returns. After a TryError try again, `tries` times and for
    `seconds` in all; then CallError.

    Between two tries: what the service asked for and up to a quarter more, or first_wait doubled
    each time, half of it to one and a half.
    """
    due = time.monotonic() + seconds
    for number in range(1, tries + 1):
        try:
            return attempt(due - time.monotonic())
        except TryError as error:
            if error.wait is None:
                wait = first_wait * 2 ** (number - 1) * random.uniform(0.5, 1.5)
            else:
                wait = error.wait * random.uniform(1.0, 1.25)
            wait = min(wait, MAX_WAIT)
            if number == tries or time.monotonic() + wait >= due:
                raise CallError(f"{error} ({number} tries)", timed_out=error.timed_out) from None
            time.sleep(wait)
    raise AssertionError("tries must be at least 1")


def exchange(
    method: str,
    url: str,
    *,
    seconds: float,
    max_bytes: int,
    headers: Mapping[str, str],
    body: dict | None = None,
    proxy: str | None = None,
    public_only: bool = False,
) -> Reply:
    """Send one request, `body` as JSON, and read the answer, all of it within `seconds`.
    Redirects are not followed.

    proxy None: those of the environment (HTTPS_PROXY and so on). public_only: speak to addresses of
    the public internet alone, see `check_public`. TryError: no answer, or none in time. CallError:
    one of more than max_bytes. AddressError: no web address, or not a public one.
    """
    if seconds <= 0:
        raise TryError("no time left", timed_out=True)
    if not all(value.isascii() and value.isprintable() for value in headers.values()):
        # requests would show it in its error
        raise RefusedError(f"the key for {url} holds a character that no key has; copy it anew")
    with _Deadline(seconds) as deadline, _session(deadline, public_only) as session:
        try:
            if public_only:
                check_public(url)
            with session.request(
                method,
                url,
                json=body,
                headers=dict(headers),
                timeout=seconds,
                stream=True,
                allow_redirects=False,
                proxies={"http": proxy, "https": proxy} if proxy else {},
            ) as response:
                content = _content(response, max_bytes)
        except AddressError:
            raise
        except ValueError:  # of requests and urllib3: a URL that neither can read
            raise AddressError(f"{url[:200]!r} is no web address") from None
        except requests.RequestException as error:
            late = deadline.passed or isinstance(error, requests.Timeout)
            # its text may hold the proxy's address and password
            fault = TOO_LATE if late else type(error).__name__
            raise TryError(fault, timed_out=late) from None
        if deadline.passed:  # a body without a length simply ends where the connection was cut
            raise TryError(TOO_LATE, timed_out=True)
        return Reply(response.status_code, response.headers, content)


def _session(deadline: "_Deadline", public_only: bool) -> requests.Session:
    session = requests.Session()
    # else a password in ~/.netrc would take the place of the key
    session.auth = lambda request: request
    session.adapters = {"http": _Adapter(deadline, public_only)}  # a prefix: https as well
    return session


def _content(response: requests.Response, max_bytes: int) -> bytes:
    content = bytearray()
    for piece in response.iter_content(1 << 14):
        content += piece
        if len(content) > max_bytes:
            raise CallError("the answer is too large")  # and will be so again
    return bytes(content)


def check_public(url: str) -> None:
    """AddressError for anything but http and https, and for a host with an address outside the
    public internet. A host unknown here passes.
    """
    parts = urlsplit("")
    with contextlib.suppress(requests.RequestException, ValueError):
        parts = urlsplit(requests.Request("GET", url).prepare().url)  # as it will be sent
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise AddressError(f"{url[:200]!r} is no web address")
    with contextlib.suppress(OSError, UnicodeError):
        for found in socket.getaddrinfo(parts.hostname, None, type=socket.SOCK_STREAM):
            _check_address(found[4][0])


def _check_address(address: str) -> None:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.version == 6:  # an IPv4 address inside an IPv6 one is where the packets go
        inside = ipaddress.ip_address(int(ip) & 0xFFFFFFFF) if ip in NAT64 else None
        ip = ip.ipv4_mapped or ip.sixtofour or inside or ip
    if not ip.is_global or ip.is_multicast:
        raise AddressError(f"{address} is not an address of the public internet")


class _Deadline:
    """Cuts the connections made under it when its time is up. The timeout of `requests` bounds only
    the wait for the next byte.
    """

    def __init__(self, seconds: float):
        self.passed = False
        self._connections = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True

    def __enter__(self) -> "_Deadline":
        self._timer.start()
        return self

    def __exit__(self, *_) -> None:
        self._timer.cancel()
        for connection in self._connections:
            connection.close()

    def watch(self, connection: socket.socket) -> None:
        """Take a connection into care, by a second handle: TLS takes the first one over."""
        with self._lock:
            self._connections.append(connection.dup())
        if self.passed:
            self._cut()

    def _cut(self) -> None:
        with self._lock:
            self.passed = True
            for connection in self._connections:
                with contextlib.suppress(OSError):  # closed already
                    connection.shutdown(socket.SHUT_RDWR)


class _Watched:
    """Mixed into a connection of urllib3: a deadline watches it, and its peer is checked once more,
    since a name may lead elsewhere than a moment ago.
    """

    deadline: _Deadline
    public_only: bool

    def _new_conn(self):
        connection = super()._new_conn()
        try:
            if self.public_only:
                _check_address(connection.getpeername()[0])
            self.deadline.watch(connection)
        except (AddressError, OSError):
            connection.close()
            raise
        return connection


class _Adapter(HTTPAdapter):
    """An adapter of requests whose connections are `_Watched`."""

    def __init__(self, deadline: _Deadline, public_only: bool):
        self._deadline = deadline
        super().__init__()
        self._watch(self.poolmanager, public_only)

    def proxy_manager_for(self, proxy, **options):
        """As in requests; the peer of such a connection is the proxy, which may well be private."""
        return self._watch(super().proxy_manager_for(proxy, **options), False)

    def _watch(self, manager, public_only: bool):
        settings = {"deadline": self._deadline, "public_only": public_only}
        pools = {}
        for scheme, pool in manager.pool_classes_by_scheme.items():
            connection = type("Connection", (_Watched, pool.ConnectionCls), settings)
            pools[scheme] = type("Pool", (pool,), {"ConnectionCls": connection})
        manager.pool_classes_by_scheme = pools
        return manager
