"""Search and visit over a fixed corpus: BM25 and a goal-focused extract, no network.

A corpus is a JSONL file of pages {url, title, text, links}. A question names its corpus, so one run
may hold many small webs.
"""

import hashlib
import math
import re
from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from venus.files import read_jsonl
from venus.protocol import SearchHit, format_search, format_visit
from venus.tools.base import Tool, ToolResult, VisitedPage

K1, B = 1.2, 0.75  # BM25: how fast a repeated term saturates, how much long pages are discounted
SNIPPET_CHARS, MAX_LINES = 160, 5  # of a hit's snippet, of a visit's extract
NOT_FOUND = "page not found"


@dataclass(frozen=True)
class Page:
    url: str
    title: str
    text: str

    @classmethod
    def from_json(cls, obj: dict, where: str) -> "Page":
        """Read one corpus row; ValueError names `where` and the field that is missing
        or of the wrong type.
        """
        url = obj.get("url")
        title = obj.get("title", "")
        text = obj.get("text")
        links = obj.get("links", [])
        if not isinstance(url, str) or not url.strip():
            raise ValueError(f"{where}: a page needs a url, not {url!r}")
        if not (isinstance(title, str) and isinstance(text, str) and isinstance(links, list)):
            raise ValueError(
                f"{where}: page {url!r} needs a text; title (text too) and links (a list) "
                "may be left out"
            )
        return cls(url, title, text)


def words(text: str) -> list[str]:
    """Lower-case words; each CJK ideograph is one: "Borhok, 東京 9" -> borhok 東 京 9."""
    return re.findall(r"[\u4e00-\u9fff]|[^\W\u4e00-\u9fff]+", text.lower())


STOP_WORDS = frozenset(words("a an and at by for from in is of on or the to was what who"))


class Corpus:
    """The pages of one corpus (url -> Page) and their BM25 index. Never written after construction,
    so threads may share it.
    """

    def __init__(self, pages: dict[str, Page]):
        self.pages = pages
        self._sorted = sorted(pages.values(), key=lambda page: page.url)
        # term -> page number, count, page number, count, ..
        self._postings: defaultdict[str, array] = defaultdict(lambda: array("I"))
        lengths = []
        for number, page in enumerate(self._sorted):
            # The title counts twice: of two pages with "Borhok" once in the text, the one that is
            # about Borhok comes first.
            count = Counter(words(page.title) * 2 + words(page.text))
            lengths.append(count.total())
            for term, tf in count.items():
                self._postings[term].extend((number, tf))
        mean_length = sum(lengths) / len(lengths) or 1.0
        self._norms = [K1 * (1 - B + B * length / mean_length) for length in lengths]

    @classmethod
    def load(cls, path: str | Path) -> "Corpus":
        """Read a corpus file; ValueError with file and line for a page without url or text, or
        with the url of another.
        """
        if not Path(path).is_file():
            raise ValueError(f"{path}: no such corpus file")
        pages: dict[str, Page] = {}
        for where, obj in read_jsonl(path):
            page = Page.from_json(obj, where)
            if page.url in pages:
                raise ValueError(
                    f"{where}: url {page.url!r} occurs twice; the pages of a corpus need "
                    "different urls"
                )
            pages[page.url] = page
        if not pages:
            raise ValueError(f"{path}: no pages in the corpus")
        return cls(pages)

    def search(self, query: str, top_k: int) -> list[Page]:
        """Return the top_k pages by BM25 score, ties by url; pages that share no word with
        the query are no hits.
        """
        scores: dict[int, float] = {}
        for term in words(query):
            posting = self._postings.get(term, array("I"))
            holders = len(posting) // 2
            idf = math.log(1 + (len(self.pages) - holders + 0.5) / (holders + 0.5))
            for number, tf in zip(posting[::2], posting[1::2], strict=True):
                scores[number] = scores.get(number, 0.0) + idf * tf * (K1 + 1) / (
                    tf + self._norms[number]
                )
        return [self._sorted[n] for n in sorted(scores, key=lambda n: (-scores[n], n))[:top_k]]


class CorpusCache:
    """The corpora of a run: each is loaded once and the least recently used is
    dropped beyond `capacity`.
    """

    def __init__(self, capacity: int = 512):
        self.capacity = capacity
        self._corpora: dict[str, Corpus] = {}  # the least recently used first
        self._lock = Lock()

    def get(self, path: str | None) -> Corpus:
        """Return the corpus at `path`; ValueError for a question without one."""
        if path is None:
            where = "field 'corpus' of the question file, --corpus of a benchmark"
            raise ValueError(
                f"the question names no corpus, which offline tools need ({where}); --tools "
                "live needs none"
            )
        with self._lock:  # held while loading: of ten rollouts on one question, one reads the file
            self._corpora[path] = corpus = self._corpora.pop(path, None) or Corpus.load(path)
            if len(self._corpora) > self.capacity:
                del self._corpora[next(iter(self._corpora))]
            return corpus


class OfflineSearch(Tool):
    """BM25 search, one block of hits per query; a snippet is the beginning of the page.

    shuffle: the top_k hits in an order that depends on query and url only, so that the position of
    a hit carries no signal.
    """

    name = "search"

    def __init__(self, cache: CorpusCache, *, top_k: int, shuffle: bool):
        self.cache = cache
        self.top_k = top_k
        self.shuffle = shuffle

    def __call__(self, arguments: dict, *, corpus: str | None, deadline: float) -> ToolResult:
        """Answer {"query": [...]}; status empty when no query has a hit; items = the SearchHits in
        the order of the text.
        """
        pages = self.cache.get(corpus)
        blocks = [(query, self._hits(pages, query)) for query in arguments["query"]]
        hits = tuple(hit for _, block in blocks for hit in block)
        return ToolResult(format_search(blocks), "ok" if hits else "empty", hits)

    def _hits(self, corpus: Corpus, query: str) -> list[SearchHit]:
        found = corpus.search(query, self.top_k)
        if self.shuffle:
            found.sort(key=lambda page: _digest(f"{query}\n{page.url}"))
        return [
            SearchHit(page.title, page.url, page.text.strip().split("\n")[0][:SNIPPET_CHARS])
            for page in found
        ]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="replace")).digest()


class OfflineVisit(Tool):
    """Open pages and return the lines or sentences that share the most words with the
    goal, in page order.
    """

    name = "visit"

    def __init__(self, cache: CorpusCache):
        self.cache = cache

    def __call__(self, arguments: dict, *, corpus: str | None, deadline: float) -> ToolResult:
        """Answer {"url": [...], "goal": ...}; status empty when no page has anything on the goal;
        items = VisitedPage per page found.
        """
        pages, goal = self.cache.get(corpus).pages, arguments["goal"]
        visited: dict[str, VisitedPage] = {}
        texts = []
        for url in arguments["url"]:
            summary = NOT_FOUND
            if url in pages:
                found = self._extract(pages[url], goal)
                visited[url] = VisitedPage(url, found)
                summary = found or f"nothing on {goal}"
            texts.append((url, goal, summary, None))
        status = "ok" if any(page.summary for page in visited.values()) else "empty"
        return ToolResult(format_visit(texts), status, tuple(visited.values()))

    def _extract(self, page: Page, goal: str) -> str | None:
        lines = [
            line.strip()
            for line in re.split(r"\n+|(?<=[.!?])\s+|(?<=[。！？])", page.text)
            if line.strip()
        ]
        wanted = set(words(goal)) - STOP_WORDS
        shared = [len(wanted & set(words(line))) for line in lines]
        best = sorted(
            (n for n in range(len(lines)) if shared[n] or not wanted), key=lambda n: (-shared[n], n)
        )[:MAX_LINES]
        # a goal without content words gets the page's beginning
        return "\n".join(lines[n] for n in sorted(best)) or None


def offline_tools(cache: CorpusCache | None = None) -> dict[str, Tool]:
    """Return {"search", "visit"} over one shared corpus cache, under the settings under which the
    world's experts were recorded.
    """
    cache = cache or CorpusCache()
    return {"search": OfflineSearch(cache, top_k=3, shuffle=True), "visit": OfflineVisit(cache)}
