"""Record what tools answer, and replay it: the same calls get the same answers, without a network.

A cassette is a JSONL file, one answered call a row, keyed by tool, arguments and the content of the
corpus. While recording, a call that the cassette holds a result for is answered from it; a failed
call is recorded and made again. A replay answers with the last row of a call.
"""

import functools
import hashlib
import json
import os
import threading
from pathlib import Path

from venus.files import append_jsonl, read_jsonl, repair_tail
from venus.protocol import SearchHit
from venus.tools.base import Tool, ToolResult, VisitedPage

ITEMS = {"search": SearchHit, "visit": VisitedPage}
FIELDS = {"tool", "arguments", "corpus", "text", "status", "items"}


class Cassette:
    """The rows of a file, shared by the tools of a run. A torn last row is left out; `record`
    cuts it off and appends.
    """

    def __init__(self, path: str, *, record: bool):
        """ValueError: nothing to replay, or a row that is none of a cassette."""
        self.path = Path(path)
        self.record = record
        self.lock = threading.Lock()
        self.results: dict[str, ToolResult] = {}
        # a corpus is known by its content, wherever it lies: a cassette may move to another machine
        self.digest_of = functools.cache(file_digest)
        if record:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            repair_tail(self.path)
        for where, row in read_jsonl(self.path, torn_tail=True):
            if row.keys() != FIELDS or row["tool"] not in ITEMS:
                raise ValueError(f"{where}: not a row of a cassette; name another --cassette-file")
            items = tuple(ITEMS[row["tool"]](**item) for item in row["items"])
            self.results[_key(row["tool"], row["arguments"], row["corpus"])] = ToolResult(
                row["text"], row["status"], items
            )
        if not record and not self.results:
            raise ValueError(
                f"{path}: an empty cassette has nothing to replay; make one with --cassette record"
            )
        # it lives as long as the run
        self.handle = open(self.path, "a", encoding="utf-8") if record else None  # noqa: SIM115

    def add(self, key: str, row: dict, result: ToolResult) -> ToolResult:
        """Keep a result and return the one that counts: of two equal calls made at once, the
        first that was answered.
        """
        with self.lock:
            known = self.results.get(key)
            if known is not None and known.status in ("ok", "empty"):
                return known
            self.results[key] = result
            append_jsonl(
                self.handle,
                {
                    **row,
                    "text": result.text,
                    "status": result.status,
                    "items": [vars(item) for item in result.items],
                },
            )
            return result


class CassetteTool(Tool):
    """A tool behind a cassette; `tool` None replays."""

    def __init__(self, name: str, tool: Tool | None, cassette: Cassette):
        assert (tool is not None) == cassette.record, (
            "a cassette that records needs a tool, one that replays has none"
        )
        self.name = name
        self.tool = tool
        self.cassette = cassette

    def __call__(self, arguments: dict, *, corpus: str | None, deadline: float) -> ToolResult:
        """Answer from the cassette, else by the tool. ValueError, which ends the run, for a call
        that a replay does not know.
        """
        row = {
            "tool": self.name,
            "arguments": arguments,
            "corpus": None if corpus is None else self.cassette.digest_of(corpus),
        }
        key = _key(**row)
        known = self.cassette.results.get(key)
        if known is not None and (self.tool is None or known.status in ("ok", "empty")):
            return known
        if self.tool is None:
            raise ValueError(
                f"{self.cassette.path}: no recorded answer to {self.name} "
                f"{json.dumps(arguments, ensure_ascii=False)}; record the run anew"
            )
        return self.cassette.add(key, row, self.tool(arguments, corpus=corpus, deadline=deadline))


def file_digest(path: str | os.PathLike) -> str:
    """16 hex digits of a file's content."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, lambda: hashlib.blake2b(digest_size=8)).hexdigest()


def _key(tool: str, arguments: dict, corpus: str | None) -> str:
    """Equal for calls that differ in the order of their fields or in the space around a string; the
    order of queries and pages counts.
    """
    plain = {
        name: [s.strip() for s in value] if isinstance(value, list) else value.strip()
        for name, value in arguments.items()
    }
    return json.dumps([tool, plain, corpus], sort_keys=True, ensure_ascii=False)
