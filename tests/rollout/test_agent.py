"""The agent loop on prepared turns: what it records, what it tells the model, what ends it. A few
runs with a real model.
"""

import dataclasses
import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from agent_fakes import (
    LIMITS,
    answer,
    fake_tools,
    model_agent,
    play,
    question,
    scripted_agent,
    search,
    tiny_model,
    tiny_tokenizer,
    visit,
)
from chat_samples import HOSTILE, needs_data, qwen
from hypothesis import given, settings
from hypothesis import strategies as st

from venus import protocol
from venus.curation.formats import to_messages
from venus.files import append_jsonl
from venus.protocol import LIMIT_MESSAGES, MALFORMED_MESSAGE, TIMEOUT_MESSAGE, assistant_text
from venus.rollout.agent import CUT_NOTICE, Job, Limits
from venus.rollout.sampler import Generation
from venus.rollout.tool_calls import ToolPool
from venus.tools.base import ToolResult, ToolServiceError
from venus.trajectory import STOP_REASONS, Trajectory, read_trajectories

TESTS = Path(__file__).resolve().parents[1] / "support"
FAILED = ToolResult("it failed", "error")
MALFORMED = assistant_text("hm", "I do not know yet.")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def hostile_play(tiny):
    """A search whose page spells role markers, and an answer."""
    return play(
        tiny, [search("a"), answer()], tools=fake_tools(search={"a": ToolResult(HOSTILE, "ok")})
    )


def shape(trajectory):
    """(action, tool status, duplicate) of every turn."""
    return [(turn.action, turn.tool_status, turn.duplicate) for turn in trajectory.turns]


def messages(tokenizer, trajectory):
    """The texts after the question: turn, observation, turn, .."""
    return [message["content"] for message in to_messages(trajectory, tokenizer)["messages"][2:]]


def observed(*bodies):
    return "\n".join(f"<tool_response>\n{body}\n</tool_response>" for body in bodies)


# The loop


def test_search_visit_answer(tiny):
    """The whole row: every text in its place, spans that meet, log-probs in the order of
    sampling, the fixed fields.
    """
    tools = fake_tools()
    trajectory = play(tiny, [search("a", "b"), visit("u", goal="g"), answer("Paris")], tools=tools)
    assert messages(tiny, trajectory) == [
        *(
            search("a", "b"),
            observed("found a"),
            visit("u", goal="g"),
            observed("found u"),
            answer("Paris"),
        ),
    ]
    assert shape(trajectory) == [
        ("search", "ok", False),
        ("visit", "ok", False),
        ("answer", None, False),
    ]
    assert [turn.arguments for turn in trajectory.turns] == [
        {"query": ["a", "b"]},
        {"url": ["u"], "goal": "g"},
        None,
    ]
    assert (
        trajectory.prediction,
        trajectory.stop_reason,
        trajectory.outcome.status,
        trajectory.outcome.value,
    ) == ("Paris", "answered", "ok", None)
    assert trajectory.log_probs == [-(k + 1) / 64 for k in range(trajectory.num_sampled)]
    assert (trajectory.run, trajectory.id, trajectory.seed, trajectory.manifest) == (
        "r",
        "q/0",
        7,
        {"made": "by hand"},
    )
    assert trajectory.ground_truth == ("x",)


def test_each_turn_holds_exactly_the_sampled_ids(tiny):
    contents = [search("a"), visit("u"), answer()]
    trajectory = play(tiny, contents)
    assert [trajectory.token_ids[turn.start : turn.end] for turn in trajectory.turns] == [
        tiny.turn_ids(content) for content in contents
    ]
    assert [turn.obs_end for turn in trajectory.turns[:-1]] == [
        turn.start for turn in trajectory.turns[1:]
    ]
    assert trajectory.prompt_len == trajectory.turns[0].start == len(tiny.prompt_ids("sys", "Who?"))


def test_well_formed_trajectories_have_the_ids_of_their_messages(tiny):
    """What the agent appended piece by piece is what encode_messages makes of the whole
    conversation, limit message included.
    """
    for turns in (
        [answer()],
        [search("a"), visit("u"), answer("y")],
        [search(f"{n}") for n in range(5)] + [answer("late")],
    ):
        trajectory = play(tiny, turns)
        encoded = tiny.encode_messages(to_messages(trajectory, tiny)["messages"])
        assert encoded.ids == trajectory.token_ids + tiny.encode("\n")
        assert encoded.spans == [(turn.start, turn.end) for turn in trajectory.turns]


def test_a_tool_is_called_with_arguments_corpus_and_deadline(tiny):
    agent = scripted_agent(tiny, {("q", 0): [visit("u", goal="g"), answer()]}, tool_seconds=9.0)
    list(agent.run([Job(question(corpus="/c.jsonl"), 0)]))
    assert agent.tools["visit"].calls == [({"url": ["u"], "goal": "g"}, "/c.jsonl", 9.0)]


def test_each_rollout_plays_its_own_turns_whatever_the_number_of_slots(tiny):
    """Nine rollouts through 1, 2 and 9 slots: the noise key names question, sample and
    turn, never the slot.
    """
    scripts = {
        (f"q{n}", s): [search(f"{n}.{s}"), *[MALFORMED] * s, answer(f"{n}{s}")]
        for n in range(3)
        for s in range(3)
    }
    jobs = [Job(question(f"q{n}"), s) for n in range(3) for s in range(3)]
    wanted = None
    for num_slots in (1, 2, 9):
        agent = scripted_agent(tiny, scripts, num_slots=num_slots)
        got = {t.id: (t.token_ids, t.log_probs, t.prediction) for t in agent.run(jobs)}
        wanted = wanted or got
        assert got == wanted
        assert len(got) == 9
        assert agent.sampler.free == list(range(num_slots))


# Malformed turns and duplicates


@pytest.mark.parametrize(
    "content",
    [
        MALFORMED,
        assistant_text(
            "x", '<tool_call>\n{"name": "python", "arguments": {"query": ["a"]}}\n</tool_call>'
        ),
        assistant_text(
            "x", '<tool_call>\n{"name": "search", "arguments": {"query": []}}\n</tool_call>'
        ),
        assistant_text("x", "<tool_call>\n{'name': 'search'}\n</tool_call>"),
        search("a") + " and then",
        search("a") + "\n" + answer(),
        "<think>\nnever closed",
    ],
)
def test_a_malformed_turn_is_answered_with_the_message_and_the_rollout_goes_on(tiny, content):
    """Not executed, no tool status, no arguments; an unknown tool counts as malformed too."""
    tools = fake_tools()
    trajectory = play(tiny, [content, search("b"), answer()], tools=tools)
    assert shape(trajectory) == [
        ("malformed", None, False),
        ("search", "ok", False),
        ("answer", None, False),
    ]
    assert not trajectory.turns[0].format_ok
    assert trajectory.turns[0].arguments is None
    assert messages(tiny, trajectory)[1] == observed(MALFORMED_MESSAGE)
    assert [call[0] for call in tools["search"].calls] == [{"query": ["b"]}]
    assert trajectory.stop_reason == "answered"


def test_a_repeated_call_gets_the_recorded_observation_without_a_call(tiny):
    """Equal up to order and outer spaces of the strings; a visit with another goal
    is another call.
    """
    tools = fake_tools(search={"a": [ToolResult("first", "ok"), ToolResult("second", "ok")]})
    trajectory = play(
        tiny,
        [search("a", "b"), search(" b", "a"), visit("u", goal="g"), visit("u", goal="h"), answer()],
        tools=tools,
    )
    assert shape(trajectory)[:4] == [
        ("search", "ok", False),
        ("search", "ok", True),
        ("visit", "ok", False),
        ("visit", "ok", False),
    ]
    assert messages(tiny, trajectory)[1:4:2] == [observed("first")] * 2
    assert (len(tools["search"].calls), len(tools["visit"].calls)) == (1, 2)


@pytest.mark.parametrize(
    "failed",
    [FAILED, ToolResult("[]", "empty"), ToolResult("too late", "timeout")],
    ids=lambda result: result.status,
)
def test_a_failed_call_registers_nothing_so_its_retry_is_made(tiny, failed):
    """Trap 33: with the failure registered, the retry that would have succeeded was answered with
    the error, or deleted as a duplicate.
    """
    tools = fake_tools(search={"a": [failed, ToolResult("now", "ok")]})
    trajectory = play(tiny, [search("a"), search("a"), search("a"), answer()], tools=tools)
    assert shape(trajectory)[:3] == [
        ("search", failed.status, False),
        ("search", "ok", False),
        ("search", "ok", True),
    ]
    assert messages(tiny, trajectory)[1:6:2] == [
        observed(failed.text),
        observed("now"),
        observed("now"),
    ]
    assert len(tools["search"].calls) == 2


def test_duplicates_are_told_apart_by_rollout(tiny):
    """Another sample of the question calls the tool anew."""
    agent = scripted_agent(tiny, {("q", s): [search("a"), answer()] for s in range(3)})
    trajectories = list(agent.run([Job(question(), s) for s in range(3)]))
    assert [t.turns[0].duplicate for t in trajectories] == [False] * 3
    assert len(agent.tools["search"].calls) == 3


# Limits


def limited(name, text):
    """An observation followed by a limit message, both in one user message."""
    return observed(text, LIMIT_MESSAGES[name])


def test_the_turn_limit_keeps_observation_and_thoughts_and_asks_for_the_answer(tiny):
    """The message stands as a second <tool_response>: as a bare user message Qwen3's template would
    strip all earlier thinking (trap 3).
    """
    trajectory = play(
        tiny, [search("a", think="first thoughts"), visit("u"), answer("y")], max_turns=3
    )
    assert messages(tiny, trajectory) == [
        search("a", think="first thoughts"),
        observed("found a"),
        visit("u"),
        limited("turn_limit", "found u"),
        answer("y"),
    ]
    text = tiny.decode(trajectory.token_ids)
    assert "<think>\nfirst thoughts\n</think>" in text
    assert text.count("<|im_start|>user") == 3
    assert (trajectory.stop_reason, trajectory.prediction, trajectory.kept) == (
        "turn_limit",
        "y",
        True,
    )


@pytest.mark.parametrize("middle", [MALFORMED, search("a")])
def test_the_limit_message_also_follows_malformed_and_duplicate_turns(tiny, middle):
    trajectory = play(tiny, [search("a"), middle, answer("y")], max_turns=3)
    body = MALFORMED_MESSAGE if middle == MALFORMED else "found a"
    assert messages(tiny, trajectory)[3] == limited("turn_limit", body)


@pytest.mark.parametrize("content", [search("b"), MALFORMED])
def test_a_forced_turn_that_does_not_answer_is_not_executed(tiny, content):
    tools = fake_tools()
    trajectory = play(tiny, [search("a"), content], max_turns=2, tools=tools)
    assert (trajectory.stop_reason, trajectory.prediction, trajectory.outcome.status) == (
        "no_answer",
        None,
        "ok",
    )
    assert shape(trajectory)[1] == ("malformed" if content == MALFORMED else "search", None, False)
    assert len(tools["search"].calls) == 1
    assert trajectory.turns[-1].obs_end == trajectory.turns[-1].end == len(trajectory.token_ids)


def test_with_one_turn_the_first_must_answer(tiny):
    assert play(tiny, [answer("y")], max_turns=1).stop_reason == "answered"
    assert play(tiny, [search("a")], max_turns=1, tools={}).stop_reason == "no_answer"


def test_the_prediction_of_the_last_turn_is_read_leniently(tiny):
    """Trap 7: a first <answer> that is never closed swallowed summary and second answer. Malformed
    it stays, its prediction is the last one.
    """
    nested = assistant_text("done", "<answer>\n<summary>long</summary>\n<answer>\nParis\n</answer>")
    trajectory = play(tiny, [search("a"), nested], max_turns=2)
    assert shape(trajectory)[1] == ("malformed", None, False)
    assert (trajectory.prediction, trajectory.stop_reason) == ("Paris", "turn_limit")


def test_before_the_last_turn_only_a_strict_answer_ends_the_rollout(tiny):
    nested = assistant_text("done", "<answer>\nfirst\n<answer>\nParis\n</answer>")
    trajectory = play(tiny, [nested, answer("Rome")])
    assert shape(trajectory) == [("malformed", None, False), ("answer", None, False)]
    assert trajectory.prediction == "Rome"


def test_a_turn_cut_by_the_budget_gets_its_end_as_glue(tiny):
    """<|im_end|> was not sampled, so it is no part of the turn: mask 0, no log-prob."""
    cut = tiny.turn_ids(assistant_text("on and on " * 20, ""))[:50]
    trajectory = play(tiny, [cut, answer()], max_turn_tokens=50)
    first = trajectory.turns[0]
    assert (first.end - first.start, first.action) == (50, "malformed")
    assert trajectory.token_ids[first.end] == tiny.im_end_id
    assert trajectory.sampled_mask()[first.start : first.obs_end] == [1] * 50 + [0] * (
        first.obs_end - first.end
    )
    assert len(trajectory.log_probs) == 50 + len(tiny.turn_ids(answer()))
    # system, question, turn, message, answer
    assert tiny.decode(trajectory.token_ids).count("<|im_end|>") == 5


def test_a_sampled_end_of_text_ends_the_turn_and_is_closed_by_glue(tiny):
    ids = [*tiny.turn_ids(search("a"))[:-1], tiny.endoftext_id]
    trajectory = play(tiny, [ids, answer()])
    assert shape(trajectory)[0] == ("search", "ok", False)
    assert trajectory.token_ids[trajectory.turns[0].end - 1 :][:2] == [
        tiny.endoftext_id,
        tiny.im_end_id,
    ]


def test_a_last_turn_cut_by_the_budget_is_a_token_limit(tiny):
    cut = tiny.turn_ids(assistant_text("on and on " * 20, ""))[:50]
    trajectory = play(tiny, [cut, cut], max_turn_tokens=50, max_turns=2)
    assert (trajectory.stop_reason, trajectory.prediction, trajectory.outcome.status) == (
        "token_limit",
        None,
        "ok",
    )


def test_the_context_limit_asks_for_the_answer_while_there_is_room_for_it(tiny):
    """Before a turn starts, the context must hold it, its observation, the message and the
    answering turn; else it is the answering turn.
    """
    agent = scripted_agent(tiny, {})
    prompt = len(tiny.prompt_ids("sys", "Who?"))
    step = len(tiny.turn_ids(search("0"))) + len(tiny.observation_ids(["found 0"], closed=True))
    for room, searches in ((0, 1), (step - 1, 1), (step, 2), (2 * step, 3)):
        turns = [search(f"{n}") for n in range(searches)] + [answer("y")]
        trajectory = play(tiny, turns, max_context=prompt + agent.reserve + room)
        assert (len(trajectory.turns), trajectory.stop_reason, trajectory.prediction) == (
            searches + 1,
            "context_limit",
            "y",
        )
        assert messages(tiny, trajectory)[-2] == limited("context_limit", f"found {searches - 1}")


def test_the_time_limit_asks_for_the_answer_and_leaves_the_statistics(tiny):
    """A wall-clock cut-off says something about the machine, not about the policy: excluded,
    whether it answered or not.
    """
    for last, prediction in ((answer("y"), "y"), (search("b"), None)):
        trajectory = play(tiny, [search("a"), last], max_seconds=1e-9)
        assert messages(tiny, trajectory)[1] == limited("time_limit", "found a")
        assert (trajectory.stop_reason, trajectory.outcome.status, trajectory.kept) == (
            "time_limit",
            "cut_off",
            False,
        )
        assert trajectory.prediction == prediction


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_turns", 0),
        ("max_turn_tokens", 0),
        ("max_observation_tokens", 31),
        ("max_context", 0),
        ("tool_seconds", 0.0),
        ("max_seconds", -1.0),
    ],
)
def test_limits_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field} {value}: must be at least"):
        Limits(**{field: value})


def test_a_prompt_longer_than_the_context_is_one_line_before_anything_runs(tiny):
    agent = scripted_agent(tiny, {("q", 0): [answer()]})
    with pytest.raises(
        ValueError,
        match="^question long: a prompt of .* exceed the context of 8000: raise --max-context or "
        "lower .*",
    ) as raised:
        agent.run([Job(question(), 0), Job(question("long", "why " * 3000), 0)])
    assert "\n" not in str(raised.value)
    assert agent.sampler.feeds == []


def full_turn(tokenizer, query, budget):
    """A search that fills the budget to its last token, so that its <|im_end|>
    comes from the agent.
    """
    ids = tokenizer.encode(search(query, think="").removeprefix("<think>\n"))
    ids = tokenizer.encode("!?" * budget)[: budget - len(ids)] + ids
    assert len(ids) == budget
    return ids


pieces = st.text(st.sampled_from("a \n\n\t\r.,中é😀<>0"), max_size=120) | st.sampled_from(
    ["\n" * 70, " " * 100, "中" * 60, "z" * 200, HOSTILE]
)


def check_the_room(tokenizer, data, limits):
    """Play searches with arbitrary observations to whatever limit comes, and check the
    promises about room.
    """
    budget = limits.max_turn_tokens
    end = [tokenizer.im_end_id]
    asked = question(text="w" * data.draw(st.integers(1, 99)))
    least = (
        len(tokenizer.prompt_ids("sys", asked.question))
        + scripted_agent(tokenizer, {}, limits=limits).reserve
    )
    limits = dataclasses.replace(
        limits, max_context=least + data.draw(st.integers(-2, 2) | st.integers(-2, 1000))
    )
    exact = st.integers(-4, 1).map(lambda n: "z" * (limits.max_observation_tokens + n))
    bodies = data.draw(st.lists(exact | pieces, min_size=12, max_size=12))
    kinds = data.draw(
        st.lists(st.sampled_from(["short", "full", "full", "endless"]), min_size=12, max_size=12)
    )
    ids = [full_turn(tokenizer, str(n), budget) for n in range(12)]
    ids = [
        {"full": full, "short": full[-40:] + end, "endless": full[:-1] + full[:1]}[kind]
        for kind, full in zip(kinds, ids, strict=True)
    ]
    tools = fake_tools(search={str(n): ToolResult(body, "ok") for n, body in enumerate(bodies)})
    agent = scripted_agent(tokenizer, {("q", 0): ids}, tools=tools, limits=limits)
    if limits.max_context < least:
        with pytest.raises(ValueError, match="exceed the context"):
            agent.run([Job(asked, 0)])
        return
    # the scripted sampler refuses what would not fit, like the real one
    [trajectory] = agent.run([Job(asked, 0)])
    assert len(trajectory.token_ids) <= limits.max_context
    assert {budget for _, budget in agent.sampler.feeds} == {limits.max_turn_tokens}
    assert trajectory.turns[-1].start + budget <= limits.max_context
    assert trajectory.stop_reason in ("no_answer", "token_limit")
    assert agent.sampler.contexts == [trajectory.token_ids[:-1]]
    last = trajectory.turns[-2].end
    assert any(
        message in tokenizer.decode(trajectory.token_ids[last:])
        for message in LIMIT_MESSAGES.values()
    )
    shared = len(tokenizer.observation_ids([""], closed=False)) - len(
        tokenizer.encode_untrusted(protocol.observation_text(""))
    )
    for turn in trajectory.turns[:-2]:
        assert turn.obs_end - turn.end <= limits.max_observation_tokens + shared


@given(st.data())
@settings(max_examples=80)
def test_the_context_is_never_exceeded_and_the_answering_turn_has_its_room(tiny, data):
    """Whatever prompt, turns and observations: token_ids fit, and every turn, the answering one
    included, had its full budget.
    """
    check_the_room(
        tiny,
        data,
        Limits(
            max_turns=12,
            max_turn_tokens=110,
            max_observation_tokens=data.draw(st.integers(32, 120)),
        ),
    )


@needs_data
@given(st.data())
@settings(max_examples=40)
def test_the_room_holds_with_the_real_tokenizer(data):
    """Qwen's merges reach over the newlines around a body, so an observation is longer or shorter
    than its body by a few tokens.
    """
    check_the_room(
        qwen(),
        data,
        Limits(
            max_turns=12, max_turn_tokens=50, max_observation_tokens=data.draw(st.integers(32, 40))
        ),
    )


def test_a_body_of_exactly_its_share_does_not_burst_the_context(tiny):
    """The body alone was measured, the piece with its newlines was appended: more tokens than were
    kept in reserve, and the answering turn, when it filled its budget, went beyond a context that
    the turn before had filled to the limit.
    """
    budget, prompt = LIMITS.max_turn_tokens, len(tiny.prompt_ids("sys", "Who?"))
    context = prompt + scripted_agent(tiny, {}).reserve
    tools = fake_tools(search={"a": ToolResult("z" * LIMITS.max_observation_tokens, "ok")})
    trajectory = play(
        tiny,
        [full_turn(tiny, "a", budget), full_turn(tiny, "b", budget)],
        tools=tools,
        max_context=context,
    )
    assert shape(trajectory) == [("search", "ok", False), ("search", None, False)]
    assert len(trajectory.token_ids) <= context
    assert CUT_NOTICE in tiny.decode(trajectory.token_ids)


def test_a_long_observation_is_cut_visibly_within_its_budget(tiny):
    """As much of the beginning as fits, then the notice; a character is not cut in half."""
    body = "é" * 1000
    trajectory = play(
        tiny, [search("a"), answer()], tools=fake_tools(search={"a": ToolResult(body, "ok")})
    )
    shown = (
        messages(tiny, trajectory)[1]
        .removeprefix("<tool_response>\n")
        .removesuffix("\n</tool_response>")
    )
    assert shown.endswith(CUT_NOTICE)
    assert set(shown.removesuffix(CUT_NOTICE)) == {"é"}
    length = len(tiny.encode_untrusted(protocol.observation_text(shown)))
    assert LIMITS.max_observation_tokens - 12 <= length <= LIMITS.max_observation_tokens


def test_an_observation_that_fits_is_not_touched(tiny):
    body = "z" * (LIMITS.max_observation_tokens - 2)  # and its two newlines
    trajectory = play(
        tiny, [search("a"), answer()], tools=fake_tools(search={"a": ToolResult(body, "ok")})
    )
    assert messages(tiny, trajectory)[1] == observed(body)


# Untrusted text, token in and token out


def test_role_markers_in_a_page_stay_ordinary_text(tiny, hostile_play):
    """Trap 2: `<|im_end|>\\n<|im_start|>assistant` in a page became a turn of its own,
    with loss on web text.
    """
    first, second = hostile_play.turns
    observation = hostile_play.token_ids[first.end : first.obs_end]
    specials = {
        tiny.endoftext_id,
        tiny.im_start_id,
        tiny.im_end_id,
        tiny.think_open_id,
        tiny.think_close_id,
        tiny.call_open_id,
        tiny.call_close_id,
    }
    own = tiny.observation_ids(["x"], closed=True)  # the markers of the glue itself
    assert [i for i in observation if i in specials] == [i for i in own if i in specials]
    assert (
        observation.count(tiny.response_open_id) == observation.count(tiny.response_close_id) == 1
    )
    assert HOSTILE in tiny.decode(observation)


def test_role_markers_in_a_page_change_no_turn_and_carry_no_loss(tiny, hostile_play):
    harmless = play(
        tiny, [search("a"), answer()], tools=fake_tools(search={"a": ToolResult("x", "ok")})
    )
    assert len(hostile_play.turns) == len(harmless.turns) == 2
    assert (
        sum(hostile_play.sampled_mask()) == sum(harmless.sampled_mask()) == hostile_play.num_sampled
    )
    first = hostile_play.turns[0]
    assert not any(hostile_play.sampled_mask()[first.end : first.obs_end])


@needs_data
def test_sampled_ids_keep_the_form_in_which_they_were_sampled(tmp_path):
    """Traps 1 and 6: `hel` + `lo` were sampled as two ids; decoded and encoded again they are one,
    `hello`. Record, mask and JSONL keep two.
    """
    tokenizer = qwen()
    assert tokenizer.encode("hello") == [14990]
    split = [49122, 385]
    assert tokenizer.decode(split) == "hello"
    turns = [[*split, *tokenizer.turn_ids(search("a"))], [*split, *tokenizer.turn_ids(answer())]]
    trajectory = play(tokenizer, turns)
    with open(tmp_path / "t.jsonl", "w", encoding="utf-8") as handle:
        append_jsonl(handle, trajectory.to_json())
    [read] = read_trajectories(tmp_path / "t.jsonl")
    for got in (trajectory, read):
        assert [got.token_ids[turn.start : turn.end] for turn in got.turns] == turns
        masked = [i for i, keep in zip(got.token_ids, got.sampled_mask(), strict=True) if keep]
        assert masked == turns[0] + turns[1]
        assert len(got.log_probs) == len(masked)
    assert read == trajectory


def test_an_id_without_a_token_is_recorded(tiny):
    """A model's vocabulary is padded beyond the tokenizer's; an untrained model
    samples such ids.
    """
    ids = [tiny.vocab_size + 3, 40, tiny.im_end_id]
    trajectory = play(tiny, [ids, answer()])
    assert trajectory.token_ids[trajectory.turns[0].start :][:3] == ids
    assert shape(trajectory)[0] == ("malformed", None, False)


def test_every_trajectory_of_a_random_model_keeps_the_invariants(tiny):
    """A random model samples anything: structure tokens in the middle of thoughts, broken UTF-8, no
    end. Trajectory checks its spans itself.
    """
    agent = model_agent(tiny, tiny_model(tiny.vocab_size + 5), fake_tools())
    for trajectory in agent.run([Job(question(f"q{n}"), s) for n in range(3) for s in range(4)]):
        assert Trajectory.from_json(trajectory.to_json()) == trajectory
        assert trajectory.stop_reason in ("token_limit", "no_answer")
        assert len(trajectory.turns) == 3


# A real model


def test_a_groups_prompt_is_prefilled_once(tiny):
    """Four samples of two questions: without an observation, all that is prefilled is each
    prompt but its last token.
    """
    agent = model_agent(tiny, tiny_model(tiny.vocab_size), fake_tools())
    agent.limits = Limits(
        max_turns=1, max_turn_tokens=24, max_observation_tokens=64, max_context=1200
    )
    questions = [question("q", "short?"), question("p", "a much longer one?")]
    trajectories = list(agent.run([Job(q, s) for q in questions for s in range(4)]))
    assert len({tuple(t.token_ids) for t in trajectories}) == 8
    assert agent.sampler.num_prefilled == sum(
        len(tiny.prompt_ids("sys", q.question)) - 1 for q in questions
    )


def test_a_rollout_has_the_same_ids_alone_and_in_a_crowd(tiny):
    """Prefilled or forked, with eight rows or alone in one of eight slots, early or late: same ids;
    log-probs to 1e-5 (fp32).
    """
    model = tiny_model(tiny.vocab_size)
    jobs = [Job(question(f"q{n}", "why " * (n + 1)), s) for n in range(4) for s in range(3)]
    crowd = {t.id: t for t in model_agent(tiny, model, fake_tools()).run(jobs)}
    for job in (jobs[0], jobs[5], jobs[11]):
        [alone] = model_agent(tiny, model, fake_tools()).run([job])
        assert alone.token_ids == crowd[alone.id].token_ids
        assert alone.log_probs == pytest.approx(crowd[alone.id].log_probs, abs=1e-5, rel=0)


# Tools that fail


def test_a_service_that_refuses_ends_the_run_with_its_own_message_and_keeps_what_is_finished(tiny):
    """Trap 27: an expired key that reads as "no results" makes every later answer
    wrong, quietly.
    """
    tools = fake_tools(search={"a": ToolServiceError("serper: HTTP 403 Unauthorized.")})
    agent = scripted_agent(
        tiny, {("p", 0): [answer()], ("q", 0): [search("b"), search("a")]}, tools=tools
    )
    rollouts = agent.run([Job(question("p"), 0), Job(question("q"), 0)])
    assert next(rollouts).stop_reason == "answered"
    with pytest.raises(ToolServiceError, match="^serper: HTTP 403 Unauthorized.$"):
        next(rollouts)


def test_a_policy_that_fails_leaves_the_statistics_with_what_it_had_said(tiny):
    """A remote policy that is out of tries ends its generation without ids: an
    outage is no wrong answer.
    """
    agent = scripted_agent(tiny, {("q", 0): [search("a"), answer()]})
    step, agent.sampler.step = (
        agent.sampler.step,
        lambda: [Generation(g.slot) if agent.sampler.feeds[1:] else g for g in step()],
    )
    [trajectory] = agent.run([Job(question(), 0)])
    assert (trajectory.stop_reason, trajectory.outcome.status, trajectory.kept) == (
        "model_error",
        "tool_error",
        False,
    )
    assert shape(trajectory) == [("search", "ok", False)] and agent.sampler.free == [0, 1, 2, 3]


def test_an_unfit_input_of_a_tool_reaches_the_user(tiny):
    """A ValueError (a bad corpus) is the user's to mend: it is neither an
    observation nor a lost thread.
    """
    with pytest.raises(ValueError, match="^pages.jsonl:3: a page needs a url$"):
        play(
            tiny,
            [search("a"), answer()],
            tools=fake_tools(search={"a": ValueError("pages.jsonl:3: a page needs a url")}),
        )


@pytest.fixture
def dead_threads(monkeypatch):
    """A queue of what threads died of, in place of their tracebacks on stderr."""
    died = queue.SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda args: died.put(args.exc_type))
    return died


def test_a_bug_in_a_tool_ends_the_run_instead_of_hanging_it(tiny, dead_threads):
    with pytest.raises(RuntimeError, match="a tool call died"):
        play(
            tiny,
            [search("a"), answer()],
            tools=fake_tools(search={"a": KeyError("bug")}),
            tool_seconds=60.0,
        )
    assert dead_threads.get(timeout=60) is KeyError


def test_a_hung_tool_costs_only_its_own_row(tiny):
    """One search never returns. Three others finish before it is given up; it is told of the
    time-out and goes on.
    """
    release = threading.Event()
    tools = fake_tools(search={"hang": lambda _: release.wait(60) and None})
    scripts = {("q", 0): [search("hang"), visit("u"), answer()]} | {
        ("q", s): [search(f"{s}"), answer()] for s in (1, 2, 3)
    }
    agent = scripted_agent(tiny, scripts, tools=tools, tool_seconds=1.0)
    trajectories = list(agent.run([Job(question(), s) for s in range(4)]))
    release.set()
    assert [t.sample for t in trajectories] == [1, 2, 3, 0]
    hung = trajectories[-1]
    assert shape(hung) == [
        ("search", "timeout", False),
        ("visit", "ok", False),
        ("answer", None, False),
    ]
    assert messages(tiny, hung)[1] == observed(TIMEOUT_MESSAGE(1.0))
    assert 1.0 <= hung.seconds["tool"] < 5
    assert (
        1.0 <= hung.turns[0].seconds < 5
        and hung.turns[1].seconds < 1.0
        and hung.turns[2].seconds is None
    )
    assert (hung.stop_reason, hung.kept) == ("answered", True)


def test_a_hung_tool_does_not_keep_waiting_jobs_from_starting(tiny):
    """Two slots: the other row ends while the first waits for its tool. With nothing to decode the
    agent waited for that tool, up to its deadline of minutes, and let the free slot be.
    """
    release = threading.Event()
    tools = fake_tools(search={"hang": lambda _: (release.wait(60), ToolResult("late", "ok"))[1]})
    scripts = {("q", 0): [search("hang"), answer()]} | {("q", s): [answer()] for s in (1, 2, 3)}
    rollouts = scripted_agent(tiny, scripts, tools=tools, num_slots=2).run(
        [Job(question(), s) for s in range(4)]
    )
    assert [next(rollouts).sample for _ in range(3)] == [1, 2, 3]
    release.set()
    assert [trajectory.sample for trajectory in rollouts] == [0]


def test_more_hung_calls_than_slots_hold_up_nobody(tiny):
    """Each hung call once kept a thread of a pool of fixed size; with all of them gone every later
    call timed out unserved.
    """
    release = threading.Event()
    tools = fake_tools(search={f"hang{n}": lambda _: release.wait(60) and None for n in range(6)})
    scripts = {("q", n): [search(f"hang{n}"), search(f"{n}"), answer()] for n in range(6)}
    agent = scripted_agent(tiny, scripts, tools=tools, num_slots=2, tool_seconds=0.5)
    trajectories = list(agent.run([Job(question(), n) for n in range(6)]))
    release.set()
    assert [shape(t)[:2] for t in trajectories] == [
        [("search", "timeout", False), ("search", "ok", False)]
    ] * 6


def test_the_result_of_a_call_given_up_is_ignored(tiny):
    """It comes while the same slot waits for its next call: not taken for that one's result."""
    release, second = threading.Event(), threading.Event()

    def late(_):
        assert release.wait(60)
        return ToolResult("stale", "ok")

    def fresh(_):
        release.set()
        assert second.wait(60)
        return ToolResult("fresh", "ok")

    tools = fake_tools(search={"late": late, "fresh": fresh})
    pool, call = ToolPool(), tools["search"]
    pool.submit(3, lambda: call({"query": ["late"]}, corpus=None, deadline=1), 0.05)
    [(slot, result)] = pool.poll(block=True)
    assert (slot, result.status, result.text) == (3, "timeout", TIMEOUT_MESSAGE(0.05))
    pool.submit(3, lambda: call({"query": ["fresh"]}, corpus=None, deadline=1), 60.0)
    # the stale result, of a thread that only had to wake up, is long there
    threading.Timer(0.2, second.set).start()
    assert pool.poll(block=True) == [(3, ToolResult("fresh", "ok"))]
    assert pool.poll(block=True) == []


def test_a_call_that_dies_after_it_was_given_up_costs_nobody_else(dead_threads):
    """Its thread was counted as free again, so the next call was queued for a thread that no longer
    existed, and timed out unserved.
    """
    release, pool = threading.Event(), ToolPool()

    def dies():
        assert release.wait(60)
        raise KeyError("bug")

    pool.submit(0, dies, 0.05)
    assert [result.status for _, result in pool.poll(block=True)] == ["timeout"]
    release.set()
    assert dead_threads.get(timeout=60) is KeyError
    for n in range(3):
        pool.submit(n, lambda: ToolResult("served", "ok"), 30.0)
        assert pool.poll(block=True) == [(n, ToolResult("served", "ok"))]


def test_threads_serve_one_call_after_the_other_and_end_with_the_run(tiny):
    """Two rows of four calls each need two threads, a hung call a third; a training run of a
    thousand rollout steps leaves none behind.
    """
    served, release = set(), threading.Event()

    def note(call):
        served.add(threading.current_thread())
        return ToolResult("late", "ok") if call != "hang" or release.wait(60) else None

    queries = [f"{n}" for n in range(8)]
    tools = fake_tools(
        search={query: lambda _, query=query: note(query) for query in [*queries, "hang"]}
    )
    scripts = {("q", 0): [search("hang"), answer()]}
    scripts |= {
        ("q", s): [*(search(query) for query in queries[4 * s - 4 : 4 * s]), answer()]
        for s in (1, 2)
    }
    agent = scripted_agent(tiny, scripts, tools=tools, tool_seconds=1.0)
    assert [t.stop_reason for t in agent.run([Job(question(), s) for s in range(3)])] == [
        "answered"
    ] * 3
    assert len(served) <= 4  # a result on its way may have its thread counted as taken
    release.set()
    for thread in served:
        thread.join(60)
    assert not any(thread.is_alive() for thread in served)


def test_calls_run_side_by_side(tiny):
    """Four searches wait for each other: one after the other they would never end."""
    barrier = threading.Barrier(4)
    tools = fake_tools(
        search={f"{s}": lambda _: ToolResult(f"{barrier.wait(60)}", "ok") for s in range(4)}
    )
    agent = scripted_agent(
        tiny,
        {("q", s): [search(f"{s}"), answer()] for s in range(4)},
        tools=tools,
        tool_seconds=60.0,
    )
    assert [t.stop_reason for t in agent.run([Job(question(), s) for s in range(4)])] == [
        "answered"
    ] * 4


CHILD = """
import sys, threading
from agent_fakes import *
tools = fake_tools(search={"hang": lambda _: threading.Event().wait()})
script = {("q", 0): [search("hang"), answer()]}
agent = scripted_agent(tiny_tokenizer(sys.argv[1]), script, tool_seconds=0.2, tools=tools)
print([t.stop_reason for t in agent.run([Job(question(), 0)])])
"""


def test_the_process_exits_while_a_tool_still_hangs(tmp_path):
    """A thread pool of the standard library is joined at exit: the run would be over, and
    the process never end.
    """
    command, path = [sys.executable, "-c", CHILD, str(tmp_path)], f"{TESTS}:{TESTS.parents[1]}"
    result = subprocess.run(
        command,
        env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "['answered']\n", "")


# All of it


def test_every_stop_reason_of_this_agent_is_reached_above():
    """straggler (a cut-off of the slowest, GPU rollouts) belongs to another
    driver of the same schema.
    """
    text = Path(__file__).read_text(encoding="utf-8").partition("# All of it")[0]
    assert {reason for reason in STOP_REASONS if f'"{reason}"' not in text} == {"straggler"}
