"""Environment alignment: a conversation of another agent as question and turns in our protocol,
roles found by role, nothing by index.

Understood: raw rows (`meta` with question and answer), clean rows (`question`, `gt`), rollouts with
`question` and `answer`, and rollouts with messages only. What cannot be aligned is refused with a
stable reason and the number of the assistant turn.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from venus import protocol
from venus.curation.observations import convert, unwrap
from venus.files import aliases_of
from venus.protocol import Action

CALL = re.compile(f"{protocol.CALL_OPEN}(.*?){protocol.CALL_CLOSE}", re.DOTALL)
SUMMARY = re.compile(r"<summary>.*?</summary>", re.DOTALL)
STRAY_TAGS = re.compile(r"</?(?:answer|summary)>")
# the protocol's name and its alias
ARGUMENTS = {"search": ("query", "queries"), "visit": ("url", "urls")}


class RefusedError(ValueError):
    """The row cannot be used: a stable reason code, and the turn that is to blame (None:
    the row as a whole).
    """

    def __init__(self, reason: str, turn: int | None = None):
        super().__init__(reason)
        self.reason, self.turn = reason, turn


@dataclass
class Step:
    """One assistant turn of the raw row, aligned, and what answered it: observation body,
    tool_status, a closing limit notice.
    """

    index: int
    content: str
    action: Action = Action("malformed")
    tools: tuple[str, ...] = ()
    body: str | None = None
    status: str | None = None
    notice: str | None = None
    repairs: list[str] = field(default_factory=list)


@dataclass
class Conversation:
    """The question, the assistant turns in order, of each observation that nothing had asked for
    the turn before it, and gt as the row gives it (None = unlabelled).
    """

    question: str
    steps: list[Step]
    orphans: list[int]
    gt: str | list[str] | None = None


def align(row: dict) -> Conversation:
    """Read a row of any known kind (`messages` is a list) and align its turns with our environment;
    RefusedError says why not.
    """
    meta = row["meta"] if isinstance(row.get("meta"), dict) else {}
    asked = (meta.get("question"), row.get("question"))
    asked = next((text for text in asked if isinstance(text, str) and text.strip()), None)
    gt = next(filter(aliases_of, (meta.get("answer"), row.get("gt"), row.get("answer"))), None)
    conversation = _read_messages(row["messages"])
    if asked is not None and _sound(asked).split() != conversation.question.split():
        raise RefusedError("question_mismatch")
    for step in conversation.steps:
        _align_turn(step, final=step is conversation.steps[-1])
        if step.action.kind in ARGUMENTS and step.body is not None:
            step.body, step.status = convert(step.action.kind, step.action.arguments, step.body)
    if gt is not None:
        conversation.gt = [*map(_sound, gt)] if isinstance(gt, list) else _sound(gt)
    return conversation


def _read_messages(messages: Sequence[object]) -> Conversation:
    """Find the question, the assistant turns and their observations."""
    question = None
    steps, orphans = [], []
    for message in messages:
        turn = len(steps) - 1 if steps else None
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise RefusedError("bad_message", turn)
        role, content = message.get("role"), _sound(message["content"])
        if role == "system" and question is None:
            continue  # ours takes its place
        if role not in ("user", "tool", "assistant"):
            raise RefusedError("bad_role", turn)
        if question is None:
            if role != "user" or protocol.RESPONSE_OPEN in content or not content.strip():
                raise RefusedError("no_question")
            question = content
        elif role == "assistant":
            steps.append(Step(len(steps), content))
        elif not steps:
            raise RefusedError("second_question")
        else:
            _observe(steps[-1], role, content, orphans)
    if question is None or not steps:
        raise RefusedError("no_question" if question is None else "no_turns")
    if messages[-1].get("role") != "assistant":
        raise RefusedError("ends_with_user", len(steps) - 1)
    return Conversation(question, steps, orphans)


def _observe(step: Step, role: str, content: str, orphans: list[int]) -> None:
    """Hang an observation or a limit notice on the turn before it, in place; a second observation
    is noted as an orphan.
    """
    body, notice = unwrap(content)
    body = content if role == "tool" and body is None else body
    if body is None and notice is None:
        raise RefusedError("second_question", step.index)
    if body is not None and step.body is not None:
        orphans.append(step.index)
    elif body is not None:
        step.body = body
    step.notice = notice or step.notice


def _align_turn(step: Step, *, final: bool) -> None:
    """Bring calls into the protocol's form and answers out of their nests, in place; what is valid
    already stays byte for byte.
    """
    calls = [_load(text) for text in CALL.findall(step.content)]
    step.tools = tuple(name for name in map(_name, calls) if name is not None)
    opened, closed = map(step.content.count, (protocol.CALL_OPEN, protocol.CALL_CLOSE))
    if len(calls) == opened == closed == 1:
        normal = _normal_call(calls[0])
        if normal and (text := protocol.format_tool_call(*normal)) not in step.content:
            step.content = CALL.sub(lambda _: text, step.content)
            step.repairs.append("call")
    step.action = protocol.parse_action(step.content)
    if step.action.reason in ("two_actions", "nested_answer", "text_around_action"):
        repaired = _without_stray_tags(step.content, final=final)
        if repaired and protocol.parse_action(repaired).format_ok:
            step.content, step.action = repaired, protocol.parse_action(repaired)
            step.repairs.append("answer" if step.action.kind == "answer" else "thought_tags")


def _without_stray_tags(content: str, *, final: bool) -> str | None:
    """Return the turn with the last answer alone, or the call alone, and no answer or summary tags
    in the thoughts; None: nothing to take.
    """
    thoughts, closed, rest = content.rpartition(protocol.THINK_CLOSE)
    thoughts = STRAY_TAGS.sub("", thoughts)
    if protocol.CALL_OPEN in rest:
        return thoughts + closed + rest
    answer = protocol.extract_prediction(content) if final else None
    before = rest[: rest.find(protocol.ANSWER_OPEN)]
    after = rest[rest.rfind(protocol.ANSWER_CLOSE) + len(protocol.ANSWER_CLOSE) :]
    if answer is None or SUMMARY.sub("", before + after).strip():
        return None
    return f"{thoughts}{closed}\n\n{protocol.format_answer(SUMMARY.sub('', answer).strip())}"


def _name(call: object) -> str | None:
    """Return the name of the tool that a call names."""
    name = call.get("name") if isinstance(call, dict) else None
    return _sound(name).strip() if isinstance(name, str) else None


def _normal_call(call: object) -> tuple[str, dict] | None:
    """Read a search or visit call with any known alias of its arguments: `queries`, `urls`, a
    string or a JSON string for a list, goals.
    """
    name = (_name(call) or "").lower()
    arguments = _unpack(call.get("arguments"), dict) if name in ARGUMENTS else None
    if not isinstance(arguments, dict):
        return None
    key, alias = ARGUMENTS[name]
    values = _unpack(arguments.get(key, arguments.get(alias)), list)
    values = [values] if isinstance(values, str) else values
    goal = _unpack(arguments.get("goal", "" if name == "search" else None), list)
    goals = [goal] if isinstance(goal, str) else goal
    if not (isinstance(values, list) and isinstance(goals, list)):
        return None
    if not all(isinstance(text, str) for text in (*values, *goals)):
        return None
    normal = {key: [_sound(value) for value in values]}
    if name == "visit":
        normal["goal"] = _sound("; ".join(goals))
    return name, normal


def _load(text: str) -> object:
    """Parse the JSON of a call, up to the <code> that an interpreter call
    carries; None if it is none.
    """
    try:
        # a line break inside a string is let through, and written as \\n
        return json.loads(text.split("<code>")[0], strict=False)
    except (ValueError, RecursionError):
        return None


def _unpack(value: object, kind: type) -> object:
    """Parse a string that holds a JSON list of strings, or an object; any other value stays."""
    if not isinstance(value, str) or not value.lstrip().startswith({list: "[", dict: "{"}[kind]):
        return value
    loaded = _load(value)
    is_one = isinstance(loaded, kind) and loaded and all(isinstance(item, str) for item in loaded)
    return loaded if is_one else value


def _sound(text: str) -> str:
    """Join the halves of surrogate pairs; a lone one, which no UTF-8 file can hold,
    becomes U+FFFD.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
