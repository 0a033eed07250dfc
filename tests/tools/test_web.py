"""The live tools against stub services: what they ask, what the agent is told, and what each kind
of failure does. No failure reads as "no results".
"""

import json
import socket
import threading
import time
from dataclasses import replace

import pytest
import requests
from stub_server import (
    completion,
    flaky,
    hang,
    jina,
    jina_error,
    models,
    organic,
    serve,
    strict,
    summary,
    trickle_headers,
)

from venus.cli import exit_code
from venus.protocol import SearchHit, format_search, format_visit
from venus.services import http
from venus.services.chat import ChatClient
from venus.services.http import AddressError, RefusedError, check_public, retry_after, with_tries
from venus.tools import web
from venus.tools.base import ToolServiceError, VisitedPage
from venus.tools.options import Keys, ToolOptions

KEYS = Keys(serper="serper-secret", jina="jina-secret", summary="sk-secret")
HIT = {"title": "Bo", "link": "http://b.o/", "snippet": "is tall", "date": "2024"}
PAGE = "http://8.8.8.8/page"  # public, and never asked: Jina is a stub


def ok(body):
    return lambda *_: (200, body, {})


def status(code, body="", **headers):
    return lambda *_: (
        code,
        body,
        {name.replace("_", "-"): value for name, value in headers.items()},
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No long waits between tries."""
    monkeypatch.setattr(web, "FIRST_WAIT", 0.001)
    monkeypatch.setattr("venus.tools.options.FIRST_WAIT", 0.001)


def tools_at(stub, keys=KEYS, **changes):
    """Live tools whose services are all the stub."""
    base = stub.url.removesuffix("/v1")
    options = ToolOptions(
        tools="live", search_base=base, reader_base=base, summary=f"openai:{stub.url}:m"
    )
    options = replace(options, **changes)
    options.validate()
    return options.make_tools(keys)


def search(stub, *queries, deadline=20.0, **changes):
    return tools_at(stub, **changes)["search"](
        {"query": list(queries)}, corpus=None, deadline=deadline
    )


def visit(stub, *urls, goal="g", deadline=20.0, **changes):
    return tools_at(stub, **changes)["visit"](
        {"url": list(urls), "goal": goal}, corpus=None, deadline=deadline
    )


def serper(reply):
    return {"POST /search": reply}


def pages(page, chat=None):
    return {"POST /": page, "POST /v1/chat/completions": chat or ok(summary("e", "s"))}


# Search


def test_hits_come_straight_from_the_services_json():
    """Trap 28: parsed from text, a hit without snippet swallowed the next and an
    apostrophe cut the query.
    """
    hits = [
        HIT,
        {"title": "No snippet", "link": "http://n.o/"},
        {"title": "Web Results", "link": "http://w.r/", "snippet": "1. [x](y)"},
        {"title": "no link"},
    ]
    with serve(routes=serper(ok(organic(*hits)))) as stub:
        result = search(stub, "Schindler's list")
    found = [
        SearchHit("Bo", "http://b.o/", "is tall", "2024"),
        SearchHit("No snippet", "http://n.o/", ""),
    ]
    found.append(SearchHit("Web Results", "http://w.r/", "1. [x](y)"))
    assert (result.status, result.items) == ("ok", tuple(found)) and result.text == format_search(
        [("Schindler's list", found)]
    )
    [request] = stub.requests
    assert request["body"] == {
        "q": "Schindler's list",
        "gl": "us",
        "hl": "en",
        "location": "United States",
    }
    assert (
        request["headers"]["X-API-KEY"] == KEYS.serper
        and request["headers"]["Content-Type"] == "application/json"
    )


def test_blocked_addresses_are_neither_shown_nor_opened():
    """Copies of a benchmark hold its answers: a hit on one is left out, a page is refused in
    words, before any request.
    """
    copy = "http://8.8.8.8/Datasets/BrowseComp/rows"
    routes = serper(ok(organic(HIT, {**HIT, "link": copy}))) | pages(ok(jina("page")))
    with serve(routes=routes) as stub:
        assert [hit.url for hit in search(stub, "q", blocked=("datasets/browsecomp",)).items] == [
            HIT["link"]
        ]
        result = visit(stub, copy, blocked=("datasets/browsecomp",))
        assert (result.status, result.items, len(stub.requests)) == ("empty", (), 1)
        assert "blocked in this run" in result.text
        assert visit(stub, copy).status == "ok"


def test_several_queries_are_asked_at_once_and_stand_in_their_order_each_in_its_language():
    barrier = threading.Barrier(2, timeout=10)

    def reply(body, number):
        barrier.wait()
        return 200, organic({**HIT, "title": body["q"]}), {}

    with serve(routes=serper(reply)) as stub:
        result = search(stub, "b", "東京")
    assert [block["query"] for block in json.loads(result.text)] == ["b", "東京"] and [
        hit.title for hit in result.items
    ] == ["b", "東京"]
    assert {body["q"]: body["gl"] for body in stub.asked("/search")} == {"b": "us", "東京": "cn"}


@pytest.mark.parametrize(
    "body", [organic(), {"searchParameters": {"q": "?"}}], ids=["empty list", "no list"]
)
def test_an_answer_without_hits_is_empty(body):
    with serve(routes=serper(ok(body))) as stub:
        result = search(stub, "q")
    assert (result.status, result.items, result.text) == ("empty", (), format_search([("q", [])]))


REFUSALS = {
    "no key": (403, {"message": "Unauthorized.", "statusCode": 403}),
    "401": (401, {"message": f"bad key {KEYS.serper}"}),
    "no credits": (400, {"message": "Not enough credits", "statusCode": 400}),
    "quota": (429, {"message": "billing limit"}),
    "payment": (402, "pay"),
    "wrong address": (404, "<html>nginx"),
    "moved": (301, ""),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_search_service_that_refuses_ends_the_run_with_its_own_words(refusal):
    """Trap 27: an expired key looked like an empty web, in evaluation and in training."""
    code, body = REFUSALS[refusal]
    routes = serper(status(code, body, Location="http://127.0.0.1:1/"))
    with (
        serve(routes=routes) as stub,
        pytest.raises(RefusedError, match=f"serper refuses: HTTP {code}") as caught,
    ):
        search(stub, "q")
    said = str(caught.value)
    assert len(stub.requests) == 1 and KEYS.serper not in said and "\n" not in said
    assert (
        body == ""
        or (body["message"] if isinstance(body, dict) else body).replace(KEYS.serper, "***") in said
    )


PASSING = {
    "429": status(429, "", Retry_After="0.01"),
    "500": status(500, "oops"),
    "524": status(524),
    "html": ok("<html>login</html>"),
    "list": ok("[]"),
    "cut off": ok('{"organic": ['),
    "half closed": status(200, "{", Content_Length="99"),
    "other json": ok({"message": "hm"}),
}


@pytest.mark.parametrize("fault", PASSING)
def test_a_passing_fault_is_tried_again_thrice_and_then_told_as_a_failure(fault):
    replies = {
        "POST /search": lambda *a: (
            PASSING[fault](*a) if len(stub.requests) < 3 else ok(organic(HIT))(*a)
        )
    }
    with serve(routes=replies) as stub:
        assert search(stub, "q").status == "ok" and len(stub.requests) == 3
    with serve(routes=serper(PASSING[fault])) as stub:
        result = search(stub, "q")
    assert len(stub.requests) == 3 and (result.status, result.items) == ("error", ())
    assert (
        result.text.startswith("The search for 'q' failed: serper: ")
        and "(3 tries)" in result.text
        and "web_page_info_list" not in result.text
    )


def test_a_query_that_is_refused_is_told_and_not_tried_again():
    with serve(routes=serper(status(400, {"message": "Query too long"}))) as stub:
        result = search(stub, "q")
    assert (result.status, result.text) == (
        "error",
        "The search for 'q' failed: serper: HTTP 400 Query too long",
    ) and len(stub.requests) == 1


def test_one_failed_query_of_two_leaves_the_hits_of_the_other_and_says_so():
    with serve(
        routes=serper(
            lambda body, number: (
                (400, {"message": "no"}, {}) if body["q"] == "b" else (200, organic(HIT), {})
            )
        )
    ) as stub:
        result = search(stub, "a", "b")
    assert result.status == "ok" and len(result.items) == 1
    first, second = result.text.split("\n")
    assert (
        json.loads(first)[0]["query"] == "a"
        and second == "The search for 'b' failed: serper: HTTP 400 no"
    )


@pytest.mark.parametrize(
    "slow", [5.0, hang, trickle_headers], ids=["body trickles", "says nothing", "headers trickle"]
)
def test_a_call_ends_at_its_deadline_however_the_server_drags_it_out(slow):
    """The timeout of `requests` is between bytes: one byte a second keeps such a call open for
    ever, and its slot busy.
    """
    with serve(routes=serper(lambda *_: slow)) as stub:
        started = time.monotonic()
        result = search(stub, "q", deadline=0.4)
        assert time.monotonic() - started < 3
    assert result.status == "timeout" and "takes too long" in result.text


def test_each_try_has_its_own_bound_within_the_deadline():
    with serve(routes=serper(lambda *_: hang)) as stub:
        result = search(stub, "q", web_seconds=0.2)
    assert len(stub.requests) == 3 and result.status == "timeout"


def test_retry_after_beyond_the_deadline_is_not_waited_for():
    with serve(routes=serper(status(429, "", Retry_After="30"))) as stub:
        started = time.monotonic()
        assert search(stub, "q", deadline=5.0).status == "error"
    assert len(stub.requests) == 1 and time.monotonic() - started < 4


def test_retry_after_is_read_as_seconds_or_as_a_date():
    assert retry_after({"Retry-After": "1.5"}) == 1.5
    assert retry_after({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0.0  # it has passed
    assert (
        3000
        < retry_after(
            {
                "Retry-After": time.strftime(
                    "%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 3600)
                )
            }
        )
        <= 3600
    )
    assert [retry_after({"Retry-After": value}) for value in ("soon", "nan", "-1", "")] == [
        None
    ] * 4 and retry_after({}) is None


def test_waits_grow_and_jitter(monkeypatch):
    """What the service asks for is waited for at least, and at most a quarter longer, so that
    clients do not come back all at once.
    """
    waits = []
    monkeypatch.setattr(http.time, "sleep", waits.append)
    for asked in (None, 2.0):
        with pytest.raises(http.CallError):
            with_tries(
                lambda _, asked=asked: (_ for _ in ()).throw(http.TryError("no", asked)),
                tries=3,
                first_wait=1.0,
                seconds=60.0,
            )
    assert (
        0.5 <= waits[0] <= 1.5
        and 1.0 <= waits[1] <= 3.0
        and all(2.0 <= wait <= 2.5 for wait in waits[2:])
        and len(set(waits)) == 4
    )


def test_an_answer_beyond_all_bounds_is_cut(monkeypatch):
    monkeypatch.setattr(web, "MAX_BYTES", 1000)
    with serve(routes=serper(ok(b" " * 100_000))) as stub:
        assert "too large" in search(stub, "q").text


# Visits through Jina


def test_a_visit_reads_the_page_and_summarises_it_for_the_goal():
    with serve(
        routes=pages(
            ok(jina("Bo is 9 feet tall.", "About Bo")), ok(summary(" 9 feet ", "Bo is tall."))
        )
    ) as stub:
        result = visit(stub, "http://8.8.8.8/?a=1#b%20c", goal="how tall")
    assert result.text == format_visit(
        [("http://8.8.8.8/?a=1#b%20c", "how tall", "Bo is tall.", "9 feet")]
    )
    assert (result.status, result.items) == (
        "ok",
        (VisitedPage("http://8.8.8.8/?a=1#b%20c", "Bo is tall."),),
    )
    page, chat = stub.requests
    # a GET would mangle the address
    assert (
        page["body"] == {"url": "http://8.8.8.8/?a=1#b%20c"}
        and page["headers"]["Accept"] == "application/json"
    )
    assert (
        page["headers"]["Authorization"] == f"Bearer {KEYS.jina}"
        and 1 <= int(page["headers"]["X-Timeout"]) < 60
    )
    prompt = chat["body"]["messages"][0]["content"]
    assert (
        "how tall" in prompt
        and "About Bo\nBo is 9 feet tall." in prompt
        and chat["headers"]["Authorization"] == f"Bearer {KEYS.summary}"
    )


def test_a_page_without_anything_on_the_goal_is_empty():
    with serve(routes=pages(ok(jina("p")), ok(summary("", "Nothing on it.")))) as stub:
        result = visit(stub, PAGE)
    assert (result.status, result.items, "Nothing on it." in result.text) == (
        "empty",
        (VisitedPage(PAGE, None),),
        True,
    )


GONE = {
    "403": status(403, jina_error(403, "SecurityCompromiseError", "blocked")),
    "404": status(404, jina_error(404, "NotFound", "gone")),
    "422": status(422, jina_error(422, "AssertionFailureError", "No content")),
    "451": status(451, jina_error(451, "Legal", "no")),
    "warning 404": ok(jina("Not here", warning="Target URL returned error 404: Not Found")),
    "warning in the text": ok(jina("Warning: Target URL returned error 403: Forbidden\n\nx")),
    "captcha": ok(jina("x", warning="This page maybe requiring CAPTCHA, please make sure")),
    "no text": ok(jina(" \n")),
}


@pytest.mark.parametrize("fault", GONE)
def test_a_page_that_cannot_be_had_is_told_to_the_agent_and_never_summarised(fault):
    """A 200 of Jina may carry an error page: summarised, it would read as if the page said so."""
    with serve(routes=pages(GONE[fault])) as stub:
        result = visit(stub, PAGE)
    assert (
        (result.status, result.items) == ("empty", ())
        and "This page could not be read: " in result.text
        and len(stub.requests) == 1
    )


def test_a_harmless_warning_is_none():
    with serve(
        routes=pages(ok(jina("text", warning="This is a cached snapshot of the original page")))
    ) as stub:
        assert visit(stub, PAGE).status == "ok"


@pytest.mark.parametrize(
    ("code", "name"), [(401, "AuthenticationFailedError"), (402, "InsufficientBalanceError")]
)
def test_a_reader_that_refuses_ends_the_run(code, name):
    routes = pages(status(code, jina_error(code, name, f"no {KEYS.jina}")))
    with (
        serve(routes=routes) as stub,
        pytest.raises(RefusedError, match=f"jina refuses: HTTP {code} {name}") as caught,
    ):
        visit(stub, PAGE)
    assert len(stub.requests) == 1 and KEYS.jina not in str(caught.value)


@pytest.mark.parametrize("code", [429, 500, 503, 524])
def test_a_reader_that_is_busy_is_tried_again(code):
    with serve(
        routes=pages(lambda *a: (code, "", {}) if len(stub.requests) < 3 else ok(jina("p"))(*a))
    ) as stub:
        assert visit(stub, PAGE).status == "ok"
    with serve(routes=pages(status(code))) as stub:
        result = visit(stub, PAGE)
    assert (
        len(stub.requests) == 3
        and result.status == "error"
        and f"jina: HTTP {code} (3 tries)" in result.text
    )


def test_a_refusal_of_something_that_is_not_jina_says_nothing_about_the_page():
    with serve(routes=pages(status(404, "<html>nginx"))) as stub:
        result = visit(stub, PAGE)
    assert result.status == "error" and "jina: HTTP 404" in result.text


def test_several_pages_are_read_at_once_and_one_that_fails_leaves_the_others():
    urls = [f"http://8.8.8.8/{n}" for n in range(3)]
    gone = 404, jina_error(404, "NotFound", "gone"), {}
    with serve(
        routes=pages(
            lambda body, number: gone if body["url"] == urls[1] else (200, jina(body["url"]), {})
        )
    ) as stub:
        result = visit(stub, *urls)
    assert result.status == "ok" and [item.url for item in result.items] == [urls[0], urls[2]]
    texts = result.text.split("\n=======\n")
    assert [
        text.split()[4] for text in texts
    ] == urls and "could not be read: HTTP 404 NotFound: gone" in texts[1]


# Summaries


def test_a_summary_in_fences_or_after_thoughts_is_read():
    inside = json.dumps({"rational": "r", "evidence": "e", "summary": "s"})
    for text in (
        f"```json\n{inside}\n```",
        f"<think>{{not this}}</think>\n{inside}",
        f"Here: {inside} Done.",
    ):
        assert web.read_summary(text) == ("e", "s")
    for text in (
        "",
        "no",
        "[]",
        "{}",
        '{"evidence": "e"}',
        '{"evidence": 1, "summary": "s"}',
        '{"evidence": "e", "summary": "s"',
    ):
        assert web.read_summary(text) is None


@pytest.mark.parametrize(
    "error",
    [
        {
            "error": {
                "message": "This model's maximum context length is 8192 tokens",
                "type": "BadRequestError",
                "code": 400,
            }
        },
        {
            "object": "error",
            "message": "Please reduce the length of the messages",
            "type": "BadRequestError",
            "code": 400,
        },
    ],
    ids=["OpenAI", "old vLLM"],
)
def test_a_page_too_long_for_the_model_is_cut_until_it_fits(error):
    def small_model(body, number):
        return (
            (400, error, {})
            if body["messages"][0]["content"].count("é") > 5000
            else (200, summary("e", "s"), {})
        )

    with serve(routes=pages(ok(jina("é" * 10_000)), small_model)) as stub:
        assert visit(stub, PAGE).status == "ok"
    assert [
        round(body["messages"][0]["content"].count("é"), -1)
        for body in stub.asked("/v1/chat/completions")
    ] == [10_000, 7_000, 4_900]


def test_a_model_for_which_every_page_is_too_long_fails_the_call():
    with serve(
        routes=pages(
            ok(jina("x" * 10_000)), status(400, {"error": {"message": "maximum context length"}})
        )
    ) as stub:
        assert visit(stub, PAGE).status == "error"


def test_a_page_that_the_summariser_will_not_read_fails_the_call_and_not_the_run():
    """A moderated endpoint answers 400 to one page in a thousand."""
    with serve(
        routes=pages(
            ok(jina("p")), status(400, {"error": {"message": "content management policy"}})
        )
    ) as stub:
        result = visit(stub, PAGE)
    assert (
        result.status == "error"
        and "content management policy" in result.text
        and stub.url not in result.text
    )


@pytest.mark.parametrize(
    ("chat", "said", "asked"),
    [
        (ok(completion("I cannot")), "not the JSON object asked for", 2),
        (ok(completion(None)), "not the JSON object asked for", 2),
        (ok(completion('{"evidence": "e', "length")), "it was cut off", 1),
        (status(503), "HTTP 503 (3 tries)", 3),
    ],
    ids=["prose", "null", "length", "503"],
)
def test_a_summary_that_fails_is_no_failure_of_the_page(chat, said, asked):
    with serve(routes=pages(ok(jina("p")), chat)) as stub:
        result = visit(stub, PAGE)
    assert (result.status, result.items) == (
        "error",
        (),
    ) and f"could not be read: summary: {said}" in result.text.replace("m: ", "")
    assert len(stub.asked("/v1/chat/completions")) == asked


def test_a_summariser_that_refuses_ends_the_run():
    routes = pages(
        ok(jina("p")), status(401, {"error": {"message": f"Incorrect API key {KEYS.summary}"}})
    )
    with (
        serve(routes=routes) as stub,
        pytest.raises(RefusedError, match="refuses: HTTP 401 Incorrect API key") as caught,
    ):
        visit(stub, PAGE)
    assert KEYS.summary not in str(caught.value)


def test_a_strict_endpoint_takes_our_requests():
    chat = strict(ok(summary("e", "s")), "model", "messages", "temperature", "max_tokens")
    routes = pages(strict(ok(jina("p")), "url"), chat) | serper(
        strict(ok(organic(HIT)), "q", "gl", "hl", "location")
    )
    with serve(routes=routes) as stub:
        assert (search(stub, "q").status, visit(stub, PAGE).status) == ("ok", "ok")


# A plain fetch


HTML = """<!DOCTYPE html><html><head><title>About Bo</title><style>p {}</style>\
<script>var x = "<p>no</p>";</script></head>
<body><![if !IE]><svg><text>no</text></svg><h1>Bo</h1><p>is <b>nine</b>&nbsp;feet&amp;more   tall\
</p><ul><li>one<li>two</ul><noscript>no</noscript>end &"""


def fetched(stub, path="/page", **changes):
    return visit(
        stub,
        stub.url.removesuffix("/v1") + path,
        **{"reader": "fetch", "allow_private": True, **changes},
    )


def page_of(stub):
    """What the summariser was shown of the page."""
    return (
        stub.asked("/v1/chat/completions")[-1]["messages"][0]["content"]
        .partition("Page:\n")[2]
        .partition("\n\nReply")[0]
    )


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (
            HTML,
            "text/html; charset=utf-8",
            "About Bo\n&lt;![if !IE]>\nBo\nis nine feet&more tall\none\ntwo\nend &".replace(
                "&lt;", "<"
            ),
        ),
        ("a  b\n\n\nc", "text/plain", "a b\nc"),
        ("Größe".encode("latin-1"), "text/html; charset=ISO-8859-1", "Größe"),
        ('<meta charset="gbk">东京'.encode("gbk"), "text/html", "东京"),
        ("日本".encode(), "text/plain; charset=idna", "日本"),
        ('{"a": 1}', "application/json", '{"a": 1}'),
    ],
    ids=["html", "plain", "charset", "meta", "no charset", "json"],
)
def test_a_fetched_page_is_what_a_reader_sees(body, kind, text):
    with serve(routes={"GET /page": status(200, body, Content_Type=kind)} | pages(None)) as stub:
        assert fetched(stub).status == "ok"
    # no key goes to a page
    assert page_of(stub) == text and "secret" not in str(stub.requests[0]["headers"])


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (status(404, "no"), "HTTP 404"),
        (status(401, "no"), "HTTP 401"),
        (status(200, b"%PDF", Content_Type="application/pdf"), "no text but application/pdf"),
        (status(200, "<script>x</script>", Content_Type="text/html"), "the page is empty"),
        (status(302, "", Location="/page"), "more than 5 redirects"),
    ],
    ids=["404", "401", "pdf", "blank", "circle"],
)
def test_a_page_that_cannot_be_fetched_is_told(reply, said):
    with serve(routes={"GET /page": reply} | pages(None)) as stub:
        result = fetched(stub)
    assert (
        result.status == "empty"
        and f"could not be read: {said}" in result.text
        and stub.asked("/v1/chat/completions") == []
    )


def test_a_redirect_is_followed():
    with serve(
        routes={
            "GET /page": status(301, "", Location="/é".encode().decode("latin-1")),
            "GET /%C3%A9": status(200, "there"),
        }
        | pages(None)
    ) as stub:
        assert fetched(stub).status == "ok"
    assert page_of(stub) == "there"


def test_a_page_beyond_all_bounds_is_cut(monkeypatch):
    monkeypatch.setattr("venus.tools.pages.MAX_BYTES", 1000)
    with serve(routes={"GET /page": status(200, "x" * 100_000)} | pages(None)) as stub:
        result = fetched(stub)
    assert result.status == "error" and "too large" in result.text


# Addresses a model may not make us ask


INNER = [
    "http://127.0.0.1/",
    "http://localhost/",
    "http://2130706433/",
    "http://127.1/",
    "http://0x7f.0.0.1/",
    "http://[::1]/",
    "http://0.0.0.0/",
]
INNER += [
    "http://10.1.2.3/",
    "http://192.168.0.1:8080/x",
    "http://172.16.0.1/",
    "http://169.254.169.254/latest/meta-data",
    "http://100.64.0.1/",
]
INNER += [
    "http://[fe80::1]/",
    "http://[fd00::1]/",
    "http://[::ffff:10.0.0.1]/",
    "http://[64:ff9b::7f00:1]/",
    "http://[2002:7f00:1::]/",
]
INNER += [
    "http://224.0.0.1/",
    "http://240.0.0.1/",
    "http://user@127.0.0.1/",
    "file:///etc/passwd",
    "ftp://8.8.8.8/",
    "gopher://x/",
    "//8.8.8.8/",
    "x",
    "http://",
]


@pytest.mark.parametrize("url", INNER)
def test_no_request_goes_to_an_address_inside(url, monkeypatch):
    """A page says: open http://169.254.169.254/. Neither fetched by us nor handed to a reader,
    which may be our own.
    """
    sent = []
    monkeypatch.setattr(requests.Session, "request", lambda *a, **k: sent.append(a))
    with pytest.raises(AddressError):
        check_public(url)
    for reader in ("jina", "fetch"):
        with serve() as stub:
            result = visit(stub, url, reader=reader)
        assert (result.status, sent) == ("empty", []) and "could not be read" in result.text


@pytest.mark.parametrize(
    "url", ["http://8.8.8.8/", "https://[2001:4860:4860::8888]/x", "http://no-such-host.invalid/"]
)
def test_an_address_outside_passes_and_so_does_a_name_that_leads_nowhere(url):
    check_public(url)


def test_a_redirect_to_an_address_inside_is_not_followed(monkeypatch):
    """The first hop is public, the second is not. For the test, 127.0.0.1 counts as public."""
    real = http._check_address
    monkeypatch.setattr(
        http,
        "_check_address",
        lambda address: None if address == "127.0.0.1" else real(address),
    )
    with serve(routes={"GET /page": status(302, "", Location="http://127.0.0.2:1/secret")}) as stub:
        result = fetched(stub, allow_private=False)
    assert (
        result.status == "empty"
        and "127.0.0.2 is not an address of the public internet" in result.text
        and len(stub.requests) == 1
    )


def test_a_name_that_turns_inside_after_it_was_checked_is_found_out_at_the_connection(monkeypatch):
    """DNS rebinding: the answer to the check is public, the answer to the connection is
    127.0.0.1. No byte is sent.
    """
    real, answers = socket.getaddrinfo, iter(["8.8.8.8", "8.8.8.8"])
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: real(next(answers, "127.0.0.1"), *a, **k)
    )
    with serve() as stub:
        result = visit(
            stub, f"http://rebind.example:{stub.url.split(':')[2].split('/')[0]}/", reader="fetch"
        )
    assert (
        result.status == "empty"
        and "127.0.0.1 is not an address of the public internet" in result.text
        and stub.requests == []
    )


def test_a_proxy_may_be_private_and_is_the_only_one_we_connect_to():
    """The proxy resolves the names, so it sees the whole address; what it fetches was
    checked by name before.
    """
    with serve(ok("proxied")) as proxy, serve(routes=pages(None)) as stub:
        tools = tools_at(stub, reader="fetch")
        tools["visit"].read.proxy = proxy.url.removesuffix("/v1")
        result = tools["visit"](
            {"url": ["http://8.8.8.8/x"], "goal": "g"}, corpus=None, deadline=20.0
        )
    assert result.status == "ok" and [request["path"] for request in proxy.requests] == [
        "http://8.8.8.8/x"
    ]


# What the run spends


def test_the_budget_counts_queries_pages_and_summaries_and_ends_the_run():
    with serve(routes=serper(ok(organic(HIT))) | pages(ok(jina("p")))) as stub:
        tools = tools_at(stub, web_budget=4)
        tools["search"]({"query": ["a", "b"]}, corpus=None, deadline=20.0)
        tools["visit"]({"url": [PAGE], "goal": "g"}, corpus=None, deadline=20.0)
        with pytest.raises(
            ToolServiceError, match="budget of 4 web calls is used up.*raise --web-budget"
        ):
            tools["search"]({"query": ["c"]}, corpus=None, deadline=20.0)
    assert len(stub.requests) == 4


def test_a_service_that_only_fails_ends_the_run(monkeypatch):
    """An outage over night would make every answer after it wrong. One success
    starts the count anew.
    """
    monkeypatch.setattr("venus.tools.options.PATIENCE", 3)
    codes = iter([500] * 6 + [200] + [500] * 9)
    with serve(routes=serper(lambda *_: (next(codes), organic(HIT), {}))) as stub:
        tool = tools_at(stub)["search"]
        statuses = [tool({"query": [f"{n}"]}, corpus=None, deadline=20.0).status for n in range(5)]
        assert statuses == ["error", "error", "ok", "error", "error"]
        with pytest.raises(
            ToolServiceError, match="serper failed 3 times in a row, last: HTTP 500"
        ):
            tool({"query": ["x"]}, corpus=None, deadline=20.0)
    with serve(routes={"GET /page": status(503)}) as stub:
        tool = tools_at(stub, reader="fetch", allow_private=True)["visit"]
        url = stub.url.removesuffix("/v1") + "/page"
        statuses = [
            tool({"url": [url], "goal": "g"}, corpus=None, deadline=20.0).status for _ in range(4)
        ]
    assert statuses == ["error"] * 4  # four dead sites are no outage


def test_no_more_calls_are_under_way_than_allowed():
    def slow(body, number):
        time.sleep(0.05)
        return 200, organic(HIT), {}

    with serve(routes=serper(slow)) as stub:
        assert len(search(stub, *map(str, range(9)), search_concurrency=2).items) == 9
    assert stub.most == 2


def test_a_call_that_finds_no_slot_in_time_says_so():
    with serve(routes=serper(ok(organic(HIT)))) as stub:
        tool = tools_at(stub, search_concurrency=1)["search"]
        tool.service.slots.acquire()
        result = tool({"query": ["q"]}, corpus=None, deadline=0.1)
    assert result.status == "timeout" and "all its slots were busy" in result.text


def test_a_tenth_of_failing_calls_costs_tries_and_no_results():
    """With three tries a call fails with probability 0.001; with this seed none of sixty does."""
    dice = flaky(ok(organic(HIT)), share=0.1, seed=1)
    with serve(routes=serper(dice)) as stub:
        tool = tools_at(stub)["search"]
        assert [
            tool({"query": [f"{n}"]}, corpus=None, deadline=20.0).status for n in range(60)
        ] == ["ok"] * 60
    assert dice.failed > 0 and len(stub.requests) == 60 + dice.failed


# Nothing waits for ever, nothing tells a key


def test_no_request_is_sent_without_a_timeout(monkeypatch):
    """Every way out of the house, with the timeout that `requests` is given: None
    would wait for ever.
    """
    sent, send = [], requests.adapters.HTTPAdapter.send
    monkeypatch.setattr(
        requests.adapters.HTTPAdapter,
        "send",
        lambda self, *a, **k: (sent.append(k["timeout"]), send(self, *a, **k))[1],
    )
    routes = (
        serper(ok(organic(HIT)))
        | pages(ok(jina("p")))
        | {"GET /page": status(200, "p"), "GET /v1/models": ok(models("m"))}
    )
    with serve(routes=routes) as stub:
        search(stub, "q")
        visit(stub, PAGE)
        fetched(stub)
        assert ChatClient(stub.url, "m").models() == ["m"]
    assert len(sent) == len(stub.requests) == 6 and all(0 < timeout <= 120 for timeout in sent)


def test_keys_are_read_once_and_shown_nowhere():
    keys = Keys.read(
        {"SERPER_API_KEY": " s \n", "JINA_API_KEY": "", "OPENAI_API_KEY": "o", "JUDGE_API_KEY": "j"}
    )
    assert (
        keys == Keys(serper="s", jina=None, summary="o", judge="j", policy="o")
        and repr(keys) == "Keys()"
    )
    with serve(routes=serper(ok(organic(HIT)))) as stub:
        tools = tools_at(stub)
        assert "secret" not in repr(tools) + repr(tools["visit"].client)
        with pytest.raises(RefusedError, match="holds a character that no key has") as caught:
            search(stub, "q", keys=Keys(serper="kéy", jina="x"))
    assert "kéy" not in str(caught.value) and stub.requests == []


def test_a_password_in_netrc_does_not_take_the_place_of_the_key(tmp_path, monkeypatch):
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password mine\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    with serve(ok(completion("Ho"))) as stub:
        ChatClient(stub.url, "m", "sk").complete([])
    assert stub.requests[0]["headers"]["Authorization"] == "Bearer sk"


# Options


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tools": "live"}, "needs --summary"),
        ({"tools": "live", "summary": "gpt"}, "--summary 'gpt': give openai:BASE_URL:MODEL"),
        ({"web_budget": 0}, "web_budget 0"),
        ({"search_concurrency": 0}, "search_concurrency 0"),
        ({"web_seconds": 0.0}, "web_seconds"),
        ({"cassette": "record"}, "go together"),
        ({"cassette_file": "x"}, "go together"),
        ({"proxy": "http://me:mine@proxy:1"}, "HTTPS_PROXY"),
        ({"search_base": "google.serper.dev"}, "search_base: must be http"),
    ],
)
def test_options_out_of_range_are_named(changes, said):
    with pytest.raises(ValueError, match=said) as caught:
        ToolOptions(**changes).validate()
    assert "mine" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (Keys(jina="j"), "SERPER_API_KEY"),
        (Keys(serper="s"), "JINA_API_KEY in the environment; --reader fetch"),
    ],
)
def test_a_missing_key_is_named_before_the_run(keys, said):
    with serve() as stub, pytest.raises(ValueError, match=said):
        tools_at(stub, keys=keys)


def test_the_manifest_holds_what_decides_the_answers_and_the_plan_what_they_cost():
    live = ToolOptions(
        tools="live",
        summary="openai:http://h:1/v1:qwen",
        search_concurrency=3,
        web_seconds=9.0,
        proxy="http://p:1",
        web_budget=7,
    )
    assert (
        ToolOptions().tools_manifest() == {"tools": "offline"}
        and ToolOptions().web_plan(10, 200) == []
    )
    assert live.tools_manifest() == {
        "tools": "live",
        "reader": "jina",
        "summary": "qwen",
        "blocked": [],
    }
    assert dict(live.web_plan(10, 200)) == {
        "searches, about": "230 to 590",
        "pages opened, about": "80 to 100",
        "summary tokens, at most": "4,159,600",
    }
    assert dict(live.web_plan(10, 5))["searches, about"] == "40 to 40"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RefusedError("serper refuses: HTTP 403"), 1),
        (ToolServiceError("the budget is used up"), 1),
        (AddressError("'http://' is no web address"), 2),
    ],
)
def test_a_failing_service_and_a_bad_flag_have_different_exit_codes(error, code):
    """A refused key ended with 2, bad input, though the command was right; an address comes from
    a flag.
    """
    assert exit_code(error) == code
