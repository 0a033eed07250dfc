"""What a tool is: a name, a call with normalised arguments, and a result whose
status says what happened.
"""

from dataclasses import dataclass
from typing import Protocol


class ToolServiceError(ValueError):
    """A service behind a tool is down, or the run's budget is spent. Like any ValueError of a tool
    it ends the run; finished rollouts are kept.
    """

    exit_code = 1


@dataclass(frozen=True)
class ToolResult:
    """What one call returned.

    text    the observation body, without its <tool_response> tags
    status  ok | empty (the service answered: no hits, page missing or silent on the goal) | error
            (this call failed) | timeout
    items   the same content as data, so that nobody parses `text`: SearchHit per hit, or
            VisitedPage per page found
    """

    text: str
    status: str
    items: tuple = ()


@dataclass(frozen=True)
class VisitedPage:
    """What a visit found on a page that exists; summary None = nothing on the goal."""

    url: str
    summary: str | None


class Tool(Protocol):
    """A callable with a name. It runs in a thread pool, several calls at once: it
    must be thread safe.

    arguments  as `parse_action` normalises them: {"query": [...]} or {"url": [...], "goal": ...}
    corpus     absolute path of the question's corpus, or None
    deadline   seconds the whole call may take
    """

    name: str

    def __call__(self, arguments: dict, *, corpus: str | None, deadline: float) -> ToolResult: ...
