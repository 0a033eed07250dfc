"""A long pass over rows: computed by several processes, written in order, resumed where it stopped,
memory independent of the rows.
"""

import json
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from venus.files import replacing

In, Out = TypeVar("In"), TypeVar("Out")
STATE = "state.json"


def in_order(function: Callable[[In], Out], items: Iterable[In], num_workers: int) -> Iterator[Out]:
    """Yield function(item) for every item, in their order, computed by that many
    processes (1: by this one).

    At most four items per process are under way, so a fast reader fills no memory. ValueError
    when a process dies.
    """
    if num_workers == 1:
        yield from map(function, items)
        return
    # Ctrl-C stops the parent, which then closes the pool
    initializer, arguments = signal.signal, (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(num_workers, get_context("spawn"), initializer, arguments) as pool:
        under_way = deque()
        try:
            for item in items:
                under_way.append(pool.submit(function, item))
                if len(under_way) > 4 * num_workers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        except BrokenProcessPool:
            raise ValueError(
                "a worker process died (out of memory?); the same command resumes, with "
                "fewer --workers if need be"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


class Journal:
    """The growing output files of a pass in one directory, and the state from which it resumes:
    rows done, counts, seconds.

    What was written after the last `save` is cut off on resume, so that a kill at any moment loses
    seconds and repeats no row.
    """

    def __init__(self, directory: Path, names: Iterable[str], settings: dict):
        """Open a new or interrupted pass; ValueError when the interrupted one had other
        settings, or lost data.
        """
        self.path, self.settings = directory / STATE, json.loads(json.dumps(settings))
        state = {"settings": self.settings, "done": 0, "counts": {}, "seconds": 0.0, "sizes": {}}
        if self.path.exists():
            state = json.loads(self.path.read_bytes())
        old = state["settings"]
        if old != self.settings:
            changed = next(k for k in old | self.settings if old.get(k) != self.settings.get(k))
            raise ValueError(
                f"{directory} holds an unfinished run with other settings ({changed}); "
                "finish that one or remove the directory"
            )
        directory.mkdir(parents=True, exist_ok=True)
        self.done = state["done"]
        self.counts = Counter(state["counts"])
        self._seconds = state["seconds"]
        self._started = self._saved = time.monotonic()
        # `close` closes them
        self._files = {name: open(directory / name, "ab") for name in names}  # noqa: SIM115
        for name, file in self._files.items():
            size = state["sizes"].get(name, 0)
            if file.tell() < size:
                raise ValueError(
                    f"{directory / name} is shorter than when the run stopped; remove the "
                    "directory and start anew"
                )
            file.truncate(size)

    @property
    def seconds(self) -> float:
        return self._seconds + time.monotonic() - self._started

    def write(self, name: str, line: str) -> None:
        """Append a line (with its newline) to one of the files."""
        self._files[name].write(line.encode())

    def save(self, every: float = 0.0) -> None:
        """Make all that was written so far part of what a resumed pass keeps, unless the last save
        is less than `every` seconds old.
        """
        if time.monotonic() - self._saved < every:
            return
        for file in self._files.values():
            file.flush()
        state = {
            "settings": self.settings,
            "done": self.done,
            "counts": self.counts,
            "seconds": self.seconds,
            "sizes": {name: file.tell() for name, file in self._files.items()},
        }
        with replacing(self.path) as temporary:
            temporary.write_text(json.dumps(state), encoding="utf-8")
        self._saved = time.monotonic()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
