"""JSON Lines that survive a crash: rows named by file and line, a torn last row told apart from a
bad one, whole files written by rename.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO


def _parse(line: bytes, where: str) -> dict:
    try:
        obj = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not a JSON row: {error}") from None
    if not isinstance(obj, dict):
        raise ValueError(f"{where}: a row must be a JSON object, not {str(obj)[:80]!r}")
    return obj


def _line(obj: dict) -> str:
    text = json.dumps(obj, ensure_ascii=False, allow_nan=False)
    # a lone surrogate has no UTF-8 form; \u escapes keep it
    if any("\ud800" <= c <= "\udfff" for c in text):
        text = json.dumps(obj, allow_nan=False)
    return text + "\n"


def _sound_bytes(path: str | os.PathLike) -> int:
    """Length of the file without a last row that lacks its newline or does not parse: what a
    crash leaves behind.
    """
    offset, start, last = 0, 0, b""
    with open(path, "rb") as handle:
        for line in handle:
            start, last = (offset, line) if line.strip() else (start, last)
            offset += len(line)
    try:
        return offset if not last or (last.endswith(b"\n") and _parse(last, "")) else start
    except ValueError:
        return start


def repair_tail(path: str | os.PathLike) -> None:
    """Cut a torn last row off the file, in place, so that appending is safe; a
    missing file is left alone.
    """
    if Path(path).exists():
        os.truncate(path, _sound_bytes(path))


def read_jsonl(path: str | os.PathLike, *, torn_tail: bool = False) -> Iterator[tuple[str, dict]]:
    """Yield ("path:line", object) per non-blank row; ValueError with path and line
    for a malformed one.

    torn_tail=True leaves out a last row that lacks its newline or does not parse; without it, only
    the newline may be missing.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    left = _sound_bytes(path) if torn_tail else math.inf
    with open(path, "rb") as handle:
        for number, line in enumerate(handle, 1):
            left -= len(line)
            if left >= 0 and line.strip():
                yield f"{path}:{number}", _parse(line, f"{path}:{number}")


def append_jsonl(handle: TextIO, obj: dict) -> None:
    """Write one row and flush, so that a crash can tear no row but the last."""
    handle.write(_line(obj))
    handle.flush()


def write_jsonl(path: str | os.PathLike, objs: Iterable[dict]) -> None:
    """Write all rows to `path`, or nothing: a temporary neighbour is filled first
    and then renamed.
    """
    temporary = Path(f"{path}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as handle:
            handle.writelines(map(_line, objs))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | os.PathLike, obj: dict) -> None:
    """Write one object to a file of its own, indented, by rename."""
    temporary = Path(f"{path}.tmp")
    temporary.write_text(json.dumps(obj, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
