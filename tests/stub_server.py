"""An OpenAI-compatible endpoint on 127.0.0.1 that answers as a test tells it to and remembers what it was asked."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAX_REQUESTS = 500  # a client that retries for ever ends here


def completion(text, finish_reason="stop"):
    """The body of a chat completion."""
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}]}


class Stub:
    """reply(request body, number of the request) -> (status, body: dict, str or bytes, headers) or a number of seconds to trickle bytes for."""

    def __init__(self, reply):
        self.reply, self.requests, self.lock = reply, [], threading.Lock()
        self.url = ""

    def handle(self, handler):
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            number = len(self.requests)
            self.requests.append({"path": handler.path, "body": body, "headers": dict(handler.headers)})
        answer = self.reply(body, number) if number < MAX_REQUESTS else (418, "too many requests", {})
        if isinstance(answer, (int, float)):
            trickle(handler, answer)
        else:
            send(handler, *answer)


def send(handler, status, content, headers):
    """Send a whole answer; headers may contradict it."""
    content = content if isinstance(content, bytes) else (content if isinstance(content, str) else json.dumps(content)).encode()
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(content)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(content)


def trickle(handler, seconds):
    """Send a byte now and then: each arrives in time, the whole never does."""
    handler.send_response(200)
    handler.end_headers()
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)
    except OSError:  # the client has gone, as it should
        return


@contextmanager
def serve(reply):
    """Yield a Stub that is listening."""
    stub = Stub(reply)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            stub.handle(self)

        def log_message(self, *arguments):
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
