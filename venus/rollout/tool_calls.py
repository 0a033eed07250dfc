"""Tool calls in threads, each with a deadline: no call holds up another, or the process's end."""

import queue
import threading
import time
from collections.abc import Callable

from venus import protocol
from venus.tools.base import ToolResult


class ToolPool:
    """Runs tool calls (at most one a slot) in daemon threads, as many as there are calls that have
    not come back, with a total deadline. A call past it is answered as a time-out and its thread is
    given up until it comes back, so that hung calls neither hold up the others nor keep the process
    from exiting.
    """

    def __init__(self):
        self.calls: queue.SimpleQueue = queue.SimpleQueue()
        self.done: queue.SimpleQueue = queue.SimpleQueue()
        # call number -> (slot, due, seconds allowed)
        self.pending: dict[int, tuple[int, float, float]] = {}
        self.count = self.num_back = self.num_threads = 0

    def submit(self, slot: int, call: Callable[[], ToolResult], seconds: float) -> None:
        """Start `call` for a slot; its result, or a time-out after `seconds`, comes
        out of `poll`.
        """
        self.count += 1
        self.pending[self.count] = (slot, time.monotonic() + seconds, seconds)
        self.calls.put((self.count, call))
        if self.num_threads < self.count - self.num_back:
            self.num_threads += 1
            threading.Thread(target=self._work, daemon=True).start()

    def poll(self, *, block: bool) -> list[tuple[int, ToolResult]]:
        """Results that have come, as (slot, result); with `block` wait for the first one or the
        next deadline. What a call raised is raised here.
        """
        results = []
        while self.pending:
            due = min(due for _, due, _ in self.pending.values())
            try:
                number, outcome = self.done.get(
                    block=block and not results, timeout=max(due - time.monotonic(), 0.0)
                )
            except queue.Empty:
                break
            self.num_back += 1
            self.num_threads -= isinstance(outcome, RuntimeError)  # that thread is no more
            if number not in self.pending:
                continue  # given up earlier, came back after all
            if isinstance(outcome, Exception):
                raise outcome
            results.append((self.pending.pop(number)[0], outcome))
        for number, (slot, due, seconds) in list(self.pending.items()):
            if due <= time.monotonic():
                del self.pending[number]
                results.append((slot, ToolResult(protocol.TIMEOUT_MESSAGE(seconds), "timeout")))
        return results

    def close(self) -> None:
        """Let the threads end, each when its call has come back."""
        for _ in range(self.num_threads):
            self.calls.put(None)

    def _work(self) -> None:
        while (item := self.calls.get()) is not None:
            number, call = item
            outcome = RuntimeError("a tool call died; its traceback stands above")
            try:
                outcome = call()
            except (ValueError, OSError) as error:  # of these, ToolServiceError
                outcome = error
            finally:  # anything else ends this thread with its traceback, and the run
                self.done.put((number, outcome))
