"""Raw rows for the tests of the cleaner, and what becomes of them."""

import json

from venus.curation.clean import CleanConfig, clean_row
from venus.protocol import assistant_text, format_answer, format_tool_call

QUESTION = "Who wrote it?"
HIT = '[{"query": "a", "web_page_info_list": [{"title": "A", "url": "http://a", "snippet": "s"}]}]'
PAGE = "The useful information in http://a for user goal g as follows: \n\nSummary: \nIt was Bo."
NO_PAGE = (
    "The useful information in http://a for user goal g as follows: \n\nEvidence in page: "
    "\nThe provided webpage content could not be accessed. "
    "Please check the URL or file format.\n\nSummary: \nThe webpage content could not be "
    "processed, and therefore, no information is available."
)
TIMEOUT = "Tool execution timed out after 120 seconds."


def call(name="search", think="t", **arguments):
    return assistant_text(think, format_tool_call(name, arguments or {"query": ["a"]}))


def visit(url="http://a", goal="g"):
    return call("visit", url=[url], goal=goal)


def final(answer="Bo", think="done"):
    return assistant_text(think, format_answer(answer))


def observed(body):
    return f"<tool_response>\n{body}\n</tool_response>"


def conversation(*contents, roles=("user", "assistant")):
    """The messages of a raw row: question, then turns and observations by turns; a (role, content)
    pair has its own role.
    """
    texts = [QUESTION, *contents]
    pairs = [
        text if isinstance(text, tuple) else (roles[k % 2], text) for k, text in enumerate(texts)
    ]
    return [{"role": role, "content": content} for role, content in pairs]


def raw(*contents, answer="Bo", **more):
    """A raw row in the form of REDSearcher."""
    return {
        "meta": {"question": QUESTION, "answer": answer},
        "messages": conversation(*contents),
        **more,
    }


def config(**settings):
    return CleanConfig(
        **{
            "input": ("in",),
            "output": "out",
            "judge": "none",
            "validation": 0.0,
            "system_prompt": "short",
            **settings,
        }
    )


def cleaned(row, **settings):
    """The account of a row, and the clean row (None: it fell out)."""
    account = clean_row(config(**settings), "row", row)
    return account, json.loads(account.lines[0][1]) if account.lines else None


def texts(row):
    """The contents after the question."""
    return [message["content"] for message in row["messages"][2:]]


def losses(account):
    """[(lost, turn, reason)] of all that went."""
    return [(gone["lost"], gone["turn"], gone["reason"]) for gone in account.removed]


SEARCH, FOUND = call(), observed(HIT)
PYTHON = assistant_text(
    "t",
    '<tool_call>\n{"name": "PythonInterpreter", "arguments": '
    "{}}\n<code>\nprint(1)\n</code>\n</tool_call>",
)
