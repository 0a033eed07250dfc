"""Scripted experts of the synthetic world: trajectories of mixed quality, written through the real
tools and the real protocol.
"""

import random
from dataclasses import dataclass, field

from venus import protocol
from venus.protocol import (
    assistant_text,
    format_answer,
    format_search,
    format_tool_call,
    observation_text,
)
from venus.tools.base import Tool, ToolResult

SOURCES = ("profile", "archive")  # reliable, stale
HEIR, NOBODY = "heir", "none"  # the relation of a long web; the last of a line has the heir "none"
ANSWER_SENTENCE = protocol.ANSWER_PREFIX.split("\n")[0]
# what an expert thinks; § = a slot
THOUGHTS = ("find § of §", "§. find § of §", "open § profile§", "open § archive§", ANSWER_SENTENCE)


@dataclass(frozen=True)
class Habits:
    """Probabilities: open the archive, answer after the first of several hops, close with
    ANSWER_SENTENCE; dirt: expected slips.
    """

    archive: float
    early: float
    closing: float
    dirt: float


@dataclass
class Expert:
    """A scripted agent. It calls the real tools, so its observations are those of a rollout, byte
    for byte.
    """

    habits: Habits
    tools: dict[str, Tool]
    corpus: str
    rng: random.Random
    # of the run under way: assistant text, observation body; the probability that a call comes
    # with something that cleaning removes
    turns: list[tuple[str, str | None]] = field(default_factory=list)
    slip: float = 0.0

    def run(self, question: str, entity: str, relations: tuple[str, ...]) -> list[dict]:
        """Answer the question whose chain starts at `entity`; return the conversation from the
        question on (raw rows have no system message), slips and wrong answers included.
        """
        self.turns, self.slip = [], self.habits.dirt / (2 * len(relations))
        if relations[0] == HEIR:
            self._follow(entity)
        else:
            self._answer(entity, relations)
        messages = [{"role": "user", "content": question}]
        for content, body in self.turns:
            messages.append({"role": "assistant", "content": content})
            if body is not None:
                response = protocol.RESPONSE_OPEN + observation_text(body) + protocol.RESPONSE_CLOSE
                messages.append({"role": "user", "content": response})
        return messages

    def _answer(self, entity: str, relations: tuple[str, ...]) -> None:
        """Hop along the relations: find the entity, open one of its pages, read the value."""
        think = f"find {relations[0]} of {entity}"
        for hop, relation in enumerate(relations):
            source = SOURCES[self.rng.random() < self.habits.archive]
            value = self._open(entity, self._find(entity, think, source), relation)[0]
            if hop == len(relations) - 1 or (hop == 0 and self.rng.random() < self.habits.early):
                self._close(f"{relation} {value}.", value)
                return
            entity, think = value, f"{relation} {value}. find {relations[hop + 1]} of {value}"

    def _follow(self, entity: str) -> None:
        """Follow a line of heirs: through the page that the last one names or, as is the expert's
        habit, by a new search.
        """
        url, habit = None, self.rng.choice((0.0, 0.5, 1.0))
        think = f"find {HEIR} of {entity}"
        while True:
            if url is None or self.rng.random() < habit:
                url = self._find(entity, think, SOURCES[self.rng.random() < self.habits.archive])
            heir, *links = self._open(entity, url, HEIR)
            if heir == NOBODY:
                self._close(f"{HEIR} {NOBODY}.", entity)
                return
            entity, url = heir, links[0]
            think = f"{HEIR} {heir}. find {HEIR} of {heir}"

    def _find(self, entity: str, think: str, source: str) -> str:
        hits = self._call(think, "search", {"query": [entity]}).items
        [url] = [hit.url for hit in hits if hit.title == entity and hit.url.startswith(source)]
        return url

    def _open(self, entity: str, url: str, relation: str) -> list[str]:
        [page] = self._call(f"open {entity} {url}", "visit", {"url": [url], "goal": relation}).items
        return page.summary.split()[1:]

    def _call(self, think: str, name: str, arguments: dict) -> ToolResult:
        content = assistant_text(think, format_tool_call(name, arguments))
        result = self.tools[name](arguments, corpus=self.corpus, deadline=120.0)
        slip = None
        if self.rng.random() < self.slip:
            slip = self.rng.choice(("malformed", "code", "scholar", "timeout", "repeat"))
        if slip == "malformed":
            head, call = content.split("\n\n")
            broken = self.rng.choice((content.replace("}}\n", "}\n"), content + call, head))
            self.turns.append((broken, protocol.MALFORMED_MESSAGE))
        elif slip == "code":
            call = format_tool_call("PythonInterpreter", {})
            call = call.replace("\n</", "\n<code>\nprint(1)\n</code>\n</")
            self.turns.append((assistant_text(think, call), "1"))
        elif slip == "scholar":
            call = format_tool_call("google_scholar", {"query": [think]})
            self.turns.append((assistant_text(think, call), format_search([(think, [])])))
        elif slip == "timeout":
            # the failed call comes first, its repetition succeeds: a cleaner must keep the second
            self.turns.append((content, protocol.TIMEOUT_MESSAGE(120)))
        elif slip == "repeat":
            self.turns.append((content, result.text))
        self.turns.append((content, result.text))
        return result

    def _close(self, think: str, value: str) -> None:
        think = ANSWER_SENTENCE if self.rng.random() < self.habits.closing else think
        body = format_answer(value)
        # a first answer that is never closed, as in two of the ten released files
        if self.rng.random() < self.habits.dirt / 10:
            body = f"<answer>\n<summary>\n{think}\n</summary>\n{body}"
        self.turns.append((assistant_text(think, body), None))
