import json
import re

import pytest
from chat_samples import REAL_FILES, needs_data, observations_of, real, turns_of

from venus.protocol import (
    LIMIT_MESSAGES,
    MALFORMED_MESSAGE,
    TIMEOUT_MESSAGE,
    TOOLS,
    SearchHit,
    assistant_text,
    call_signature,
    extract_prediction,
    format_answer,
    format_search,
    format_tool_call,
    format_visit,
    is_timeout,
    observation_text,
    parse_action,
    split_observation,
    split_think,
    system_prompt,
)

SEARCH = format_tool_call("search", {"query": ["a"]})
ANSWER = format_answer("x")
VISIT_FRAME = re.compile(
    r"The useful information in (.*?) for user goal (.*?) as follows: \n\n(?:Evidence in "
    r"page: \n(.*)\n\n)?Summary: \n(.*)",
    re.S,
)


def body_of(observation: str) -> str:
    return observation.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")


@needs_data
def test_the_strict_checker_accepts_the_real_turns_but_two():
    """Only the final turns of SFT files 0001 and 0008 are invalid: two <answer>, one </answer>."""
    invalid = {}
    for name in REAL_FILES:
        actions = [parse_action(content) for content in turns_of(real(name))]
        invalid |= {
            (name, k - len(actions)): a.reason for k, a in enumerate(actions) if not a.format_ok
        }
    assert invalid == {("sft/0001", -1): "nested_answer", ("sft/0008", -1): "nested_answer"}


@needs_data
def test_the_unclosed_first_answer_does_not_swallow_summary_and_second_answer():
    """Two of ten released files: taking what lies between the first <answer> and the last </answer>
    returns a page of summary.
    """
    assert extract_prediction(turns_of(real("sft/0001"))[-1]) == "**Daniel Mortimer**"
    assert extract_prediction(turns_of(real("sft/0008"))[-1]).endswith(
        "is “The Bells and Whistles.”**"
    )


@pytest.mark.parametrize(
    ("content", "prediction"),
    [
        (assistant_text("t", ANSWER), "x"),
        (
            assistant_text(
                "t", "<answer>\n<summary>\nlong\n</summary>\n<answer>\nParis\n</answer>"
            ),
            "Paris",
        ),
        (assistant_text("<answer>draft</answer>", "<answer>Paris</answer> done"), "Paris"),
        (assistant_text("t", "<answer>A</answer><answer>B</answer>"), "B"),
        ("no thoughts <answer>A</answer>", "A"),
        (assistant_text("<answer>draft</answer>", SEARCH), None),
        (assistant_text("t", "<answer>cut"), None),
        (assistant_text("t", "cut</answer>"), None),
        (assistant_text("t", "<answer> \n</answer>"), None),
        ("", None),
    ],
)
def test_the_prediction_is_read_leniently_from_outside_the_thoughts(content, prediction):
    assert extract_prediction(content) == prediction


@pytest.mark.parametrize(
    ("content", "kind", "reason"),
    [
        (assistant_text("", ANSWER), "answer", None),
        (assistant_text("t", f" {SEARCH}\n"), "search", None),
        ("<think>a</think> <think>b</think>" + ANSWER, "answer", None),
        ("", "malformed", "think_tags"),
        (ANSWER, "malformed", "think_tags"),
        ("<think>never closed" + ANSWER, "malformed", "think_tags"),
        ("</think><think>" + ANSWER, "malformed", "think_tags"),
        ("<think><think>a</think></think>" + ANSWER, "malformed", "think_tags"),
        ("hi <think>a</think>" + ANSWER, "malformed", "text_before_think"),
        (assistant_text("t", "just text"), "malformed", "no_action"),
        (assistant_text("t", SEARCH + ANSWER), "malformed", "two_actions"),
        (assistant_text("t", SEARCH + SEARCH), "malformed", "two_actions"),
        (assistant_text("t", SEARCH.removesuffix("</tool_call>")), "malformed", "two_actions"),
        (assistant_text("t", ANSWER + ANSWER), "malformed", "nested_answer"),
        (assistant_text("I will use <answer> tags", ANSWER), "malformed", "nested_answer"),
        (assistant_text(SEARCH, ANSWER), "malformed", "two_actions"),
        (assistant_text(SEARCH, ""), "malformed", "text_around_action"),
        (assistant_text("t", ANSWER + "\nDone."), "malformed", "text_around_action"),
        (assistant_text("t", "So: " + SEARCH), "malformed", "text_around_action"),
        (
            assistant_text("t", SEARCH + "\n<tool_response>\nmade up"),
            "malformed",
            "text_around_action",
        ),
        (assistant_text("t", format_answer(" ")), "malformed", "empty_answer"),
    ],
)
def test_a_turn_is_thoughts_then_exactly_one_action(content, kind, reason):
    action = parse_action(content)
    assert (action.kind, action.reason, action.format_ok) == (kind, reason, kind != "malformed")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{'name': 'search'}", "bad_json"),
        ('{"name": "search", "arguments": {"query": ["a"]},}', "bad_json"),
        ("[" * 100_000, "bad_json"),
        ("1" * 5_000, "bad_json"),
        ("[]", "bad_json"),
        ('{"name": "search", "arguments": "a"}', "bad_json"),
        ('{"name": "PythonInterpreter", "arguments": {}}', "unknown_tool"),
        ('{"name": "Search", "arguments": {"query": ["a"]}}', "unknown_tool"),
        ('{"name": "search", "arguments": {}}', "bad_arguments"),
        ('{"name": "search", "arguments": {"query": []}}', "bad_arguments"),
        ('{"name": "search", "arguments": {"query": ["a", " "]}}', "bad_arguments"),
        ('{"name": "search", "arguments": {"query": ["a", 1]}}', "bad_arguments"),
        ('{"name": "search", "arguments": {"query": "\\ud83d"}}', "bad_arguments"),
        ('{"name": "visit", "arguments": {"url": ["u"]}}', "bad_arguments"),
        ('{"name": "visit", "arguments": {"url": ["u"], "goal": null}}', "bad_arguments"),
    ],
)
def test_a_bad_call_is_malformed_with_a_stable_reason(body, reason):
    assert parse_action(assistant_text("t", f"<tool_call>\n{body}\n</tool_call>")).reason == reason


@pytest.mark.parametrize(
    ("name", "given", "arguments"),
    [
        ("search", {"query": "l'Aquila", "topn": 5}, {"query": ["l'Aquila"]}),
        ("search", {"query": ["a", "b"]}, {"query": ["a", "b"]}),
        ("visit", {"url": "u", "goal": "g", "page": 1}, {"url": ["u"], "goal": "g"}),
    ],
)
def test_arguments_come_as_lists_without_extra_keys(name, given, arguments):
    action = parse_action(assistant_text("t", format_tool_call(name, given)))
    assert (action.kind, action.arguments) == (name, arguments)


@needs_data
def test_real_search_observations_are_written_to_the_letter():
    bodies = [
        body_of(text)
        for name in REAL_FILES
        for text in observations_of(real(name))
        if text.startswith('<tool_response>\n[{"query"')
    ]
    for body in bodies:
        blocks = [
            (block["query"], [SearchHit(**hit) for hit in block["web_page_info_list"]])
            for block in json.loads(body)
        ]
        assert format_search(blocks) == body
    assert len(bodies) == 234 + 586


@needs_data
def test_real_visit_observations_are_written_to_the_letter():
    """All 76 SFT visits, and the 84 answered RL visits but for two newlines at the end, which the
    SFT data do not have.
    """
    matches = [
        VISIT_FRAME.fullmatch(body_of(text))
        for name in REAL_FILES
        for text in observations_of(real(name))
    ]
    matches = [match for match in matches if match]
    for match in matches:
        url, goal, evidence, summary = match.groups()
        assert format_visit([(url, goal, summary, evidence)]) == match.string.removesuffix("\n\n")
    assert len(matches) == 76 + 84


def test_several_pages_are_joined_by_the_separator_line():
    assert format_visit([("u", "g", "s ", None), ("v", "g", "s", "e")]) == (
        "The useful information in u for user goal g as follows: \n\nSummary: \ns\n=======\n"
        "The useful information in v for user goal g as follows: \n\nEvidence in page: "
        "\ne\n\nSummary: \ns"
    )


@needs_data
def test_the_eleven_real_time_outs_are_recognised():
    assert (
        sum(
            is_timeout(body_of(text)) for name in REAL_FILES for text in observations_of(real(name))
        )
        == 11
    )


def test_our_time_out_message_is_the_real_one():
    assert TIMEOUT_MESSAGE(120) == "Tool execution timed out after 120 seconds." and is_timeout(
        TIMEOUT_MESSAGE(0.5)
    )


@needs_data
def test_real_duplicate_calls_are_counted_with_and_without_the_goal():
    """Two exact repeats in the RL files; ten more visits open a known page with another goal,
    which is a new call.
    """
    exact = same_page = 0
    for name in REAL_FILES:
        signatures = [
            call_signature(a)
            for a in map(parse_action, turns_of(real(name)))
            if a.kind in ("search", "visit")
        ]
        exact += len(signatures) - len(set(signatures))
        same_page += len(signatures) - len({signature[:2] for signature in signatures})
    assert (exact, same_page) == (2, 12)


def test_order_and_outer_spaces_do_not_make_a_new_call():
    one, other = (
        parse_action(assistant_text("t", format_tool_call("search", {"query": q})))
        for q in (["a", "b"], ["b ", " a"])
    )
    assert call_signature(one) == call_signature(other)


@pytest.mark.parametrize("message", LIMIT_MESSAGES.values())
def test_a_limit_message_after_an_observation_is_a_response_of_its_own(message):
    content = (
        f"<tool_response>\nbody\n</tool_response>\n<tool_response>\n{message}\n</tool_response>"
    )
    assert split_observation(content) == [observation_text("body"), observation_text(message)]


def test_response_tags_inside_a_page_are_page_text():
    inner = "\na\n</tool_response>\n<tool_response>\nb\n"
    assert split_observation(f"<tool_response>{inner}</tool_response>") == [inner]


@pytest.mark.parametrize(
    "content",
    ["plain", "<tool_response>\na\n</tool_response>\n", " <tool_response>a</tool_response>"],
)
def test_a_user_message_not_wrapped_from_end_to_end_is_no_observation(content):
    assert split_observation(content) is None


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("<think>\n\n a \n\n</think>\n<answer>", (" a ", "<answer>")),
        ("<think>a</think> \nb\n", ("a", " \nb\n")),
        ("<think>a</think>b<think>c</think>d", ("a", "d")),
        ("no thoughts", ("", "no thoughts")),
    ],
)
def test_thoughts_are_split_as_the_chat_template_splits_them(content, parts):
    assert split_think(content) == parts


def test_the_full_system_prompt_carries_the_tools_in_qwens_form():
    text = system_prompt("full", "2026-03-01")
    lines = text.partition("<tools>\n")[2].partition("\n</tools>")[0].split("\n")
    assert [json.loads(line) for line in lines] == list(TOOLS)
    assert (
        text.endswith("</tool_call>\n\nCurrent date: 2026-03-01\n") and "<answer></answer>" in text
    )


@needs_data
def test_the_tool_schemas_name_the_arguments_of_the_real_ones():
    lines = (
        real("sft/0000")["messages"][0]["content"]
        .partition("<tools>\n")[2]
        .partition("\n</tools>")[0]
        .split("\n")
    )
    for ours, theirs in zip(TOOLS, map(json.loads, lines), strict=True):
        ours, theirs = ours["function"], theirs["function"]
        assert (
            ours["name"] == theirs["name"]
            and ours["parameters"]["required"] == theirs["parameters"]["required"]
        )
        for key, schema in theirs["parameters"]["properties"].items():
            assert ours["parameters"]["properties"][key]["type"] == schema["type"]


def test_the_short_system_prompt_is_one_line():
    assert "\n" not in system_prompt("short")


def test_an_unknown_prompt_style_is_an_error():
    with pytest.raises(ValueError, match="'long'; use full or short"):
        system_prompt("long")


def test_the_messages_of_the_agent_ask_for_a_well_formed_turn():
    assert all(
        "<answer></answer>" in message for message in (MALFORMED_MESSAGE, *LIMIT_MESSAGES.values())
    )
