"""Files of rows: JSON Lines that survive a crash, and JSON, JSONL and parquet files or directories
of them, read one row at a time.

A row is named by file and line; a torn last row is told apart from a bad one; whole files are
written by rename. `rows_of` stops at the first bad row; `raw_rows` hands out undecoded rows, for a
reader that must account for each of them.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

ANSWER_SPLIT = "<|answer_split|>"  # joins the aliases of one answer in the released question sets
SUFFIXES = (".json", ".jsonl", ".parquet")


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


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary neighbour of `path` to be written, which takes its name when the block ends
    well and is removed when it does not: a file appears whole or not at all.
    """
    temporary = Path(f"{path}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_jsonl(path: str | os.PathLike, objs: Iterable[dict]) -> None:
    """Write all rows to `path`, or nothing."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as handle:
        handle.writelines(map(_line, objs))


def write_json(path: str | os.PathLike, obj: dict) -> None:
    """Write one object to a file of its own, indented, whole or not at all."""
    with replacing(path) as temporary:
        text = json.dumps(obj, indent=2, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")


# ---- rows of any file


def row_files(path: str | os.PathLike) -> list[Path]:
    """List the files of rows at `path`, a file or a directory (in name order, not below it);
    ValueError when there is none.
    """
    root = Path(path)
    files = sorted(f for f in root.iterdir() if f.suffix in SUFFIXES) if root.is_dir() else [root]
    if not files or not files[0].is_file() or files[0].suffix not in SUFFIXES:
        raise ValueError(
            f"{root}: no such {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file, nor a "
            "directory of them"
        )
    return files


def rows_of(file: Path) -> Iterator[tuple[str, object]]:
    """Yield ("file:line", row) of one file; ValueError names file and line of what
    cannot be read.
    """
    if file.suffix == ".jsonl":
        yield from read_jsonl(file)
    elif file.suffix == ".parquet":
        yield from _parquet_rows(file)
    else:
        content = decode(file.read_bytes(), str(file))
        yield from (
            ((f"{file}[{k}]", row) for k, row in enumerate(content))
            if isinstance(content, list)
            else [(f"{file}:1", content)]
        )


def raw_rows(file: Path) -> Iterator[tuple[str, object]]:
    """Yield ("file:line", row or the bytes of one) per row of a file: bytes are left to `decode`,
    which may fail on them.

    A line is read at a time, a parquet file by batches; a .json list is the one
    form that is read whole.
    """
    if file.suffix == ".jsonl":
        with open(file, "rb") as handle:
            yield from (
                (f"{file}:{number}", line) for number, line in enumerate(handle, 1) if line.strip()
            )
    elif file.suffix == ".json" and not (text := file.read_bytes()).lstrip().startswith(b"["):
        yield f"{file}:1", text
    else:
        yield from rows_of(file)


def decode(text: bytes, where: str) -> object:
    """Parse one row; ValueError names its place."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}:{getattr(error, 'lineno', 1)}: not JSON: {error}") from None


def _parquet_rows(file: Path) -> Iterator[tuple[str, object]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ValueError(
            f"{file}: reading parquet needs pyarrow: pip install 'venus[parquet]'"
        ) from None
    try:
        batches = (
            batch.to_pylist() for batch in parquet.ParquetFile(file).iter_batches(batch_size=64)
        )
        yield from (
            (f"{file}[{k}]", row) for k, row in enumerate(row for batch in batches for row in batch)
        )
    except (ArrowException, OSError) as error:
        raise ValueError(f"{file}: not readable parquet: {error}") from None


def count_lines(file: Path) -> int:
    """Count the lines of a .jsonl file, for a progress bar; other files count as one
    row, whatever they hold.
    """
    if file.suffix != ".jsonl":
        return 1
    with open(file, "rb") as handle:
        return sum(block.count(b"\n") for block in iter(lambda: handle.read(1 << 20), b""))


def aliases_of(answer: object) -> list[str]:
    """List the accepted answers of a string (with ANSWER_SPLIT: of several) or a list of such
    strings; [] when there is none.
    """
    texts = [answer] if isinstance(answer, str) else answer if isinstance(answer, list) else []
    if not all(isinstance(text, str) for text in texts):
        return []
    return [alias for text in texts for part in text.split(ANSWER_SPLIT) if (alias := part.strip())]
