"""A recorded run is replayed without its tools; a call that was not recorded is an error,
never an empty result.
"""

import dataclasses
import json
import threading

import pytest
from agent_fakes import answer, fake_tools, scripted_agent, search, tiny_tokenizer, visit

from venus.protocol import SearchHit
from venus.rollout.agent import Job
from venus.tools.base import ToolResult, VisitedPage
from venus.tools.cassette import Cassette, CassetteTool
from venus.tools.options import Keys, ToolOptions
from venus.trajectory import Question

HITS = ToolResult(
    "[]", "ok", (SearchHit("Bo", "http://b.o", "tall", "2024"), SearchHit("Al", "http://a.l", ""))
)
PAGES = ToolResult("seen", "empty", (VisitedPage("http://b.o", None),))


def taped(path, name="search", tool=None):
    return CassetteTool(name, tool, Cassette(str(path), record=tool is not None))


def call(tool, arguments=None, corpus=None):
    return tool(arguments or {"query": ["q"]}, corpus=corpus, deadline=1.0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tapes" / "t.jsonl"


def recorded(path, *results, name="search", arguments=None):
    """Record one call that the tool answers with each of the results in turn; return the tool."""
    tool = fake_tools()[name]
    tool.results = {
        (arguments or {"query": ["q"]})["query" if name == "search" else "url"][0]: list(results)
    }
    taped_tool = taped(path, name, tool)
    for _ in results:
        call(taped_tool, arguments)
    return tool


def test_a_replay_answers_as_the_tool_did_items_and_all(path):
    recorded(path, HITS)
    recorded(path, PAGES, name="visit", arguments={"url": ["http://b.o"], "goal": "g"})
    assert call(taped(path)) == HITS
    # order of fields and outer space aside
    assert call(taped(path, "visit"), {"goal": " g", "url": ["http://b.o "]}) == PAGES


def test_a_call_that_was_not_recorded_is_an_error_that_names_it(path):
    recorded(path, HITS)
    with pytest.raises(
        ValueError,
        match=r't.jsonl: no recorded answer to search {"query": \["東京", '
        r'"q"\]}; record the run anew',
    ):
        call(taped(path), {"query": ["東京", "q"]})


@pytest.mark.parametrize(
    "other", [{"query": ["q", "r"]}, {"query": ["Q"]}, {"query": ["r", "q"]}], ids=str
)
def test_other_arguments_are_another_call(path, other):
    recorded(path, HITS)
    with pytest.raises(ValueError, match="no recorded answer"):
        call(taped(path), other)


def test_a_call_is_recorded_once_and_then_answered_from_the_cassette(path):
    """A run that is resumed, or whose rollouts search for the same, pays once; and
    the replay is the run.
    """
    tool = fake_tools(search={"q": [HITS, ToolResult("other", "ok")]})["search"]
    first = taped(path, tool=tool)
    assert (
        call(first) == call(first) == call(taped(path, tool=tool)) == HITS and len(tool.calls) == 1
    )
    assert len(path.read_text().splitlines()) == 1


def test_a_failed_call_is_made_again_and_its_success_counts(path):
    """A time-out that answered for ever would turn a moment's trouble into a page
    that does not exist.
    """
    late = ToolResult("Tool execution timed out", "timeout")
    assert len(recorded(path, late, late, HITS, HITS).calls) == 3
    assert call(taped(path)) == HITS


def test_a_call_that_only_failed_is_replayed_as_a_failure(path):
    recorded(path, ToolResult("no", "error"))
    assert call(taped(path)).status == "error"


def test_of_two_equal_calls_at_once_the_first_answer_counts_for_both(path):
    """Eight rollouts of one question ask the same: two answers to one call could
    not be replayed.
    """
    barrier, numbers = threading.Barrier(2, timeout=10), iter("ab")
    tool = taped(
        path,
        tool=fake_tools(
            search={"q": lambda _: (barrier.wait(), ToolResult(next(numbers), "ok"))[1]}
        )["search"],
    )
    results = []
    threads = [threading.Thread(target=lambda: results.append(call(tool))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1] == call(taped(path)) and len(path.read_text().splitlines()) == 1


def test_the_corpus_is_known_by_its_content_wherever_it_lies(path, tmp_path):
    (tmp_path / "a.jsonl").write_text("one")
    (tmp_path / "b.jsonl").write_text("one")
    (tmp_path / "c.jsonl").write_text("two")
    call(
        taped(path, tool=fake_tools(search={"q": HITS})["search"]), corpus=str(tmp_path / "a.jsonl")
    )
    assert call(taped(path), corpus=str(tmp_path / "b.jsonl")) == HITS
    for other in (str(tmp_path / "c.jsonl"), None):
        with pytest.raises(ValueError, match="no recorded answer"):
            call(taped(path), corpus=other)


def test_a_torn_last_row_is_left_out_and_cut_off_by_the_next_recording(path):
    recorded(path, HITS)
    whole = path.read_text()
    path.write_text(whole + whole[:20])
    assert call(taped(path)) == HITS
    recorded(path, PAGES, name="visit", arguments={"url": ["u"], "goal": "g"})
    assert [json.loads(line)["tool"] for line in path.read_text().splitlines()] == [
        "search",
        "visit",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty cassette"),
        ('{"a": 1}\n{"a": 1}\n', ":1: not a row of a cassette"),
        (None, "no such file"),
    ],
)
def test_a_file_that_is_no_cassette_is_named(tmp_path, text, said):
    if text is not None:
        (tmp_path / "t").write_text(text)
    with pytest.raises(ValueError, match=said):
        Cassette(str(tmp_path / "t"), record=False)


def test_a_recorded_rollout_is_replayed_token_for_token_without_its_tools(tmp_path, path):
    tiny, corpus = tiny_tokenizer(tmp_path), tmp_path / "corpus.jsonl"
    corpus.write_text('{"url": "http://b.o", "title": "Bo", "text": "Bo is tall."}\n')
    job = Job(Question("q", "Who?", ("x",), str(corpus)), 0)

    def roll_out(mode):
        options = ToolOptions(cassette=mode, cassette_file=str(path))
        options.validate()
        tools = options.make_tools(Keys())
        agent = scripted_agent(
            tiny,
            {("q", 0): [search("tall"), visit("http://b.o", goal="Bo"), answer()]},
            tools=tools,
            manifest=options.tools_manifest(),
        )
        return next(agent.run([job]))

    first, second = roll_out("record"), roll_out("replay")
    assert second.token_ids == first.token_ids and [turn.tool_status for turn in first.turns] == [
        "ok",
        "ok",
        None,
    ]
    assert first.manifest == {"tools": "offline"} and second.manifest.keys() == {
        "tools",
        "cassette",
    }
    assert dataclasses.replace(second, manifest=first.manifest, seconds=first.seconds) == first


def test_a_live_cassette_is_replayed_without_keys_and_without_a_summariser(path):
    recorded(path, HITS)
    options = ToolOptions(tools="live", cassette="replay", cassette_file=str(path))
    options.validate()
    assert call(options.make_tools(Keys())["search"]) == HITS and options.web_plan(5, 10) == []
