"""The chat client against a stub: what it sends, what it retries, what it gives up on, and that no call lasts for ever."""

import time

import pytest
from stub_server import completion, serve

from venus.chat_api import ChatClient, ChatError, ChatRefusedError

MESSAGES = [{"role": "user", "content": "Hi"}]
KEY = "sk-very-secret"


def client(stub, **settings):
    return ChatClient(stub.url, "m", **{"timeout": 5.0, "first_wait": 0.001, **settings})


def test_a_call_sends_model_messages_and_parameters_with_the_key_in_the_header():
    with serve(lambda body, number: (200, completion("Ho", "length"), {})) as stub:
        answer = client(stub, api_key=KEY).complete(MESSAGES, temperature=0.0, max_tokens=5)
    (request,) = stub.requests
    assert (answer.text, answer.finish_reason) == ("Ho", "length")
    assert request["body"] == {"model": "m", "messages": MESSAGES, "temperature": 0.0, "max_tokens": 5}
    assert request["path"] == "/v1/chat/completions" and request["headers"]["Authorization"] == f"Bearer {KEY}"


def test_without_a_key_there_is_no_authorization_and_a_full_endpoint_is_taken_as_it_is():
    with serve(lambda body, number: (200, completion(None), {})) as stub:
        answer = ChatClient(stub.url + "/chat/completions", "m").complete(MESSAGES)
    assert answer.text == "" and "Authorization" not in stub.requests[0]["headers"]
    assert stub.requests[0]["path"] == "/v1/chat/completions"


PASSING = {
    "429": (429, {"error": {"message": "slow down"}}, {}),
    "500": (500, "oops", {}),
    "503": (503, "", {}),
    "html": (200, "<html>", {}),
    "no choices": (200, {"choices": []}, {}),
    "not utf-8": (200, b"\xff\xfe", {}),
    "cut off": (200, '{"choices": [', {"Content-Length": "999", "Connection": "close"}),
}


@pytest.mark.parametrize("fault", PASSING)
def test_a_passing_fault_is_tried_again(fault):
    with serve(lambda body, number: PASSING[fault] if number < 2 else (200, completion("Ho"), {})) as stub:
        assert client(stub, timeout=1.0).complete(MESSAGES).text == "Ho"
    assert len(stub.requests) == 3


def test_a_fault_that_stays_ends_after_the_tries_and_says_what_it_was():
    with serve(lambda body, number: (503, "overloaded", {})) as stub, pytest.raises(ChatError, match="HTTP 503 overloaded .4 tries") as caught:
        client(stub).complete(MESSAGES)
    assert len(stub.requests) == 4 and not isinstance(caught.value, ChatRefusedError)


def test_a_server_that_is_not_there_is_an_error_after_the_tries():
    with pytest.raises(ChatError, match="ConnectionError"):
        ChatClient("http://127.0.0.1:9/v1", "m", first_wait=0.001).complete(MESSAGES)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (401, {"error": {"message": f"Incorrect API key provided: {KEY}"}}),
        (403, "forbidden"),
        (404, {"object": "error", "message": "no such model"}),
        (400, {"error": {"message": "maximum context length"}}),
        (429, {"error": {"code": "insufficient_quota"}}),
        (302, ""),
    ],
)
def test_a_refusal_is_not_tried_again_and_never_shows_the_key(status, body):
    with serve(lambda *_: (status, body, {"Location": "http://127.0.0.1:1/"})) as stub, pytest.raises(ChatRefusedError, match=f"HTTP {status}") as caught:
        client(stub, api_key=KEY).complete(MESSAGES)
    assert len(stub.requests) == 1 and KEY not in str(caught.value) and "\n" not in str(caught.value)


def test_retry_after_is_obeyed():
    with serve(lambda body, number: (429, "", {"Retry-After": "0.3"}) if number == 0 else (200, completion("Ho"), {})) as stub:
        started = time.monotonic()
        client(stub, first_wait=60.0).complete(MESSAGES)
    assert 0.3 <= time.monotonic() - started < 5


def test_a_body_that_trickles_ends_at_the_deadline():
    """The timeout of `requests` is between bytes: a byte a second keeps such a call open for ever."""
    with serve(lambda body, number: 5.0) as stub:
        started = time.monotonic()
        with pytest.raises(ChatError, match="takes too long .1 tries"):
            client(stub, timeout=0.3, tries=1).complete(MESSAGES)
        assert time.monotonic() - started < 2


def test_a_body_beyond_all_bounds_is_cut(monkeypatch):
    monkeypatch.setattr("venus.chat_api.MAX_BYTES", 1000)
    with serve(lambda body, number: (200, b" " * 5000, {})) as stub, pytest.raises(ChatError, match="too large"):
        client(stub, tries=1).complete(MESSAGES)


def test_the_client_does_not_show_its_key():
    assert KEY not in repr(ChatClient("http://h/v1", "m", KEY))
