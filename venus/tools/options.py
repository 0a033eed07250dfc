"""Which tools a run uses, as flags of its script: the offline corpus, or the live web."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from venus.cli import Options, option
from venus.services.chat import ChatClient, parse_endpoint
from venus.tools.base import Tool
from venus.tools.cassette import Cassette, CassetteTool, file_digest
from venus.tools.offline import CorpusCache, offline_tools
from venus.tools.pages import Fetch, Jina
from venus.tools.web import (
    FIRST_WAIT,
    PAGE_CHARS,
    PATIENCE,
    SUMMARY_TOKENS,
    TRIES,
    Budget,
    Serper,
    Service,
    WebVisit,
)

# of a rollout, on average over the released SFT data and over the released RL rollouts
SEARCHES, VISITS = (23, 59), (8, 10)
CHARS_A_TOKEN = 4


@dataclass(frozen=True)
class Keys:
    """What the services know a user by. A script reads them once and passes them on; they are never
    shown, saved or logged.
    """

    serper: str | None = field(default=None, repr=False)
    jina: str | None = field(default=None, repr=False)
    summary: str | None = field(default=None, repr=False)
    judge: str | None = field(default=None, repr=False)
    policy: str | None = field(default=None, repr=False)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> "Keys":
        """SERPER_API_KEY and JINA_API_KEY; SUMMARY_API_KEY, JUDGE_API_KEY and POLICY_API_KEY, each
        OPENAI_API_KEY where it is not set.
        """
        found = {
            name: environ.get(f"{name.upper()}_API_KEY", "").strip() or None
            for name in ("serper", "jina", "summary", "judge", "policy", "openai")
        }
        shared = found.pop("openai")
        return cls(
            serper=found["serper"],
            jina=found["jina"],
            summary=found["summary"] or shared,
            judge=found["judge"] or shared,
            policy=found["policy"] or shared,
        )


@dataclass(frozen=True)
class ToolOptions(Options):
    """What answers a search and a visit."""

    tools: str = option(
        "offline",
        group="tools",
        help="search and visit over the question's corpus, or over the live web (key: "
        "SERPER_API_KEY)",
        choices=("offline", "live"),
    )
    reader: str = option(
        "jina",
        help="pages through Jina Reader (key: JINA_API_KEY), or fetched as they are, without "
        "scripts",
        choices=("jina", "fetch"),
    )
    summary: str | None = option(
        None,
        help="for live tools, openai:BASE_URL:MODEL (key: SUMMARY_API_KEY or OPENAI_API_KEY) that "
        "summarises pages for the goal",
    )
    search_base: str = option("https://google.serper.dev", help="address of Serper")
    reader_base: str = option("https://r.jina.ai", help="address of Jina Reader")
    search_concurrency: int = option(8, help="queries at once", unit="calls", least=1)
    reader_concurrency: int = option(8, help="pages read at once", unit="calls", least=1)
    summary_concurrency: int = option(8, help="pages summarised at once", unit="calls", least=1)
    web_seconds: float = option(
        60.0,
        help="longest wait for one request; all its tries share --tool-seconds",
        unit="s",
        above=0,
        most=1_000_000,
    )
    web_budget: int | None = option(
        None,
        help="queries, pages and summaries of a process; one more ends the run. Empty is no limit",
        unit="calls",
        least=1,
    )
    proxy: str | None = option(
        None,
        help="http(s)://host:port for searches and pages; empty: HTTPS_PROXY and the like, as for "
        "all other calls",
    )
    allow_private: bool = option(
        False, help="let the model visit loopback, private and link-local addresses"
    )
    blocked: tuple[str, ...] = option(
        (),
        help="parts of addresses that are neither shown nor opened; those of a benchmark's copies "
        "are added by eval.py",
    )
    cassette: str = option(
        "off",
        help="record the tools' answers, or replay them without any tool",
        choices=("off", "record", "replay"),
    )
    cassette_file: str | None = option(None, help="JSONL file of recorded answers, appended to")

    def validate(self) -> None:
        """ValueError for an address that is none, or an option that lacks another."""
        super().validate()
        if (self.cassette == "off") != (self.cassette_file is None):
            raise ValueError("--cassette record or replay and --cassette-file go together")
        for name in ("search_base", "reader_base", "proxy"):
            address = getattr(self, name)
            if address is not None and not re.fullmatch(r"https?://[^/@\s]+(/\S*)?", address):
                raise ValueError(
                    f"{name}: must be http(s)://host without a password, since flags are "
                    "saved with the run; a proxy's belongs in HTTPS_PROXY"
                )
        if self.live:
            self.summary_endpoint()

    @property
    def live(self) -> bool:
        """Whether calls reach the web."""
        return self.tools == "live" and self.cassette != "replay"

    def summary_endpoint(self) -> tuple[str, str]:
        """Base url and model of the summariser; ValueError without one."""
        if self.summary is None:
            raise ValueError(
                "--tools live needs --summary openai:BASE_URL:MODEL, the model that "
                "summarises visited pages"
            )
        return parse_endpoint(self.summary, "--summary")

    def make_tools(self, keys: Keys, corpora: CorpusCache | None = None) -> dict[str, Tool]:
        """Return {"search", "visit"}, to be made once a run: they hold its caches and its budget.
        corpora: those already read, for the offline tools.

        ValueError for a key that is missing.
        """
        tools = self.web_tools(keys) if self.live else offline_tools(corpora)
        if self.cassette == "off":
            return tools
        cassette = Cassette(self.cassette_file, record=self.cassette == "record")
        return {
            name: CassetteTool(name, tool if cassette.record else None, cassette)
            for name, tool in tools.items()
        }

    def web_tools(self, keys: Keys) -> dict[str, Tool]:
        """The live tools; one budget for all their calls."""
        budget = Budget(self.web_budget)
        pages = self._service(self.reader, self.reader_concurrency, budget)
        summaries = self._service("summary", self.summary_concurrency, budget)
        visit = WebVisit(
            self.page_reader(keys),
            pages,
            self.summary_client(keys),
            summaries,
            allow_private=self.allow_private,
            blocked=self.blocked,
        )
        return {"search": self.searcher(keys, budget), "visit": visit}

    def _service(self, name: str, calls: int, budget: Budget) -> Service:
        # each fetched page is a service of its own
        patience = None if name == "fetch" else PATIENCE
        return Service(
            name, calls=calls, seconds=self.web_seconds, budget=budget, patience=patience
        )

    def searcher(self, keys: Keys, budget: Budget) -> Serper:
        """The search tool; ValueError without a key."""
        if keys.serper is None:
            raise ValueError("--tools live needs SERPER_API_KEY in the environment")
        return Serper(
            self.search_base,
            keys.serper,
            self._service("serper", self.search_concurrency, budget),
            self.proxy,
            self.blocked,
        )

    def page_reader(self, keys: Keys) -> Jina | Fetch:
        """What reads a page; ValueError for Jina without a key."""
        if self.reader == "fetch":
            return Fetch(self.proxy, self.allow_private)
        if keys.jina is None:
            raise ValueError(
                "--reader jina needs JINA_API_KEY in the environment; --reader fetch reads "
                "pages without a key"
            )
        return Jina(self.reader_base, keys.jina, self.proxy)

    def summary_client(self, keys: Keys) -> ChatClient:
        """The client of the summariser."""
        return ChatClient(
            *self.summary_endpoint(), keys.summary, self.web_seconds, TRIES, FIRST_WAIT
        )

    def tools_manifest(self) -> dict:
        """What decides the tools' answers, for the manifest of a trajectory."""
        if self.cassette == "replay":
            return {"tools": self.tools, "cassette": file_digest(self.cassette_file)}
        if not self.live:
            return {"tools": "offline"}
        return {
            "tools": "live",
            "reader": self.reader,
            "summary": self.summary_endpoint()[1],
            "blocked": list(self.blocked),
        }

    def web_plan(self, num_rollouts: int, max_turns: int) -> list[tuple[str, str]]:
        """Rows for `print_plan`: calls as in the released rollouts, and the tokens of their
        summaries at most; none for tools that cost nothing.
        """
        if not self.live:
            return []
        searches, visits = (
            [num_rollouts * min(count, max_turns - 1) for count in counts]
            for counts in (SEARCHES, VISITS)
        )
        tokens = visits[1] * (PAGE_CHARS // CHARS_A_TOKEN + SUMMARY_TOKENS)
        return [
            ("searches, about", f"{searches[0]:,} to {searches[1]:,}"),
            ("pages opened, about", f"{visits[0]:,} to {visits[1]:,}"),
            ("summary tokens, at most", f"{tokens:,}"),
        ]
