"""Which turns of an aligned conversation stay, and the account of what went: the strict checker,
other tools, repeated calls.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from venus.curation.align import ARGUMENTS, Conversation, RefusedError, Step
from venus.grading.judge import Case


@dataclass
class Account:
    """One input row: what it counts as, and a line {row, lost, turn, reason, ..} for
    all that went from it.

    If it may be kept: its (file, line) pairs, what keeping it counts as, and what the judge must
    see (None: nothing).
    """

    where: str
    counts: Counter = field(default_factory=Counter)
    removed: list[dict] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)
    kept_counts: Counter = field(default_factory=Counter)
    case: Case | None = None

    def lose(self, lost: str, turn: int | None, reason: str, **more: object) -> None:
        """Note that the row, a turn (with its observation) or an observation went."""
        gone = {"row": self.where, "lost": lost, "turn": turn, "reason": reason}
        self.removed.append(gone | more)
        self.counts[f"dropped_{lost}s/{reason}"] += 1

    def reach(self, step: str, num_turns: int) -> None:
        """Count the row and its turns at a step of the cleaning."""
        self.counts.update({f"rows/{step}": 1, f"turns/{step}": num_turns})


def keep_valid(conversation: Conversation, account: Account) -> list[Step]:
    """Return the turns that the strict checker accepts, other tools aside, and
    that something answered.

    What is wrong with the last turn, or an answer before it, refuses the row.
    """
    kept: list[Step] = []
    for turn in conversation.orphans:
        account.lose("observation", turn, "orphan_observation")
    for step in conversation.steps:
        action = step.action
        final = step is conversation.steps[-1]
        valid = action.format_ok or other_tools(step)
        if action.kind == "answer" and not final:
            raise RefusedError("answer_before_end", step.index)
        if final and action.kind != "answer":
            raise RefusedError("no_final_answer" if valid else action.reason, step.index)
        if not valid:
            drop(step, kept, account, action.reason)
        elif step.body is None and step.notice is None and not final:
            drop(step, kept, account, "no_observation")
        else:
            kept.append(step)
            account.counts.update(f"repairs/{repair}" for repair in step.repairs)
    return kept


def prune(
    steps: Sequence[Step], account: Account, *, drop_trajectory: bool, with_goal: bool
) -> list[Step]:
    """Return the turns without other tools (or refuse the row that has one), and without calls that
    have succeeded before.

    A call whose observation is an error, empty or a time-out leaves no signature: its repetition
    is a retry, and stays.
    """
    kept: list[Step] = []
    succeeded: dict[tuple, int] = {}
    for step in steps:
        others = other_tools(step)
        if others and drop_trajectory:
            raise RefusedError("disallowed_tool", step.index)
        if others:
            account.counts.update(f"pruned_calls/{name[:40]}" for name in others)
            drop(step, kept, account, "disallowed_tool", tools=others)
            continue
        is_call = step.action.kind != "answer"
        signature = signature_of(step, with_goal=with_goal) if is_call else None
        if signature in succeeded:
            account.counts[f"duplicates/{step.action.kind}"] += 1
            first, call = succeeded[signature], step.action.arguments
            drop(step, kept, account, "duplicate", first=first, call=call)
            continue
        kept.append(step)
        if is_call and step.status == "ok":
            succeeded[signature] = step.index
    return kept


def drop(step: Step, kept: Sequence[Step], account: Account, reason: str, **more: object) -> None:
    """Note that a turn goes with its observation; a limit notice that came with it moves to the
    last turn of `kept`, in place.
    """
    account.lose("turn", step.index, reason, **more)
    if step.notice and kept:
        kept[-1].notice = step.notice


def other_tools(step: Step) -> list[str]:
    """List the tools that a turn calls and that our environment does not have."""
    return [name for name in step.tools if name.lower() not in ARGUMENTS]


def signature_of(step: Step, *, with_goal: bool) -> tuple:
    """Return what makes two calls the same: kind and set of queries (case and white space aside) or
    urls (fragment and last slash aside).
    """
    arguments = step.action.arguments
    if step.action.kind == "search":
        queries = (" ".join(query.split()).casefold() for query in arguments["query"])
        return ("search", frozenset(queries))
    urls = frozenset(url.strip().partition("#")[0].rstrip("/") for url in arguments["url"])
    return ("visit", urls, " ".join(arguments["goal"].split()) if with_goal else None)
