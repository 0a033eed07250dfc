"""`python -m venus.bench clean` on a few rows: it runs, tiles, and says what it measured."""

import json

import pytest
from chat_samples import tiny_file, tiny_spec
from clean_samples import FOUND, SEARCH, final, raw

from venus.bench.clean import CleanBenchConfig, clean


def test_every_figure_is_printed_with_its_goal(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(raw(SEARCH, FOUND, final(str(k)))) + "\n" for k in range(3))
    )
    clean(
        CleanBenchConfig(
            data=str(tmp_path / "rows.jsonl"),
            tokenizer=str(tiny_file(tmp_path, tiny_spec())),
            rows=64,
            token_rows=32,
        )
    )
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].startswith("64 rows, 0 MB: 3 rows of ") and [
        line[:14] for line in printed[2:]
    ] == [
        "one process   ",
        "the command   ",
        "peak memory   ",
        "with lengths  ",
        "bare tokenizer",
    ]
    assert "goal met: 200 rows/s" in printed[2] and "goal " in printed[6]


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="at least 16"):
        CleanBenchConfig(data="x", rows=5).validate()
