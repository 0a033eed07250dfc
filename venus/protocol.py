"""The text protocol between agent and tools, in one place for cleaning, rollout, RL, evaluation and
the synthetic world.

An assistant turn is `<think>..</think>` and then exactly one action:
`<tool_call>{json}</tool_call>` or `<answer>..</answer>`. An observation is a user message
`<tool_response>\\n..\\n</tool_response>`. The model opens every turn after GENERATION_PROMPT.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from venus.cli import Options, option

PROMPT_STYLES = ("full", "short")
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
RESPONSE_OPEN, RESPONSE_CLOSE = "<tool_response>", "</tool_response>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
IM_START, IM_END, ENDOFTEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL_TOKENS = (
    ENDOFTEXT,
    IM_START,
    IM_END,
    THINK_OPEN,
    THINK_CLOSE,
    CALL_OPEN,
    CALL_CLOSE,
    RESPONSE_OPEN,
    RESPONSE_CLOSE,
)

# Qwen3-Thinking-2507: never sampled, so never in the loss
GENERATION_PROMPT = "<|im_start|>assistant\n<think>\n"
# the answer as the protocol itself would write it,
ANSWER_PREFIX = "Now there's enough information to answer\n</think>\n\n<answer>\n"
ANSWER_SUFFIX = "\n</answer>"  # around the ground truth when its information gain is scored

_STRINGS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": (
                "Search the web. Returns the top results (title, url, snippet) of each query."
            ),
            "parameters": {
                "type": "object",
                "required": ["query"],
                "properties": {"query": {**_STRINGS, "description": "One or more search queries."}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "visit",
            "description": "Open web pages. Returns from each page what is useful for the goal.",
            "parameters": {
                "type": "object",
                "required": ["url", "goal"],
                "properties": {
                    "url": {**_STRINGS, "description": "One or more page addresses."},
                    "goal": {"type": "string", "description": "What to find out from the pages."},
                },
            },
        },
    },
)

MALFORMED_MESSAGE = (
    "The last turn could not be read. Think inside <think></think>, then write either one "
    "<tool_call></tool_call> with a valid call "
    "or the final answer in <answer></answer>, and nothing after it."
)
_ANSWER_NOW = (
    "No more tool calls are possible. Using what you have found so far, give your final answer "
    "in <answer></answer> now."
)
LIMIT_MESSAGES = {
    "turn_limit": f"The limit on turns is reached. {_ANSWER_NOW}",
    "context_limit": f"The limit on context length is reached. {_ANSWER_NOW}",
    "time_limit": f"The limit on time is reached. {_ANSWER_NOW}",
}
TOOL_ERROR_MESSAGE = "The tool failed on this call. Try again or continue another way."
# call it with the query and what went wrong
FAILED_SEARCH = "The search for {!r} failed: {}".format
UNREAD_PAGE = "This page could not be read: "  # and why, in place of the summary
TIMEOUT_MESSAGE = "Tool execution timed out after {:g} seconds.".format  # call it with the seconds
_TIMEOUT = re.compile(r"Tool execution timed out after [\d.]+ seconds\.")


@dataclass(frozen=True)
class ProtocolOptions(Options):
    """Flags of whatever opens a conversation: rows for training and rollouts must agree."""

    system_prompt: str = option(
        "full",
        group="protocol",
        help="the system message: full with tool signatures, or short for tiny models",
        choices=PROMPT_STYLES,
        agent=True,
    )
    date: str | None = option(
        None, help="date line of the full system message, such as 2026-03-01; empty is none"
    )


def system_prompt(style: str, date: str | None = None) -> str:
    """Return the system message: "full" (role, tool signatures in Qwen's form) or "short" (one
    line, for tiny models).
    """
    if style not in PROMPT_STYLES:
        raise ValueError(f"system prompt style {style!r}; use full or short")
    if style == "short":
        text = "Search, visit, then answer."
    else:
        signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in TOOLS)
        text = (
            "You are a research agent that answers hard questions from the web. Gather "
            "evidence from several independent sources, open "
            "the pages that matter instead of trusting snippets, and cross-check every fact "
            "before you rely on it. Work on any subject, "
            "general or specialised. When the evidence is sufficient, reply once with a "
            "correct, complete and objective final answer, "
            "all of it inside <answer></answer>.\n\n"
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
            + signatures
            + "\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments "
            "within <tool_call></tool_call> XML tags:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )
    return text + (f"\n\nCurrent date: {date}\n" if date else "")


@dataclass(frozen=True)
class SearchHit:
    title: str
    url: str
    snippet: str
    date: str | None = None


def format_search(blocks: Sequence[tuple[str, Sequence[SearchHit]]]) -> str:
    """Write a search observation: one JSON block per query, in the form of the released
    trajectories (`date` only where known).
    """
    lists = [
        [{name: value for name, value in vars(hit).items() if value is not None} for hit in hits]
        for _, hits in blocks
    ]
    rows = [
        {"query": query, "web_page_info_list": hits}
        for (query, _), hits in zip(blocks, lists, strict=True)
    ]
    return json.dumps(rows, ensure_ascii=False)


def format_visit(pages: Sequence[tuple[str, str, str, str | None]]) -> str:
    """Write a visit observation from (url, goal, summary, evidence or None) per page, in the form
    of the released trajectories.
    """
    texts = [
        f"The useful information in {url} for user goal {goal} as follows: \n\n"
        + (f"Evidence in page: \n{evidence}\n\n" if evidence is not None else "")
        + f"Summary: \n{summary}"
        for url, goal, summary, evidence in pages
    ]
    return "\n=======\n".join(text.strip() for text in texts)


def observation_text(body: str) -> str:
    """Return the piece between the <tool_response> tags: the newlines belong to it, since they
    merge with the body's ends into tokens.
    """
    return f"\n{body}\n"


def split_observation(content: str) -> list[str] | None:
    """Return the pieces between the outer <tool_response> tags of a user message, None if
    it is no observation.

    Tags inside are page text, with one exception: a closing limit message, which the agent appends
    as a response of its own.
    """
    if not (content.startswith(RESPONSE_OPEN) and content.endswith(RESPONSE_CLOSE)):
        return None
    inner = content[len(RESPONSE_OPEN) : -len(RESPONSE_CLOSE)]
    for notice in map(observation_text, LIMIT_MESSAGES.values()):
        seam = f"{RESPONSE_CLOSE}\n{RESPONSE_OPEN}{notice}"
        if inner.endswith(seam):
            return [inner.removesuffix(seam), notice]
    return [inner]


def is_timeout(body: str) -> bool:
    """Whether an observation body is the message of a tool call that timed out."""
    return _TIMEOUT.fullmatch(body.strip()) is not None


@dataclass(frozen=True)
class Action:
    """What a turn does; arguments {"query": [..]} or {"url": [..], "goal": ..}; `reason` is a
    stable code for malformed turns.
    """

    kind: str
    arguments: dict | None = None
    answer: str | None = None
    reason: str | None = None

    @property
    def format_ok(self) -> bool:
        return self.kind != "malformed"


def parse_action(content: str) -> Action:
    """Read an assistant message that starts with <think>; the strict checker: whatever deviates is
    `malformed`, with the reason.

    Rule of the released format reward (balanced think tags first; tags in the thoughts count;
    nothing around the action), with json.loads and with names and arguments checked. Reasons:
    think_tags, text_before_think, no_action, two_actions, text_around_action, nested_answer,
    empty_answer, bad_json, unknown_tool, bad_arguments.
    """
    tags = re.findall(r"</?think>", content)
    if not tags or tags != [THINK_OPEN, THINK_CLOSE] * (len(tags) // 2):
        return Action("malformed", reason="think_tags")
    if content[: content.index(THINK_OPEN)].strip():
        return Action("malformed", reason="text_before_think")
    calls = content.count(CALL_OPEN), content.count(CALL_CLOSE)
    answers = content.count(ANSWER_OPEN), content.count(ANSWER_CLOSE)
    if not any(calls + answers):
        return Action("malformed", reason="no_action")
    if any(calls) and (any(answers) or calls != (1, 1)):
        return Action("malformed", reason="two_actions")
    if any(answers) and answers != (1, 1):
        return Action("malformed", reason="nested_answer")
    opened, closed = (CALL_OPEN, CALL_CLOSE) if any(calls) else (ANSWER_OPEN, ANSWER_CLOSE)
    body = content[content.rindex(THINK_CLOSE) + len(THINK_CLOSE) :].strip()
    if not (body.startswith(opened) and body.endswith(closed)):
        return Action("malformed", reason="text_around_action")
    body = body[len(opened) : -len(closed)].strip()
    if any(calls):
        return _parse_call(body)
    return Action("answer", answer=body) if body else Action("malformed", reason="empty_answer")


def _parse_call(body: str) -> Action:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):  # a sampled "[[[[.." may nest deeper than the parser goes
        return Action("malformed", reason="bad_json")
    if not (
        isinstance(call, dict)
        and isinstance(call.get("name"), str)
        and isinstance(call.get("arguments"), dict)
    ):
        return Action("malformed", reason="bad_json")
    if call["name"] not in ("search", "visit"):
        return Action("malformed", reason="unknown_tool")
    name, goal = (
        ("query", "") if call["name"] == "search" else ("url", call["arguments"].get("goal"))
    )
    values = call["arguments"].get(name)
    values = [values] if isinstance(values, str) else values
    if (
        not isinstance(values, list)
        or not values
        or not all(isinstance(v, str) and v.strip() for v in values)
        or not isinstance(goal, str)
    ):
        return Action("malformed", reason="bad_arguments")
    # "\\ud83d" alone: no UTF-8 form, so no tool could take it
    if any("\ud800" <= c <= "\udfff" for c in "".join([*values, goal])):
        return Action("malformed", reason="bad_arguments")
    return Action(call["name"], {name: values} if name == "query" else {name: values, "goal": goal})


def extract_prediction(content: str) -> str | None:
    """Return the answer, read leniently: outside the thoughts, what follows the LAST <answer>
    before the last </answer>; else None.

    "<answer>\\n<summary>..</summary>\\n<answer>\\nParis\\n</answer>" (two of the ten released files
    end like it) gives "Paris".
    """
    head, closed, _ = content.rpartition(THINK_CLOSE)[2].rpartition(ANSWER_CLOSE)
    if not closed or ANSWER_OPEN not in head:
        return None
    return head.rpartition(ANSWER_OPEN)[2].strip() or None


def split_think(content: str) -> tuple[str, str]:
    """Return (reasoning, rest) exactly as Qwen3's chat template splits an assistant message; ("",
    content) without </think>.
    """
    if THINK_CLOSE not in content:
        return "", content
    reasoning = content.split(THINK_CLOSE)[0].rstrip("\n").split(THINK_OPEN)[-1].strip("\n")
    return reasoning, content.split(THINK_CLOSE)[-1].lstrip("\n")


def format_tool_call(name: str, arguments: dict) -> str:
    """Write a tool call as the released trajectories do."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{CALL_OPEN}\n{call}\n{CALL_CLOSE}"


def format_answer(text: str) -> str:
    """Write a final answer."""
    return f"{ANSWER_OPEN}\n{text}\n{ANSWER_CLOSE}"


def assistant_text(think: str, body: str) -> str:
    """Return the assistant message of thoughts and an action, as the chat template renders it."""
    return f"{THINK_OPEN}\n{think}\n{THINK_CLOSE}\n\n{body}"


def call_signature(action: Action) -> tuple:
    """Return the key under which equal tool calls are duplicates: (kind, sorted
    stripped strings[, goal]).
    """
    assert action.kind in ("search", "visit") and action.arguments is not None, (
        f"no call in {action}"
    )
    strings = action.arguments["query" if action.kind == "search" else "url"]
    goal = (action.arguments["goal"].strip(),) if action.kind == "visit" else ()
    return (action.kind, tuple(sorted(s.strip() for s in strings)), *goal)
