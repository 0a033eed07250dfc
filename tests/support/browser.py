"""Headless Chromium for the tests of the report, spoken to over its debugging pipe:
standard library only.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
        if (path := shutil.which(name))
    ),
    None,
)
FLAGS = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-extensions",
        "--mute-audio",
    ),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        "--remote-debugging-pipe",
    ),
)


class Browser:
    """One page in one browser. `requests` holds the addresses it asked for, `problems` its console
    errors, exceptions and policy violations.
    """

    def __init__(
        self, profile: Path, *, width: int = 1280, height: int = 900, seconds: float = 30.0
    ):
        assert CHROMIUM, "no Chromium; tests skip before they come here"
        (read, self._out), (self._in, write) = os.pipe(), os.pipe()

        # Chromium reads commands from descriptor 3 and writes answers to 4; copies above both, lest
        # one overwrite the other
        def pipes():
            spare = [os.dup(fd) for fd in (read, write) for _ in range(4)]
            os.dup2(spare[3], 3)
            os.dup2(spare[7], 4)

        command = [
            CHROMIUM,
            *FLAGS,
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            command,
            pass_fds=(3, 4),
            preexec_fn=pipes,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self.seconds, self._buffer, self._count, self._session = seconds, b"", 0, None
        self.requests, self.problems = [], []
        target = next(
            t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"
        )
        self._session = self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **params) -> dict:
        """Send a command and return its result; an error of the protocol is an AssertionError."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params} | (
            {"sessionId": self._session} if self._session else {}
        )
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self) -> dict:
        """Read one message and note what it says about requests and errors."""
        deadline = time.monotonic() + self.seconds
        while b"\0" not in self._buffer:
            assert select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))[0], (
                f"no answer from Chromium in {self.seconds} s"
            )
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "Chromium closed the pipe"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(
                params["exceptionDetails"]["exception"].get("description", "exception")
            )
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.problems.append(str(params["args"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] in (
            "error",
            "warning",
        ):
            self.problems.append(params["entry"]["text"])
        return message

    def open(self, page: Path, fragment: str = "") -> None:
        """Open a file and wait until it has loaded."""
        self.call("Page.navigate", url=page.resolve().as_uri() + fragment)
        self.wait(
            f"location.href.startsWith('file:') && location.hash === {json.dumps(fragment)} "
            "&& document.readyState === 'complete'"
        )

    def js(self, expression: str):
        """The JSON value of an expression, promises awaited."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, f"{expression}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until the expression holds."""
        deadline = time.monotonic() + self.seconds
        while not self.js(expression):
            assert time.monotonic() < deadline, (
                f"{expression} did not come true in {self.seconds} s"
            )
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                text=key if kind == "keyDown" and len(key) == 1 else "",
            )

    def emulate(self, *, scheme: str = "light", width: int = 1280, height: int = 900) -> None:
        """Set prefers-color-scheme and the size of the window."""
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as a PNG file."""
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )
