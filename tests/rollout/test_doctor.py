"""The doctor: a line for each part, with the kind of failure and what to do; and a whole live run
of the script against stub services.
"""

import dataclasses
import json

import pytest
from agent_fakes import tiny_model
from chat_samples import tiny_file, tiny_spec
from stub_server import completion, hang, jina, jina_error, models, organic, serve, summary
from tiny_runs import ROLLOUT, read_rows, run_all

from venus.model.weights import save_model
from venus.protocol import assistant_text, format_answer, format_tool_call
from venus.rollout import doctor
from venus.rollout.doctor import diagnose
from venus.services.chat import ChatClient
from venus.tokenizer import ChatTokenizer
from venus.tools.options import Keys, ToolOptions

KEYS = Keys(serper="serper-secret", jina="jina-secret", summary="sk-secret")
HIT = {"title": "Bo", "link": "http://8.8.8.8/bo", "snippet": "tall"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with all that a model needs."""
    directory = tmp_path_factory.mktemp("model")
    vocab_size = ChatTokenizer(tiny_file(directory, tiny_spec())).vocab_size
    save_model(tiny_model(vocab_size), directory)
    return directory


def ok(body):
    return lambda *_: (200, body, {})


def services(**changes):
    """Routes of stub services of which all work but those changed."""
    routes = {
        "search": ok(organic(HIT)),
        "page": ok(jina("p")),
        "chat": ok(completion("OK")),
        "models": ok(models("qwen", "gpt")),
    } | changes
    paths = {
        "search": "POST /search",
        "page": "POST /",
        "chat": "POST /v1/chat/completions",
        "models": "GET /v1/models",
    }
    return {paths[name]: reply for name, reply in routes.items()}


def live(stub, **changes):
    base = stub.url.removesuffix("/v1")
    return dataclasses.replace(
        ToolOptions(
            tools="live", search_base=base, reader_base=base, summary=f"openai:{stub.url}:m"
        ),
        **changes,
    )


def examine(capsys, model, options, keys=KEYS, policy=None, **how):
    """(all is well, {part: its lines})"""
    well = diagnose(str(model), options, keys, policy, **how)
    lines = capsys.readouterr().out.replace("\n" + " " * 17 + " ", " ").splitlines()
    assert not any("secret" in line for line in lines)
    return well, {line.split()[1]: line for line in lines}


def test_every_part_that_works_is_seen_working_by_one_call_each(capsys, model):
    with serve(routes=services()) as stub:
        well, lines = examine(capsys, model, live(stub))
    assert well and list(lines) == ["model", "kernels", "tokenizer", "search", "reader", "summary"]
    assert all(line.startswith("works ") for line in lines.values())
    assert (
        "names and shapes of the weights fit" in lines["model"]
        and "1 hits" in lines["search"]
        and "m answers 'OK'" in lines["summary"]
    )
    assert len(stub.requests) == 3 and all(
        request["path"] != "/v1/models" for request in stub.requests
    )


def test_offline_tools_need_no_service(capsys, model):
    well, lines = examine(capsys, model, ToolOptions(), Keys())
    assert well and list(lines) == ["model", "kernels", "tokenizer"]


FAULTS = {
    "search key": (
        {"search": lambda *_: (403, {"message": "Unauthorized."}, {})},
        "search",
        "refused: serper refuses: HTTP 403 Unauthorized.",
        "SERPER",
    ),
    "jina balance": (
        {"page": lambda *_: (402, jina_error(402, "InsufficientBalanceError", "none"), {})},
        "reader",
        "refused: jina refuses: HTTP 402",
        "JINA",
    ),
    "busy": (
        {"search": lambda *_: (503, "", {})},
        "search",
        "unreachable or failing: HTTP 503",
        "try again",
    ),
    "silent": (
        {"page": lambda *_: hang},
        "reader",
        "timeout: the answer takes too long",
        "--proxy",
    ),
    "page": (
        {"page": lambda *_: (404, jina_error(404, "NotFound", "gone"), {})},
        "reader",
        "not usable: HTTP 404",
        "try again",
    ),
    "model name": (
        {"chat": lambda *_: (404, {"message": "no model m"}, {})},
        "summary",
        "HTTP 404 no model m; it serves qwen, gpt",
        "--summary",
    ),
    "chat key": (
        {"chat": lambda *_: (401, "no", {}), "models": lambda *_: (401, "no", {})},
        "summary",
        "refuses: HTTP 401 no ->",
        "SUMMARY_API_KEY",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_part_that_fails_names_the_kind_and_the_fix_and_hides_no_other(
    fault, capsys, model, monkeypatch
):
    monkeypatch.setattr(doctor, "SECONDS", 0.5)
    changes, part, said, fix = FAULTS[fault]
    with serve(routes=services(**changes)) as stub:
        well, lines = examine(capsys, model, live(stub))
    assert (
        not well
        and len(lines) == 6
        and [name for name, line in lines.items() if line.startswith("FAILS ")] == [part]
    )
    assert said in lines[part] and fix in lines[part].partition(" -> ")[2]


def test_missing_keys_and_a_broken_model_are_named(capsys, model, tmp_path):
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    with serve(routes=services()) as stub:
        well, lines = examine(capsys, tmp_path, live(stub), Keys())
    assert (
        not well
        and "needs SERPER_API_KEY" in lines["search"]
        and "needs JINA_API_KEY" in lines["reader"]
        and lines["summary"].startswith("works ")
    )
    assert (
        "no model.safetensors" in lines["model"]
        and "tokenizer.json" in lines["tokenizer"]
        and "not usable" in lines["tokenizer"]
    )


def test_a_fetch_reader_is_tried_on_a_page_and_a_cassette_is_read(capsys, model, tmp_path):
    with serve(routes=services() | {"GET /page": ok("hello")}) as stub:
        well, lines = examine(
            capsys,
            model,
            live(stub, reader="fetch", allow_private=True),
            page=stub.url.removesuffix("/v1") + "/page",
        )
        assert well and "5 characters of" in lines["reader"]
    well, lines = examine(
        capsys,
        model,
        ToolOptions(tools="live", cassette="replay", cassette_file=str(tmp_path / "none")),
    )
    assert not well and "no such file" in lines["cassette"] and "search" not in lines


def test_a_remote_policy_takes_the_place_of_the_weights(capsys, tmp_path):
    tiny_file(tmp_path, tiny_spec())
    with serve(routes=services()) as stub:
        well, lines = examine(
            capsys, tmp_path, ToolOptions(), policy=ChatClient(stub.url, "m", "sk-secret")
        )
    assert well and list(lines) == ["tokenizer", "policy"] and stub.requests[0]["body"]["seed"] == 0


# The script


def turn_of(body):
    """Search, visit the hit, answer what the page says."""
    messages, call = body["messages"], None
    if len(messages) == 2:
        call = format_tool_call("search", {"query": [messages[1]["content"]]})
    elif len(messages) == 4:
        call = format_tool_call("visit", {"url": [HIT["link"]], "goal": "how tall"})
    return completion(assistant_text("hm", call or format_answer("9 feet")))


@pytest.mark.slow
def test_a_live_run_is_recorded_replayed_and_stopped_by_a_refusal_with_what_is_finished_kept(
    tmp_path, model, monkeypatch
):
    """rollout.py over stub services: two questions live, the same two from the cassette alone, then
    a third whose search is refused.
    """
    for name in ("SERPER", "JINA", "OPENAI"):
        monkeypatch.setenv(f"{name}_API_KEY", f"{name}-secret")
    questions = [
        {"id": f"q{n}", "question": f"How tall is Bo {n}?", "ground_truth": "9 feet"}
        for n in range(3)
    ]
    (tmp_path / "q.jsonl").write_text(
        "".join(json.dumps(question) + "\n" for question in questions)
    )

    def search(body, number):
        return (
            (403, {"message": "Unauthorized."}, {})
            if "2?" in body["q"]
            else (200, organic(HIT), {})
        )

    def chat(body, number):
        return (
            200,
            completion("OK")
            if body["max_tokens"] == 16
            else turn_of(body)
            if body["model"] == "policy"
            else summary("9 feet", "Bo is 9 feet."),
            {},
        )

    with serve(routes=services(search=search, chat=chat)) as stub:
        base = stub.url.removesuffix("/v1")
        services_of = [
            "--search-base",
            base,
            "--reader-base",
            base,
            "--summary",
            f"openai:{stub.url}:m",
        ]
        how = [
            "rollout.py",
            "--model",
            model,
            "--questions",
            tmp_path / "q.jsonl",
            "--tools",
            "live",
            *ROLLOUT,
            "--max-context",
            "4096",
        ]
        how += [
            "--policy",
            f"openai:{stub.url}:policy",
            "--max-turn-tokens",
            "300",
            "--max-observation-tokens",
            "500",
        ]
        tape = ["--cassette-file", tmp_path / "tape.jsonl", "--cassette"]
        two = ["--num-questions", "2", "--output"]
        results = run_all(
            [*how, *services_of, "--doctor"],
            [*how, *services_of, "--dry-run", *two, tmp_path / "none"],
            [*how, *services_of, *tape, "record", *two, tmp_path / "live.jsonl"],
            [*how, *tape, "replay", *two, tmp_path / "again.jsonl"],
            [
                *how,
                *services_of,
                *tape,
                "record",
                "--slots",
                "1",
                "--output",
                tmp_path / "live.jsonl",
            ],
            [*how, *tape, "replay", "--slots", "1", "--output", tmp_path / "again.jsonl"],
        )
    doctored, dry, recorded, replayed, refused, missed = results
    assert [result["code"] for result in results] == [0, 0, 0, 0, 1, 2], results
    assert "works  policy" in doctored["out"] and "works  reader" in doctored["out"]
    assert "searches, about" in dry["out"] and "summary tokens, at most" in dry["out"]
    first, again = read_rows(tmp_path / "live.jsonl"), read_rows(tmp_path / "again.jsonl")
    assert (
        sorted(row["question_id"] for row in first) == ["q0", "q1"]
        and [row["prediction"] for row in first] == ["9 feet"] * 2
    )
    assert [[turn["tool_status"] for turn in row["turns"]] for row in first] == [
        ["ok", "ok", None]
    ] * 2
    assert {row["question_id"]: row["token_ids"] for row in first} == {
        row["question_id"]: row["token_ids"] for row in again
    }
    assert (
        refused["err"].strip().splitlines()[-1] == "error: serper refuses: HTTP 403 Unauthorized."
    )
    assert "no recorded answer to search" in missed["err"]
    assert [
        path for path in tmp_path.rglob("*") if path.is_file() and "-secret" in path.read_text()
    ] == []
    assert not any("-secret" in result["out"] + result["err"] for result in results)
