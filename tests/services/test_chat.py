"""The chat client against a stub: what it sends, what it retries, what it gives up on, and that no
call lasts for ever.
"""

import time

import pytest
from stub_server import completion, hang, models, serve

from venus.services.chat import (
    ChatClient,
    ChatError,
    ChatRefusedError,
    ChatRequestError,
    parse_endpoint,
)

MESSAGES = [{"role": "user", "content": "Hi"}]
KEY = "sk-very-secret"


def client(stub, **settings):
    return ChatClient(stub.url, "m", **{"timeout": 5.0, "first_wait": 0.001, **settings})


def test_a_call_sends_model_messages_and_parameters_with_the_key_in_the_header():
    with serve(lambda body, number: (200, completion("Ho", "length"), {})) as stub:
        answer = client(stub, api_key=KEY).complete(MESSAGES, temperature=0.0, max_tokens=5)
    (request,) = stub.requests
    assert (answer.text, answer.finish_reason) == ("Ho", "length")
    assert request["body"] == {
        "model": "m",
        "messages": MESSAGES,
        "temperature": 0.0,
        "max_tokens": 5,
    }
    assert (
        request["path"] == "/v1/chat/completions"
        and request["headers"]["Authorization"] == f"Bearer {KEY}"
    )


def test_without_a_key_there_is_no_authorization_and_a_full_endpoint_is_taken_as_it_is():
    with serve(lambda body, number: (200, completion(None), {})) as stub:
        answer = ChatClient(stub.url + "/chat/completions", "m").complete(MESSAGES)
    assert answer.text == "" and "Authorization" not in stub.requests[0]["headers"]
    assert stub.requests[0]["path"] == "/v1/chat/completions"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_that_the_server_keeps_apart_are_returned_apart(name):
    """Their text may be null: all that such a server says of a turn that was cut
    off in its thoughts.
    """
    with serve(lambda body, number: (200, completion(None, "length", **{name: "hm"}), {})) as stub:
        answer = client(stub).complete(MESSAGES)
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("", "hm", "length")


def test_parameters_go_through_as_they_are():
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}
    with serve(lambda body, number: (200, completion("{}"), {})) as stub:
        client(stub).complete(MESSAGES, response_format=schema, top_k=20)
    assert stub.requests[0]["body"] == {
        "model": "m",
        "messages": MESSAGES,
        "response_format": schema,
        "top_k": 20,
    }


def test_the_models_of_an_endpoint_are_listed_as_a_probe():
    with serve(routes={"GET /v1/models": lambda *_: (200, models("a", "b"), {})}) as stub:
        assert client(stub, api_key=KEY).models() == ["a", "b"]
        assert ChatClient(stub.url + "/chat/completions", "m").models() == ["a", "b"]
    assert stub.requests[0]["headers"]["Authorization"] == f"Bearer {KEY}"


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
    with serve(
        lambda body, number: PASSING[fault] if number < 2 else (200, completion("Ho"), {})
    ) as stub:
        assert client(stub, timeout=1.0).complete(MESSAGES).text == "Ho"
    assert len(stub.requests) == 3


def test_a_fault_that_stays_ends_after_the_tries_and_says_what_it_was():
    with (
        serve(lambda body, number: (503, "overloaded", {})) as stub,
        pytest.raises(ChatError, match="HTTP 503 overloaded .4 tries") as caught,
    ):
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
    with (
        serve(lambda *_: (status, body, {"Location": "http://127.0.0.1:1/"})) as stub,
        pytest.raises(ChatRefusedError, match=f"HTTP {status}") as caught,
    ):
        client(stub, api_key=KEY).complete(MESSAGES)
    assert (
        len(stub.requests) == 1 and KEY not in str(caught.value) and "\n" not in str(caught.value)
    )


OPENAI = {
    "error": {
        "message": "maximum context length is 8192",
        "type": "invalid_request_error",
        "code": "context_length_exceeded",
    }
}
VLLM = {
    "object": "error",
    "message": "The model's context length is only 8192",
    "type": "BadRequestError",
    "param": None,
    "code": 400,
}


@pytest.mark.parametrize(
    ("status", "body", "too_long", "said"),
    [
        (400, OPENAI, True, "maximum context length is 8192"),
        (400, VLLM, True, "context length is only 8192"),
        (413, "too large", False, "too large"),
        (422, {"detail": "bad field"}, False, "bad field"),
        (400, {"error": "top_k"}, False, "top_k"),
    ],
)
def test_a_refusal_of_this_request_is_told_from_a_refusal_of_the_client(
    status, body, too_long, said
):
    """Another request may pass, so a caller may go on; the message is the service's own, in
    whichever shape it comes.
    """
    with (
        serve(lambda *_: (status, body, {})) as stub,
        pytest.raises(ChatRequestError, match=said) as caught,
    ):
        client(stub).complete(MESSAGES)
    assert (
        caught.value.too_long == too_long
        and len(stub.requests) == 1
        and "{" not in str(caught.value)
    )


def test_all_tries_together_end_at_the_deadline_of_the_call():
    with serve(lambda *_: hang) as stub:
        started = time.monotonic()
        with pytest.raises(ChatError, match="takes too long") as caught:
            client(stub, timeout=0.3).complete(MESSAGES, seconds=0.5)
        assert time.monotonic() - started < 2
    assert caught.value.timed_out and len(stub.requests) == 2


def test_an_endpoint_is_written_with_its_address_and_model():
    assert parse_endpoint("openai:http://127.0.0.1:8000/v1:org/qwen3:4b", "--policy") == (
        "http://127.0.0.1:8000/v1",
        "org/qwen3:4b",
    )
    for bad in (
        "gpt",
        "openai:gpt",
        "openai:http://h/v1",
        "openai:ftp://h:m",
        "openai:http://me:mine@h/v1:m",
        "openai:http://h/v1:",
    ):
        with pytest.raises(ValueError, match="--policy .* give openai:BASE_URL:MODEL"):
            parse_endpoint(bad, "--policy")


def test_retry_after_is_obeyed():
    with serve(
        lambda body, number: (
            (429, "", {"Retry-After": "0.3"}) if number == 0 else (200, completion("Ho"), {})
        )
    ) as stub:
        started = time.monotonic()
        client(stub, first_wait=60.0).complete(MESSAGES)
    assert 0.3 <= time.monotonic() - started < 5


def test_a_body_that_trickles_ends_at_the_deadline():
    """The timeout of `requests` is between bytes: a byte a second keeps such a call
    open for ever.
    """
    with serve(lambda body, number: 5.0) as stub:
        started = time.monotonic()
        with pytest.raises(ChatError, match="takes too long .1 tries"):
            client(stub, timeout=0.3, tries=1).complete(MESSAGES)
        assert time.monotonic() - started < 2


def test_a_body_beyond_all_bounds_is_cut(monkeypatch):
    monkeypatch.setattr("venus.services.chat.MAX_BYTES", 1000)
    with (
        serve(lambda body, number: (200, b" " * 5000, {})) as stub,
        pytest.raises(ChatError, match="too large"),
    ):
        client(stub, tries=1).complete(MESSAGES)


def test_the_client_does_not_show_its_key():
    assert KEY not in repr(ChatClient("http://h/v1", "m", KEY))
