"""`python -m venus.bench clean`: how fast rows are cleaned, alone and against the tokenizer that
counts their tokens.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

from tokenizers import Tokenizer

from venus.cli import Options, option
from venus.curation.clean import CHUNK, CleanConfig, clean_chunk, load_tokenizer
from venus.files import raw_rows, row_files, rows_of
from venus.runlog import machine

MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@dataclass(frozen=True)
class CleanBenchConfig(Options):
    """What is cleaned."""

    data: str = option(help="rows that are tiled: a file or a directory")
    tokenizer: str | None = option(
        None,
        group="measurement",
        help="tokenizer.json or a directory with it; without one, no lengths",
    )
    rows: int = option(2000, help="rows after tiling", least=CHUNK)
    token_rows: int = option(
        160, help="rows of them that both sides of the comparison tokenise", least=CHUNK
    )


def clean(cfg: CleanBenchConfig) -> None:
    """Tile the rows, clean them in one process and by the command, and count tokens with and
    without cleaning; print the figures.
    """
    lines = [
        json.dumps(row, ensure_ascii=False) + "\n"
        for file in row_files(cfg.data)
        for _, row in rows_of(file)
    ]
    with tempfile.TemporaryDirectory() as directory:
        quarter, tiled = (Path(directory) / f"{name}.jsonl" for name in ("quarter", "tiled"))
        for path, count in ((quarter, cfg.rows // 4), (tiled, cfg.rows)):
            with open(path, "w", encoding="utf-8") as file:
                file.writelines(islice(cycle(lines), count))
        megabytes = tiled.stat().st_size / 1e6
        print(
            f"{machine()}\n{cfg.rows:,} rows, {megabytes:.0f} MB: {len(lines)} rows of "
            f"{cfg.data}, tiled"
        )
        rows, plain = raw_rows(tiled), CleanConfig(input=(str(tiled),), output="none", judge="none")
        cpu = cpu_seconds(
            lambda: [
                len(clean_chunk(plain, chunk))
                for chunk in iter(lambda: list(islice(rows, CHUNK)), [])
            ]
        )
        print(
            f"one process    {cfg.rows / cpu:8,.0f} rows/s {megabytes / cpu:7.1f} MB/s of "
            f"CPU time ({verdict(cfg.rows / cpu, 200)} rows/s)"
        )
        peak, _ = run_clean(quarter)
        peak_of_all, wall = run_clean(tiled)
        print(
            f"the command    {cfg.rows / wall:8,.0f} rows/s {megabytes / wall:7.1f} MB/s of "
            f"wall time, {os.cpu_count()} processes, all included"
        )
        print(
            f"peak memory    {peak:8,.0f} MB for {cfg.rows // 4:,} rows, {peak_of_all:,.0f} "
            f"MB for {cfg.rows:,}: of the largest process"
        )
        if cfg.tokenizer:
            compare_tokenizing(replace(plain, tokenizer=cfg.tokenizer), tiled, cfg.token_rows)


def run_clean(path: Path) -> tuple[float, float]:
    """Clean a file as a user does; return the peak memory of the largest
    process in MB, and seconds.
    """
    words = [
        sys.executable,
        "-m",
        "venus.clean",
        "--input",
        str(path),
        "--output",
        f"{path}.out",
        "--judge",
        "none",
    ]
    start = time.perf_counter()
    # Started by a small process: Linux counts what the parent held at the fork as the child's.
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *words],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    return int(done.stdout) / (
        1 << 20 if sys.platform == "darwin" else 1 << 10
    ), time.perf_counter() - start


def compare_tokenizing(cfg: CleanConfig, tiled: Path, num_rows: int) -> None:
    """Print the throughput of cleaning with lengths and of the bare tokenizer on the messages of
    the cleaned rows, chunk by chunk in turn.
    """
    bare = Tokenizer.from_file(
        str(
            Path(cfg.tokenizer) / "tokenizer.json"
            if Path(cfg.tokenizer).is_dir()
            else cfg.tokenizer
        )
    )
    load_tokenizer(cfg.tokenizer)
    rows, seconds = islice(raw_rows(tiled), num_rows), [0.0, 0.0]
    characters = 0
    for chunk in iter(lambda: list(islice(rows, CHUNK)), []):
        done = []
        seconds[0] += cpu_seconds(
            lambda chunk=chunk, done=done: done.extend(clean_chunk(cfg, chunk))
        )
        texts = [
            message["content"]
            for account in done
            if account.lines
            for message in json.loads(account.lines[0][1])["messages"]
        ]
        characters += sum(map(len, texts))
        seconds[1] += cpu_seconds(
            lambda texts=texts: [
                len(bare.encode(text, add_special_tokens=False).ids) for text in texts
            ]
        )
    ours, theirs = (characters / spent / 1e6 for spent in seconds)
    share = 100 * ours / theirs
    print(
        f"with lengths   {num_rows / seconds[0]:8,.1f} rows/s, {ours:.2f} M characters/s of "
        "CPU time"
    )
    print(
        f"bare tokenizer {theirs:8.2f} M characters/s: cleaning has {share:.0f} % of it "
        f"({verdict(share, 80)} %)"
    )


def verdict(value: float, goal: float) -> str:
    """Whether a figure reaches its goal, in words."""
    return f"goal {'met' if value >= goal else 'missed'}: {goal:g}"


def cpu_seconds(function: Callable[[], object]) -> float:
    """Seconds of this process's CPU that a call takes: others on the machine disturb it
    less than the clock.
    """
    start = time.process_time()
    function()
    return time.process_time() - start
