"""The benchmarks: published files -> questions, decrypted in memory only and counted,
and what grades them.

    python -m venus.benchmarks --data PATH.. --output corpus.jsonl
        BrowseComp-Plus's documents, or the paragraphs of multi-hop QA: pages for the offline tools

Two XOR schemes look alike. `sha256`, of the BrowseComp family: the key is the SHA-256 digest
of the canary. `canary`, of xBench: the key is the canary itself. Decrypted text appears in no file
and in no message of this module.
"""

import base64
import csv
import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from venus.cli import Options, option
from venus.files import row_files, rows_of, write_jsonl
from venus.trajectory import Question

KEYS = {"sha256": lambda canary: hashlib.sha256(canary.encode()).digest(), "canary": str.encode}


def decrypt(text: str, canary: str, scheme: str) -> str:
    """Decode base64 and XOR with the repeated key, `KEYS[scheme](canary)`. ValueError, without the
    text, when no UTF-8 comes out.
    """
    try:
        data = base64.b64decode(text, validate=True)
        return bytes(
            a ^ b for a, b in zip(data, itertools.cycle(KEYS[scheme](canary)), strict=False)
        ).decode()
    except ValueError:  # binascii.Error and UnicodeDecodeError, whose text holds the data
        raise ValueError(
            f"does not decrypt under the scheme {scheme!r}: another canary, another "
            "benchmark, or already decrypted"
        ) from None


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: where its fields stand, how many questions it has, what grades it.

    id, question, answer, aliases
              names a field may have, the first one present counts; without an id: a hash of the
              question
    kept      fields that go into Question.meta (never shown to the model)
    prompt    which of judge.PROMPTS asks a model for the verdict
    metric    what the score is: accuracy (the judge's), gaia (quasi-exact match, no judge needed),
              items (DeepSearchQA's F1 over the items, macro-averaged, beside the share that is
              fully correct) or em (exact match, and F1)
    leaks     lower-case parts of urls that hold the questions or their answers; with meta["canary"]
              what the leak guard looks for
    paper     accuracy (%) that DR-Venus reports for the 4B SFT and RL models
    """

    name: str
    count: int | None
    prompt: str
    leaks: tuple[str, ...]
    question: tuple[str, ...]
    answer: tuple[str, ...] = ("answer",)
    metric: str = "accuracy"
    id: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    scheme: str | None = None
    paper: tuple[float, float] | None = None

    def load(
        self,
        path: str,
        *,
        corpus: str | None = None,
        canary: str | None = None,
        partial: bool = False,
    ) -> list[Question]:
        """Read the published file (CSV, JSON, JSONL, parquet, or a directory of them). The canary,
        where one is used, is kept in meta["canary"].

        corpus   file of pages that all questions share; without it they are for live tools
        canary   of a file whose rows hold none (BrowseComp-Plus)
        partial  accept fewer questions than were published
        ValueError: a row without question or answer or that does not decrypt, equal ids, another
        number of questions.
        """
        corpus = str(Path(corpus).resolve()) if corpus else None
        questions: dict[str, Question] = {}
        rows = (
            pair
            for file in benchmark_files(path)
            for pair in (csv_rows(file) if file.suffix == ".csv" else rows_of(file))
        )
        for where, row in rows:
            if not isinstance(row, dict):
                raise ValueError(f"{where}: not a row of {self.name}: not an object")
            if row.get("file_name"):  # GAIA's questions about an attachment
                continue
            question = self._question(where, row, corpus, row.get("canary") or canary)
            if questions.setdefault(question.id, question) is not question:
                raise ValueError(
                    f"{where}: id {question.id!r} occurs twice; ids and questions must be unique"
                )
        self._check_count(path, len(questions), partial)
        return list(questions.values())

    def _check_count(self, path: str, count: int, partial: bool) -> None:
        if self.count and (count > self.count or count < self.count and not partial):
            hint = ""
            if self.name == "gaia-text":
                hint = (
                    "; its 103 text-only questions are a list of their own, a choice among those "
                    "without attachment"
                )
            found = f"{path}: {count} questions, {self.name} has {self.count}{hint}"
            raise ValueError(f"{found}; for a subset, --partial")
        if not count:
            raise ValueError(f"{path}: no questions")

    def _question(self, where: str, row: dict, corpus: str | None, canary: str | None) -> Question:
        asked, answer = (
            self._text(where, row, names, canary) for names in (self.question, self.answer)
        )
        aliases = [alias.strip() for name in self.aliases for alias in row.get(name) or ()]
        meta = {name: row[name] for name in self.kept if row.get(name) is not None} | (
            {"canary": canary} if self.scheme and canary else {}
        )
        # the same in a subset, where row numbers are others
        digest = hashlib.sha256(asked.encode("utf-8", "surrogatepass")).hexdigest()[:12]
        return Question(
            str(_first(row, self.id, digest)),
            asked,
            tuple(dict.fromkeys([answer, *filter(None, aliases)])),
            corpus,
            meta,
        )

    def _text(self, where: str, row: dict, names: tuple[str, ...], canary: str | None) -> str:
        """Return the first of the fields that is there, decrypted where the
        benchmark is encrypted.
        """
        where, text = f"{where}: field {names[0]!r}", _first(row, names)
        # an answer that went through a spreadsheet
        text = str(text) if type(text) in (int, float) and math.isfinite(text) else text
        # the answer None is a word; a reader that takes it for "missing" has lost it
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                f"{where} is missing, empty or no text: give the file of {self.name} as it "
                "was published"
            )
        if self.scheme and canary:
            try:
                text = decrypt(text.strip(), canary, self.scheme)
            except ValueError as error:
                raise ValueError(f"{where} {error}") from None
        elif self.scheme and re.fullmatch(r"[A-Za-z0-9+/=]{24,}", text.strip()):
            raise ValueError(
                f"{where} is encrypted and the row has no canary: give the one that decrypts "
                f"{self.name}, --canary"
            )
        return text.strip()


def _first(row: dict, names: tuple[str, ...], otherwise: str | None = None) -> object:
    return next((row[name] for name in names if row.get(name) is not None), otherwise)


# Whole names: "browse_comp" alone would block every /browse_companies, "musique" a
# part of the French web.
BROWSECOMP_LEAKS = ("browsecomp", "smolagents/browse_comp", "browse_comp_test", "simple-evals")
XBENCH_LEAKS = ("xbench-evals", "xbench-ai", "datasets/xbench", "xbench.org")
BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "browsecomp",
            1266,
            "browsecomp",
            BROWSECOMP_LEAKS,
            ("problem",),
            kept=("problem_topic",),
            scheme="sha256",
            paper=(26.8, 29.1),
        ),
        Benchmark(
            "browsecomp-zh",
            289,
            "browsecomp-zh",
            BROWSECOMP_LEAKS,
            ("Question",),
            ("Answer",),
            scheme="sha256",
            paper=(35.7, 37.7),
        ),
        Benchmark(
            "browsecomp-plus",
            830,
            "browsecomp-plus",
            BROWSECOMP_LEAKS,
            ("query",),
            id=("query_id",),
            scheme="sha256",
        ),
        Benchmark(
            "gaia-text",
            103,
            "gaia",
            ("gaia-benchmark", "webthinker"),
            ("Question",),
            ("answer", "Final answer"),
            metric="gaia",
            id=("task_id",),
            kept=("Level",),
            paper=(65.4, 64.4),
        ),
        Benchmark(
            "xbench-ds-2505",
            100,
            "xbench",
            XBENCH_LEAKS,
            ("prompt",),
            id=("id",),
            scheme="canary",
            paper=(69.0, 74.7),
        ),
        Benchmark(
            "xbench-ds-2510",
            100,
            "xbench",
            XBENCH_LEAKS,
            ("prompt",),
            id=("id",),
            scheme="canary",
            paper=(35.3, 40.7),
        ),
        Benchmark(
            "deepsearchqa",
            900,
            "deepsearchqa",
            ("deepsearchqa", "dsqa-full", "dsqa_full"),
            ("problem",),
            metric="items",
            kept=("problem_category", "answer_type"),
            paper=(37.7, 39.6),
        ),
        Benchmark(
            "multi-hop",
            None,
            "browsecomp",
            ("hotpotqa", "2wikimultihop", "stonybrooknlp/musique", "musique_ans", "musique_full"),
            ("question",),
            metric="em",
            id=("_id", "id"),
            aliases=("answer_aliases",),
            kept=("type", "level"),
        ),
    )
}


def benchmark_files(path: str) -> list[Path]:
    """List the files at `path`: a .csv, or what `row_files` finds. ValueError: no such
    file, or a spreadsheet.
    """
    file = Path(path)
    if file.suffix in (".xlsx", ".xls"):
        raise ValueError(
            f"{path}: spreadsheets are not read; save its sheet as CSV (UTF-8) and give that file"
        )
    if file.suffix != ".csv":
        return row_files(path)
    if not file.is_file():
        raise ValueError(f"{path}: no such file")
    return [file]


def csv_rows(file: Path) -> Iterator[tuple[str, dict]]:
    """Yield ("file:line", row) of a CSV with a header, its byte order mark aside; every field is a
    string, `None` and `NA` too.
    """
    csv.field_size_limit(1 << 24)
    with open(file, encoding="utf-8-sig", newline="") as handle:
        reader = csv.DictReader(handle, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise ValueError(
                        f"{file}:{reader.line_num}: a row of another length than the header"
                    )
                yield f"{file}:{reader.line_num}", row
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(
                f"{file}:{reader.line_num}: not a CSV in UTF-8: {getattr(error, 'reason', error)}"
            ) from None


def pages_of(row: dict, where: str) -> Iterator[tuple[str, str, str]]:
    """Yield (url, title, text) of each document in a row: BrowseComp-Plus {docid, text, url}, or
    the paragraphs of HotpotQA, 2Wiki, MuSiQue.
    """
    if isinstance(row.get("docid"), str | int) and isinstance(row.get("text"), str):
        title = re.search(r"\A---\n(?:.*\n)*?title: *(.*)", row["text"])
        yield (
            row.get("url") or f"doc://{row['docid']}",
            title[1].strip().strip("\"'") if title else "",
            row["text"],
        )
        return
    context, paragraphs = row.get("context"), row.get("paragraphs")
    if isinstance(context, dict):  # Hugging Face's form of HotpotQA
        context = list(zip(context["title"], context["sentences"], strict=True))
    if isinstance(paragraphs, list):
        context = [(paragraph["title"], [paragraph["paragraph_text"]]) for paragraph in paragraphs]
    if not isinstance(context, list):
        raise ValueError(f"{where}: no document: neither docid and text, nor context or paragraphs")
    for title, sentences in context:
        yield f"doc://{quote(title)}", title, " ".join(sentence.strip() for sentence in sentences)


def corpus_rows(paths: Iterable[str]) -> Iterator[dict]:
    """Yield corpus rows {url, title, text, links}: equal pages once, other pages under a url that
    is taken with #2, #3, .. behind it.
    """
    seen: dict[str, list[bytes]] = {}
    for where, row in (
        pair for path in paths for file in row_files(path) for pair in rows_of(file)
    ):
        for url, title, text in pages_of(row, where):
            known = seen.setdefault(url, [])
            digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
            if digest not in known:
                known.append(digest)
                yield {
                    "url": url if len(known) == 1 else f"{url}#{len(known)}",
                    "title": title,
                    "text": text,
                    "links": [],
                }


@dataclass(frozen=True)
class CorpusConfig(Options):
    data: tuple[str, ...] = option(
        help="documents: .json, .jsonl and .parquet files and directories of them"
    )
    output: str = option(help="the corpus to write, for the offline tools")


def main(cfg: CorpusConfig) -> None:
    """Write the corpus, whole or not at all."""
    write_jsonl(cfg.output, corpus_rows(cfg.data))
