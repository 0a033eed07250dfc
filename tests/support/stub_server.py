"""Services on 127.0.0.1 that answer as a test tells them to and remember what they were asked:
Serper, Jina Reader, an OpenAI-compatible endpoint.

Not spoken: server-sent events and the local retrieval routes of other agents, which no
client of ours uses.
"""

import json
import random
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAX_REQUESTS = 500  # a client that retries for ever ends here


def completion(text, finish_reason="stop", **message):
    """The body of a chat completion."""
    return {
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, **message},
                "finish_reason": finish_reason,
            }
        ]
    }


def summary(evidence, text, rational="It says so."):
    """A chat completion with the summary of a page."""
    return completion(json.dumps({"rational": rational, "evidence": evidence, "summary": text}))


def models(*names):
    """The body of /v1/models."""
    return {"object": "list", "data": [{"id": name, "object": "model"} for name in names]}


def organic(*hits):
    """The body of a Serper answer; each hit a dict of title, link, snippet, date."""
    return {"searchParameters": {"q": "?", "type": "search"}, "organic": list(hits), "credits": 1}


def jina(content, title="T", **data):
    """The body of a Jina answer."""
    return {
        "code": 200,
        "status": 20000,
        "data": {"title": title, "content": content, "url": "u", "usage": {"tokens": 9}, **data},
    }


def jina_error(code, name, message):
    """The body of Jina's errors."""
    return {
        "data": None,
        "code": code,
        "name": name,
        "status": code * 100,
        "message": message,
        "readableMessage": f"{name}: {message}",
    }


def flaky(reply, *, share, seed):
    """A reply that fails with HTTP 500 on a seeded share of the calls, whichever they are;
    `failed` counts them.
    """
    generator, lock = random.Random(seed), threading.Lock()

    def answer(body, number):
        with lock:
            fails = generator.random() < share
            answer.failed += fails
        return (500, "the dice said so", {}) if fails else reply(body, number)

    answer.failed = 0
    return answer


def strict(reply, *fields):
    """A reply that refuses a request with a field that is none of these, as strict endpoints do."""

    def answer(body, number):
        unknown = sorted(set(body) - set(fields))
        error = {
            "error": {
                "message": f"Unrecognized request argument supplied: {', '.join(unknown)}",
                "type": "invalid_request_error",
            }
        }
        return (400, error, {}) if unknown else reply(body, number)

    return answer


class Stub:
    """reply(request body, number of the request) -> (status, body: dict, str or bytes, headers), or
    a number of seconds to trickle bytes for, or a function of the handler. routes {"POST
    /v1/search": reply, ..} go before it; `most` is how many requests were under way at once.
    """

    def __init__(self, reply, routes):
        self.reply, self.routes, self.requests, self.lock = reply, routes, [], threading.Lock()
        self.url, self.now, self.most = "", 0, 0

    def handle(self, handler):
        body = json.loads(
            handler.rfile.read(int(handler.headers.get("Content-Length", 0))) or "null"
        )
        with self.lock:
            number = len(self.requests)
            self.requests.append(
                {
                    "method": handler.command,
                    "path": handler.path,
                    "body": body,
                    "headers": dict(handler.headers),
                }
            )
            self.now += 1
            self.most = max(self.most, self.now)
        reply = self.routes.get(f"{handler.command} {handler.path}", self.reply)
        answer = reply(body, number) if number < MAX_REQUESTS else (418, "too many requests", {})
        with self.lock:
            self.now -= 1
        try:
            if isinstance(answer, (int, float)):
                trickle(handler, answer)
            elif callable(answer):
                answer(handler)
            else:
                send(handler, *answer)
        except OSError:  # the client has gone, as it should
            return

    def asked(self, path):
        """The bodies of the requests to a path."""
        return [request["body"] for request in self.requests if request["path"] == path]


def nowhere(body, number):
    """The reply of a server that knows no such path."""
    return 404, {"message": "Not Found"}, {}


def send(handler, status, content, headers):
    """Send a whole answer; headers may contradict it."""
    content = (
        content
        if isinstance(content, bytes)
        else (content if isinstance(content, str) else json.dumps(content)).encode()
    )
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(content)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(content)


def trickle(handler, seconds):
    """Send a byte now and then: each arrives in time, the whole never does."""
    handler.send_response(200)
    handler.end_headers()
    _drip(handler, seconds, b" ")


def trickle_headers(handler, seconds=5.0):
    """As `trickle`, but the headers never come to their end."""
    handler.wfile.write(b"HTTP/1.0 200 OK\r\nX-Slow: ")
    _drip(handler, seconds, b"x")


def hang(handler, seconds=5.0):
    """Say nothing until the client has gone."""
    handler.connection.settimeout(seconds)
    handler.rfile.read(1)


def _drip(handler, seconds, byte):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        handler.wfile.write(byte)
        handler.wfile.flush()
        time.sleep(0.05)


@contextmanager
def serve(reply=nowhere, routes=()):
    """Yield a Stub that is listening."""
    stub = Stub(reply, dict(routes))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            stub.handle(self)

        do_GET = do_POST

        def log_message(self, *arguments):
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
