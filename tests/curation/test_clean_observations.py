"""Search text of other agents -> structured results, with every trap of the text format;
what became of a call.
"""

import json

import pytest
from clean_samples import HIT, NO_PAGE, PAGE, TIMEOUT
from hypothesis import given
from hypothesis import strategies as st

from venus.curation.observations import SEPARATOR, align_blocks, convert, limit_notice, unwrap
from venus.protocol import (
    FAILED_SEARCH,
    LIMIT_MESSAGES,
    TOOL_ERROR_MESSAGE,
    UNREAD_PAGE,
    format_search,
    format_visit,
)


def page_text(rank, title, url, snippet=None, date=None, source=None):
    """One result as the tool of the raw data writes it: without snippet two blank lines follow."""
    head = (
        f"{rank}. [{title}]({url})"
        + (f"\nDate published: {date}" if date else "")
        + (f"\nSource: {source}" if source else "")
    )
    return f"{head}\n" + ("" if snippet is None else "\n" + snippet)


def search_text(query, *pages):
    return (
        f"A Google search for '{query}' found {len(pages)} results:\n\n## Web Results\n"
        + "\n\n".join(pages)
    )


def read(text, *queries):
    """{query: [(title, url, snippet, date)]} of a converted observation."""
    body, _ = convert("search", {"query": list(queries)}, text)
    blocks = json.loads(body)
    return [
        (
            b["query"],
            [
                tuple(hit.get(k) for k in ("title", "url", "snippet", "date"))
                for hit in b["web_page_info_list"]
            ],
        )
        for b in blocks
    ]


A, B = ("A", "http://a", "sa", None), ("B", "http://b", "sb", None)
PAGE_A, PAGE_B = page_text(1, "A", "http://a", "sa"), page_text(2, "B", "http://b", "sb")
CASES = {
    "two results": (search_text("q", PAGE_A, PAGE_B), ["q"], [("q", [A, B])]),
    "ranks may begin at 0": (
        search_text("q", page_text(0, "A", "http://a", "sa")),
        ["q"],
        [("q", [A])],
    ),
    "A: the separator of several queries is in no snippet": (
        SEPARATOR.join(
            [search_text("q", PAGE_A), search_text("r", page_text(1, "B", "http://b", "sb"))]
        ),
        ["q", "r"],
        [("q", [A]), ("r", [B])],
    ),
    "A: date is a field and source goes, below the link only": (
        search_text(
            "q",
            page_text(
                1,
                "A",
                "http://a",
                "Source: a hat\nDate published: never",
                date="May 1",
                source="Hats",
            ),
        ),
        ["q"],
        [("q", [("A", "http://a", "Source: a hat\nDate published: never", "May 1")])],
    ),
    "B: a failed query keeps its block, and its sentence is in no snippet": (
        SEPARATOR.join(
            [
                search_text("q", PAGE_A),
                "No results found for 'r'. Try with a more general query.",
                search_text("s", PAGE_A),
            ]
        ),
        ["q", "r", "s"],
        [("q", [A]), ("r", []), ("s", [A])],
    ),
    "all queries failed": (
        SEPARATOR.join(
            [
                "No results found for 'q'. Try with a more general query.",
                "Google search Timeout, return None, Please try again later.",
            ]
        ),
        ["q", "r"],
        [("q", []), ("r", [])],
    ),
    "D: apostrophes": (
        search_text("O'Brien's 'dog'", PAGE_A),
        ["O'Brien's 'dog'"],
        [("O'Brien's 'dog'", [A])],
    ),
    "D: a query that spells a header": (
        search_text("x' found 7 results:", PAGE_A),
        ["x' found 7 results:"],
        [("x' found 7 results:", [A])],
    ),
    "E: a query with a line break": (search_text("q\nr", PAGE_A), ["q\nr"], [("q\nr", [A])]),
    "a result without snippet does not swallow the next": (
        search_text("q", page_text(1, "A", "http://a"), PAGE_B),
        ["q"],
        [("q", [("A", "http://a", "", None), B])],
    ),
    "nor when the blank lines were squeezed": (
        search_text("q", "1. [A](http://a)", PAGE_B),
        ["q"],
        [("q", [("A", "http://a", "", None), B])],
    ),
    "G: numbered links in a snippet are text": (
        search_text("q", page_text(1, "A", "http://a", "1. [x](y)\n2. [x](y)\n3. [x](y)"), PAGE_B),
        ["q"],
        [("q", [("A", "http://a", "1. [x](y)\n2. [x](y)\n3. [x](y)", None), B])],
    ),
    "G: even when a snippet begins with the next rank": (
        search_text("q", page_text(1, "A", "http://a", "2. [x](y)\nmore"), PAGE_B),
        ["q"],
        [("q", [("A", "http://a", "2. [x](y)\nmore", None), B])],
    ),
    "G: and when it is the last": (
        search_text("q", page_text(1, "A", "http://a", "2. [x](y)")),
        ["q"],
        [("q", [("A", "http://a", "2. [x](y)", None)])],
    ),
    "brackets in titles, parentheses in urls": (
        search_text("q", page_text(1, "[PDF] A](x) B", "http://a/b_(c)", "sa")),
        ["q"],
        [("q", [("[PDF] A](x) B", "http://a/b_(c)", "sa", None)])],
    ),
    "text behind the link joins the snippet": (
        search_text("q", "1. [A](http://a_(b)) tail (of it)\n\nsa"),
        ["q"],
        [("q", [("A", "http://a_(b)", "tail (of it)\n\nsa", None)])],
    ),
    "a separator inside a snippet": (
        SEPARATOR.join(
            [
                search_text("q", page_text(1, "A", "http://a", f"s{SEPARATOR}a")),
                search_text("r", PAGE_A),
            ]
        ),
        ["q", "r"],
        [("q", [("A", "http://a", f"s{SEPARATOR}a", None)]), ("r", [A])],
    ),
    "a query twice": (
        SEPARATOR.join([search_text("q", PAGE_A)] * 2),
        ["q", "q"],
        [("q", [A]), ("q", [A])],
    ),
    "a lost block": (search_text("r", PAGE_A), ["q", "r"], [("q", []), ("r", [A])]),
    "structured results whose query was cut at the apostrophe": (
        HIT.replace('"a"', '"O"', 1),
        ["O'Brien"],
        [("O'Brien", [("A", "http://a", "s", None)])],
    ),
    "structured results that lost a failed query": (
        HIT,
        ["z", "a"],
        [("z", []), ("a", [("A", "http://a", "s", None)])],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_search_text_becomes_the_results_of_the_calls_own_queries(case):
    text, queries, wanted = CASES[case]
    assert read(text, *queries) == wanted


def test_structured_results_with_the_calls_queries_stay_byte_for_byte():
    body = HIT.replace(", ", ",  ")
    assert convert("search", {"query": ["a"]}, body) == (body, "ok")


@pytest.mark.parametrize(
    ("name", "body", "status"),
    [
        ("search", search_text("a", PAGE_A), "ok"),
        ("search", "No results found for 'a'. Try with a more general query.", "empty"),
        ("search", '[{"query": "a", "web_page_info_list": []}]', "empty"),
        ("search", TIMEOUT, "timeout"),
        ("search", "Tool execution error: KeyError('organic')", "error"),
        (
            "search",
            "[Search] Invalid request format: Input must be a JSON object containing 'query' field",
            "error",
        ),
        ("search", "some text", "error"),
        ("search", "A Google search for 'a' found 2 results:\n\nnone in this form", "error"),
        ("search", "A Google search for 'a' found 0 results:\n\n## Web Results\n", "empty"),
        ("search", " \n", "empty"),
        ("search", FAILED_SEARCH("a", "serper: HTTP 500 (3 tries)"), "error"),
        ("search", f"{HIT}\n{FAILED_SEARCH('b', 'serper: HTTP 500 (3 tries)')}", "ok"),
        ("search", f"[]\n{FAILED_SEARCH('a', 'x')}\n{FAILED_SEARCH('b', 'x')}", "error"),
        (
            "visit",
            format_visit(
                [("u", "g", UNREAD_PAGE + "HTTP 404", None), ("v", "g", "nothing on g", None)]
            ),
            "empty",
        ),
        (
            "visit",
            f"{PAGE}\n=======\n{format_visit([('u', 'g', UNREAD_PAGE + 'HTTP 404', None)])}",
            "ok",
        ),
        ("visit", PAGE, "ok"),
        ("visit", f"{PAGE}\n=======\n{NO_PAGE}", "ok"),
        ("visit", f"{NO_PAGE}\n=======\n{NO_PAGE}", "empty"),
        ("visit", format_visit([("u", "g", "nothing on g", None)]), "empty"),
        ("visit", format_visit([("u", "g", "page not found", None)]), "empty"),
        ("visit", TIMEOUT, "timeout"),
        ("visit", TOOL_ERROR_MESSAGE, "error"),
        ("visit", "Error: Tool visit not found", "error"),
        ("visit", LIMIT_MESSAGES["turn_limit"], "error"),
        ("visit", "", "empty"),
    ],
)
def test_the_status_of_a_call_follows_from_its_observation(name, body, status):
    assert convert(name, {"query": ["a"], "url": ["u"], "goal": "g"}, body)[1] == status


def test_a_page_that_mentions_web_results_stays_a_page():
    """Probe C: the released cleaner made `[{"query":"","web_page_info_list":[]}]` of any visit
    whose text had these two words.
    """
    page = format_visit([("http://a", "g", search_text("q", PAGE_A), None)])
    assert convert("visit", {"url": ["http://a"], "goal": "g"}, page) == (page, "ok")


def test_blocks_that_are_not_the_calls_are_left_alone():
    assert align_blocks(["a"], [("b", []), ("c", [])]) is None
    assert align_blocks(["a", "b"], [("c", [])]) is None
    assert convert("search", {"query": ["x", "y"]}, HIT) == (HIT, "error")


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("<tool_response>\nb\n</tool_response>", ("b", None)),
        ("  <tool_response>b</tool_response>\n", ("b", None)),
        (
            "<tool_response>\na <tool_response> in a page\n</tool_response>",
            ("a <tool_response> in a page", None),
        ),
        ("<tool_response>\ncut off", ("cut off", None)),
        (
            "The context length reached the maximum context length. Please answer now.",
            (None, LIMIT_MESSAGES["context_limit"]),
        ),
        ("The iteration limit is reached. Please answer ...", (None, LIMIT_MESSAGES["turn_limit"])),
        ("The time limit is reached, answer", (None, LIMIT_MESSAGES["time_limit"])),
        ("And who was his brother?", (None, None)),
    ],
)
def test_a_user_message_is_unwrapped_into_observation_and_limit_notice(content, wanted):
    assert unwrap(content) == wanted


@pytest.mark.parametrize("kind", LIMIT_MESSAGES)
def test_our_own_limit_messages_are_recognised_and_stay(kind):
    assert limit_notice(LIMIT_MESSAGES[kind]) == LIMIT_MESSAGES[kind]
    own = f"<tool_response>\n{LIMIT_MESSAGES[kind]}\n</tool_response>"
    seam = f"<tool_response>\nb\n</tool_response>\n{own}"
    assert unwrap(seam) == ("b", LIMIT_MESSAGES[kind])


# snippets as hostile as their format allows: numbered links, headers, fields; no blank
# line and no separator
LINE = st.sampled_from(
    [
        "1. [x](y)",
        "2. [x](y)",
        "3. [a](b) c",
        "Source: s",
        "## Web Results",
        "A Google search for 'q' found 2 results:",
        "t",
    ]
)
SNIPPET = st.lists(LINE, min_size=1, max_size=4).map(lambda lines: "w " + "\n".join(lines))
WORDS = st.text("ab'\n[]() ", min_size=1, max_size=8).filter(lambda text: text.strip())
HITS = st.lists(
    st.tuples(
        st.sampled_from(["T", "[a] b", "x](y"]),
        st.sampled_from(["http://u", "u_(v)"]),
        st.none() | SNIPPET,
    ),
    max_size=4,
)


@given(st.lists(st.tuples(WORDS, HITS), min_size=1, max_size=3), st.sampled_from([0, 1]))
def test_what_the_raw_tool_writes_is_read_back(blocks, first_rank):
    parts = []
    for query, hits in blocks:
        pages = [page_text(first_rank + k, *hit) for k, hit in enumerate(hits)]
        parts.append(
            search_text(query, *pages)
            if hits
            else f"No results found for '{query}'. Try with a more general query."
        )
    wanted = [
        (query, [(title, url, snippet or "", None) for title, url, snippet in hits])
        for query, hits in blocks
    ]
    assert read(SEPARATOR.join(parts), *[query for query, _ in blocks]) == wanted


@given(
    st.text(max_size=80) | st.lists(LINE, max_size=8).map("\n".join),
    st.lists(WORDS, min_size=1, max_size=3),
)
def test_any_text_is_converted_and_converting_again_changes_nothing(body, queries):
    arguments = {"query": queries, "url": queries, "goal": "g"}
    for name in ("search", "visit"):
        text, status = convert(name, arguments, body)
        assert status in ("ok", "empty", "error", "timeout") and convert(name, arguments, text) == (
            text,
            status,
        )


def test_the_search_format_of_the_protocol_is_its_own_reading():
    body = format_search([("q", [])])
    assert convert("search", {"query": ["q"]}, body) == (body, "empty")


def test_hostile_text_takes_linear_time():
    """A regular expression for links would try each "](" of a line against each other."""
    long = "1. [" + "](" * 50_000 + "\n\n" + "\n\n".join(f"{k}. [a](b)" for k in range(3000))
    body, status = convert(
        "search",
        {"query": ["q"]},
        f"A Google search for 'q' found 3000 results:\n\n## Web Results\n{long}",
    )
    assert status == "ok" and len(json.loads(body)[0]["web_page_info_list"]) == 3000
