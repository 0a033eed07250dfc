"""Observations of other agents in the form of ours: search text as structured results, and
what became of a call.

The raw text of a search is a block per query, "\\n=======\\n" between them, and a bare sentence in
place of a block that failed:

    A Google search for 'q' found 2 results:

    ## Web Results
    1. [title](url)
    Date published: ..
    Source: ..

    snippet

    2. [title](url)

A regular expression over it cuts queries at apostrophes, reads numbered lines of a snippet as
results, and lets a result without snippet swallow the next. Here the call's own queries, the number
of results and the running ranks say where a block and a result may begin.
"""

import json
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

from venus import protocol
from venus.protocol import SearchHit
from venus.tools.offline import NOT_FOUND

SEPARATOR = "\n=======\n"


def _header(query: str) -> re.Pattern:
    """Match the header of a block; the pattern `query` has a group for its query."""
    return re.compile(
        rf"\s*A Google search for {query} found (\d+) results:[ \t]*(?:\n|$)", re.DOTALL
    )


HEADER = _header("(.*?)")
RANK = re.compile(r"(\d{1,4})\.[ \t]+\[")
FIELD = re.compile(r"(date published|date updated|source)[ \t]*:[ \t]*(.*)", re.IGNORECASE)
FAILED_QUERY = re.compile(r"\s*(No results found for |Google search Timeout)")
ERROR = re.compile(
    r"(Tool execution error|Error: Tool |Error fetching |Tool returned empty "
    r"response|\[(search|visit|document_parser)\] )",
    re.IGNORECASE,
)
# protocol.FAILED_SEARCH, behind the JSON of the queries that were answered
LIVE_FAILURE = re.compile(r"(\[.*\]\n)?The search for .* failed: ")
UNREADABLE = (
    "The webpage content could not be processed, and therefore, no information is available.",
    NOT_FOUND,
)
LIMIT = re.compile(r"\b(limit|maximum|reached|exceed\w*)\b", re.IGNORECASE)
LIMIT_KINDS = (
    ("context_limit", re.compile(r"context|token|length", re.IGNORECASE)),
    ("time_limit", re.compile(r"\btime", re.IGNORECASE)),
    ("turn_limit", re.compile("")),
)


def limit_notice(text: str) -> str | None:
    """Return our own message for a bare user message that asks for the answer because a limit is
    reached; None for any other text.
    """
    if not (LIMIT.search(text) and "answer" in text.lower()):
        return None
    return protocol.LIMIT_MESSAGES[next(kind for kind, words in LIMIT_KINDS if words.search(text))]


def unwrap(content: str) -> tuple[str | None, str | None]:
    """Return (observation body, limit notice) of a user message; (None, None) when
    it is neither.
    """
    text = content.strip()
    if protocol.RESPONSE_OPEN not in text:
        return None, limit_notice(text)
    text = text[text.index(protocol.RESPONSE_OPEN) :]
    text = text[: text.rfind(protocol.RESPONSE_CLOSE)] if protocol.RESPONSE_CLOSE in text else text
    pieces = protocol.split_observation(text + protocol.RESPONSE_CLOSE) or [""]
    bodies = [piece.removeprefix("\n").removesuffix("\n") for piece in pieces]
    return bodies[0], bodies[1] if len(bodies) > 1 else None


def convert(name: str, arguments: dict, body: str) -> tuple[str, str]:
    """Return the body in our form and its tool_status, decided by the name of the call that asked
    for it, never by its text.
    """
    text = body.strip()
    if not text:
        return body, "empty"
    if protocol.is_timeout(text):
        return body, "timeout"
    if ERROR.match(text) or text in (
        protocol.TOOL_ERROR_MESSAGE,
        *protocol.LIMIT_MESSAGES.values(),
    ):
        return body, "error"
    if name == "visit":
        return body, _visit_status(arguments["goal"], body)
    # of our own tools: what was answered, and a line for each query that failed
    if live := LIVE_FAILURE.match(body):
        return body, "ok" if any(hits for _, hits in _read_json(live[1] or "") or ()) else "error"
    return _convert_search(arguments["query"], body)


def _visit_status(goal: str, body: str) -> str:
    """`empty` when no page of the visit could be read or none had anything on the goal."""
    summaries = [page.rpartition("Summary: \n")[2].strip() for page in body.split(SEPARATOR)]
    nothing = (*UNREADABLE, f"nothing on {goal}")
    unread = (text in nothing or text.startswith(protocol.UNREAD_PAGE) for text in summaries)
    return "empty" if all(unread) else "ok"


def _convert_search(queries: Sequence[str], body: str) -> tuple[str, str]:
    """Structured results stay as they are but for their queries; text that holds no results
    stays, as an `error`.
    """
    blocks = _read_json(body)
    aligned = align_blocks(queries, _read_text(queries, body) if blocks is None else blocks)
    if aligned is None:
        return body, "error"
    status = "ok" if any(hits for _, hits in aligned) else "empty"
    if blocks is not None:
        same = [query for query, _ in blocks] == [query for query, _ in aligned]
        rows = [{"query": query, "web_page_info_list": hits} for query, hits in aligned]
        return (body if same else json.dumps(rows, ensure_ascii=False)), status
    return protocol.format_search(aligned), status


def align_blocks(
    queries: Sequence[str], blocks: Sequence[tuple[str | None, list]]
) -> list[tuple[str, list]] | None:
    """Give every query of the call its block, in order; a query without one failed and gets no
    results. None: the blocks are not these.

    The blocks may name their queries wrongly (cut at an apostrophe, at a line break, left out), so
    equal numbers are enough.
    """
    if len(blocks) == len(queries):
        return [(query, hits) for query, (_, hits) in zip(queries, blocks, strict=True)]
    left, aligned = list(blocks), []
    for query in queries:
        named = left[0][0] if left else None
        aligned.append((query, left.pop(0)[1] if named and query.startswith(named) else []))
    return aligned if blocks and not left else None


def _read_json(body: str) -> list[tuple[str, list]] | None:
    if not body.lstrip().startswith("["):
        return None
    try:
        blocks = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not all(
        isinstance(block, dict)
        and isinstance(block.get("query"), str)
        and isinstance(block.get("web_page_info_list"), list)
        for block in blocks
    ):
        return None
    return [(block["query"], block["web_page_info_list"]) for block in blocks]


def _read_text(queries: Sequence[str], body: str) -> list[tuple[str | None, list[SearchHit]]]:
    """Split the text at the separators and read each block; [] without any header or known failure,
    or when a block's results cannot be read.
    """
    parts = body.strip().split(SEPARATOR)
    # a snippet holds a separator: a block begins only at a header of the call's own
    # queries, or at a failure
    if len(parts) > len(queries):
        headers = tuple(f"A Google search for '{query}' found " for query in queries)
        starts = [0]
        for k, part in enumerate(parts[1:], 1):
            if part.lstrip().startswith(headers) or FAILED_QUERY.match(part):
                starts.append(k)
        parts = [SEPARATOR.join(parts[a:b]) for a, b in pairwise([*starts, len(parts)])]
    if not (any(map(HEADER.match, parts)) or all(map(FAILED_QUERY.match, parts))):
        return []
    blocks = [_read_block(queries, part) for part in parts]
    return [] if any(hits is None for _, hits in blocks) else blocks


def _read_block(queries: Sequence[str], part: str) -> tuple[str | None, list[SearchHit] | None]:
    patterns = [_header(f"'({re.escape(query)})'") for query in queries]
    # the exact ones first: a query may itself contain "' found 3 results:"
    header = next(filter(None, (pattern.match(part) for pattern in (*patterns, HEADER))), None)
    if not header:
        return None, []
    query, count = header[1].removeprefix("'").removesuffix("'"), int(header[2])
    lines = part[header.end() :].lstrip("\n").removeprefix("## Web Results").split("\n")
    hits = _read_hits(lines, count)
    return query, hits if hits or count == 0 else None


def _read_hits(lines: list[str], count: int) -> list[SearchHit]:
    """Read `count` results from the lines of a block: each begins below a blank line, with the
    next rank and a link.
    """
    heads = [
        (n, int(m[1]), *link)
        for n, line in enumerate(lines)
        if (m := RANK.match(line)) and (link := _read_link(line[m.end() :]))
    ]
    starts = []
    for number, head in enumerate(heads):
        if len(starts) == count:
            break
        if starts:
            n, rank, *_ = head
            # no blank line above: a numbered line inside a snippet
            if rank != starts[-1][1] + 1 or lines[n - 1].strip():
                continue
            later, is_last = heads[number + 1 :], len(starts) + 1 == count
            if _is_snippet(lines, starts[-1][0], head, later, is_last=is_last):
                continue
        starts.append(head)
    ends = [head[0] for head in starts[1:]] + [len(lines)]  # one too many where nothing starts
    return [
        _read_hit(title, url, [*rest, *lines[n + 1 : end]])
        for (n, _, title, url, *rest), end in zip(starts, ends, strict=False)
    ]


def _is_snippet(
    lines: list[str], previous: int, head: tuple, later: list[tuple], *, is_last: bool
) -> bool:
    """Whether a numbered link stands where the snippet of the result at line `previous` belongs,
    and another can be the next result.
    """
    between = [line.strip() for line in lines[previous + 1 : head[0]]]
    if between.count("") != 1 or any(line and not FIELD.match(line) for line in between):
        return False
    wanted = (head[1],) if is_last else (head[1], head[1] + 1)
    ranks = [rank for n, rank, *_ in later if rank in wanted and not lines[n - 1].strip()]
    return ranks[:1] == [head[1]]


def _read_link(text: str) -> tuple[str, ...] | None:
    """Return (title, url[, text behind the link]) of "title](url)"; brackets in a title and
    parentheses in a url are theirs.
    """
    text = text.strip()
    title, found, url = text[:-1].rpartition("](") if text.endswith(")") else ("", "", "")
    rest = ()
    # the link does not fill the line: it ends where its parentheses balance
    if not found or " " in url:
        title, found, tail = text.partition("](")
        depths = accumulate((1 if c == "(" else -1 if c == ")" else 0 for c in tail), initial=1)
        end = next((k for k, depth in enumerate(depths) if depth == 0), 0)
        url, rest = tail[: max(end - 1, 0)], (tail[end:].strip(),)
    title, url = title.strip(), url.strip()
    return (title, url, *filter(None, rest)) if found and title and url else None


def _read_hit(title: str, url: str, body: list[str]) -> SearchHit:
    date = None
    # only right below the link: what a snippet says stays
    while body and (field := FIELD.match(body[0].strip())):
        date = field[2].strip() if field[1].lower().startswith("date") else date
        body = body[1:]
    return SearchHit(title, url, "\n".join(body).strip(), date or None)
