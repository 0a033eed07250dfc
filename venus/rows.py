"""Rows in files: JSON (one row, or a list of rows), JSONL, parquet, and directories of
them, read one at a time.

`rows_of` stops at the first bad row; `raw_rows` hands out undecoded rows, for a reader that must
account for each of them.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from venus.jsonl import read_jsonl

ANSWER_SPLIT = "<|answer_split|>"  # joins the aliases of one answer in the released question sets
SUFFIXES = (".json", ".jsonl", ".parquet")


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
