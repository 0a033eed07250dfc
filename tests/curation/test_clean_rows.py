"""What becomes of one raw row: every rule and probe of the specification with the right outcome,
the real files, and random rows.
"""

import copy
import json

import pytest
from chat_samples import DATA, expected, needs_data, qwen, real, tiny_file, tiny_spec, turns_of
from clean_samples import (
    FOUND,
    HIT,
    NO_PAGE,
    PAGE,
    PYTHON,
    QUESTION,
    SEARCH,
    TIMEOUT,
    call,
    cleaned,
    config,
    conversation,
    final,
    losses,
    observed,
    raw,
    texts,
    visit,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from venus.curation.clean import clean_row
from venus.curation.prune import signature_of
from venus.protocol import (
    LIMIT_MESSAGES,
    MALFORMED_MESSAGE,
    SPECIAL_TOKENS,
    assistant_text,
    parse_action,
    split_observation,
    system_prompt,
)
from venus.tokenizer import ChatTokenizer


def turn(body, think="t"):
    return assistant_text(think, f"<tool_call>\n{body}\n</tool_call>")


# 2.1 question and answer, 1 the schemas


@pytest.mark.parametrize(
    ("row", "gt"),
    [
        (raw(final()), "Bo"),
        (raw(final(), answer=["Bo", "Bo A."]), ["Bo", "Bo A."]),  # the released cleaner drops lists
        ({"question": QUESTION, "gt": "Bo", "messages": conversation(final())}, "Bo"),
        (
            {
                "question": QUESTION,
                "answer": "Bo",
                "prediction": "x",
                "termination": "answer",
                "messages": conversation(final()),
            },
            "Bo",
        ),
        ({"request_id": "1", "num_turns": 1, "messages": conversation(final())}, None),
        ({"meta": {"question": QUESTION}, "messages": conversation(final())}, None),
    ],
)
def test_rows_of_every_schema_become_clean_rows(row, gt):
    account, clean = cleaned(row)
    assert (clean["question"], clean["gt"], texts(clean), account.removed) == (
        QUESTION,
        gt,
        [final()],
        [],
    )
    assert [m["role"] for m in clean["messages"]] == ["system", "user", "assistant"] and list(
        clean
    ) == ["question", "gt", "messages", "weight"]


@pytest.mark.parametrize(
    ("row", "reason", "turn"),
    [
        (b"{", "not_json", None),
        (b"[" * 100_000, "not_json", None),
        ([], "no_messages", None),
        ({"messages": "x"}, "no_messages", None),
        ({"messages": [1]}, "bad_message", None),
        ({"messages": [{"role": "user", "content": None}]}, "bad_message", None),
        (raw(SEARCH, ("user", 5)), "bad_message", 0),
        (raw(SEARCH, FOUND, ("system", "x"), final()), "bad_role", 0),
        ({"messages": [{"role": "function", "content": "x"}]}, "bad_role", None),
        ({"messages": []}, "no_question", None),
        ({"messages": [{"role": "assistant", "content": final()}]}, "no_question", None),
        ({"messages": [{"role": "user", "content": FOUND}]}, "no_question", None),
        ({"messages": [{"role": "user", "content": " "}]}, "no_question", None),
        ({"messages": conversation()}, "no_turns", None),
        ({"messages": conversation(("user", "x"), final())}, "second_question", None),
        (raw(SEARCH, "And his brother?", final()), "second_question", 0),
        ({"question": "Who?", "messages": conversation(final())}, "question_mismatch", None),
        (raw(SEARCH, FOUND), "ends_with_user", 0),  # probe P
        (raw(SEARCH), "no_final_answer", 0),
        (raw(SEARCH, FOUND, PYTHON), "no_final_answer", 1),
        (raw(final(), FOUND, final()), "answer_before_end", 0),
        (raw(final("")), "empty_answer", 0),
        (raw("<answer>Bo</answer>"), "think_tags", 0),
        (raw("<think>t"), "think_tags", 0),
        (raw("x" + final()), "text_before_think", 0),
        (raw("<think>t</think>Bo"), "no_action", 0),
        (raw("<think>t</think><answer>Bo"), "nested_answer", 0),
        (raw(final() + "and more"), "text_around_action", 0),
        (raw(SEARCH + "<answer>Bo</answer>"), "two_actions", 0),
    ],
)
def test_a_row_that_cannot_be_used_goes_with_a_stable_reason_and_the_turn(row, reason, turn):
    account, clean = cleaned(row)
    assert clean is None and losses(account)[-1] == ("row", turn, reason)


def test_a_leading_system_message_is_not_the_question():
    """Probe U: the released cleaner took index 0, so that the system message became the question
    and the question vanished, yet validated.
    """
    row = raw(final())
    row["messages"].insert(0, {"role": "system", "content": "deep search assistant with 5 tools"})
    assert cleaned(row)[1] == cleaned(raw(final()))[1]


def test_the_question_may_differ_in_white_space_only():
    row = raw(final())
    row["meta"]["question"] = f"  {QUESTION.replace(' ', chr(10))}\n"
    assert cleaned(row)[1]["question"] == QUESTION


@pytest.mark.parametrize("style", ["full", "short"])
def test_the_system_prompt_is_the_protocols(style):
    """2.2: the row's own prompt would go on advertising the tools that were pruned."""
    row = raw(final(), system_prompt="5 tools")
    assert cleaned(row, system_prompt=style, date="2026-03-01")[1]["messages"][0][
        "content"
    ] == system_prompt(style, "2026-03-01")


def test_a_row_without_ground_truth_goes_when_there_is_a_judge():
    row = {"messages": conversation(final())}
    assert (
        losses(cleaned(row, judge="match")[0]) == [("row", None, "no_ground_truth")]
        and cleaned(row)[1]["gt"] is None
    )


# 2.3 calls


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ('{"name": "search", "arguments": {"query": "a"}}', call(query=["a"])),
        ('{"name": "search", "arguments": {"queries": ["a", "b"]}}', call(query=["a", "b"])),
        (
            '{"name": "search", "arguments": {"query": ["a"], "topn": 10, "source": "web"}}',
            call(query=["a"]),
        ),
        (
            '{"name": "search", "arguments": {"query": "[\\"a\\", \\"b\\"]"}}',
            call(query=["a", "b"]),
        ),
        ('{"name": "search", "arguments": "{\\"query\\": [\\"a\\"]}"}', call(query=["a"])),
        ('{"name": "search", "arguments": {"query": "[1] a"}}', call(query=["[1] a"])),
        ('{"name": "search", "arguments": {"query": ["a\nb"]}}', call(query=["a\nb"])),
        # probe L: "Search" survived as it was
        ('{"name": "Search", "arguments": {"query": ["a"]}}', call(query=["a"])),
        (
            '{"name": "search", "arguments": {"query": ["a \\ud83d\\ude00 \\ud83d"]}}',
            call(query=["a \U0001f600 \ufffd"]),
        ),
        (
            '{"name": "visit", "arguments": {"url": "u", "goal": "g"}}',
            call("visit", url=["u"], goal="g"),
        ),
        (
            '{"name": "visit", "arguments": {"urls": ["u", "v"], "goal": ["g", "h"]}}',
            call("visit", url=["u", "v"], goal="g; h"),
        ),
        (
            '{"name": "visit", "arguments": {"url": "[\\"u\\", \\"v\\"]", "goal": ["g"]}}',
            call("visit", url=["u", "v"], goal="g"),
        ),
    ],
)
def test_a_call_of_any_spelling_becomes_the_protocols(body, wanted):
    account, clean = cleaned(raw(turn(body), observed(PAGE), final()))
    assert texts(clean)[0] == wanted and account.counts["repairs/call"] == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (turn('{"name": "search", "arguments": {"query": []}}'), "bad_arguments"),
        (turn('{"name": "search", "arguments": {"query": [5]}}'), "bad_arguments"),
        (turn('{"name": "search", "arguments": {"query": ["a", " "]}}'), "bad_arguments"),
        (turn('{"name": "visit", "arguments": {"url": ["u"]}}'), "bad_arguments"),
        (turn('{"name": "visit", "arguments": {"url": ["u"], "goal": 1}}'), "bad_arguments"),
        (turn('{"name": "search", "arguments": ["a"]}'), "bad_json"),
        (turn("{'name': 'search', 'arguments': {'query': ['a']}}"), "bad_json"),
        (turn('{"name": "search"'), "bad_json"),
        (SEARCH.replace("<think>\nt\n</think>\n\n", ""), "think_tags"),
        (SEARCH.replace("<tool_call>", "So: <tool_call>"), "text_around_action"),
        ("<think>t</think>", "no_action"),
        (assistant_text("t", "<answer>Bo</answer><answer>Al</answer>"), "nested_answer"),
        # probe J: it kept the first call and the observation of both
        (SEARCH + SEARCH.partition("</think>")[2], "two_actions"),
    ],
)
def test_a_turn_the_checker_rejects_goes_with_its_observation(content, reason):
    """Probe V: the released cleaner skipped such turns and counted nothing."""
    account, clean = cleaned(raw(SEARCH, FOUND, content, observed(MALFORMED_MESSAGE), final()))
    assert losses(account) == [("turn", 1, reason)] and texts(clean) == [SEARCH, FOUND, final()]


def test_tags_in_the_thoughts_of_a_call_are_taken_out():
    content = call(think="then <answer>Bo</answer> <summary>s</summary>?")
    account, clean = cleaned(raw(content, FOUND, final()))
    assert (
        texts(clean)[0] == call(think="then Bo s?") and account.counts["repairs/thought_tags"] == 1
    )


@pytest.mark.parametrize(
    "content",
    [
        SEARCH,
        SEARCH.replace("\n\n<tool", "\n<tool"),
        SEARCH.replace("<think>\n", "<think>"),
        "\n" + SEARCH + " ",
    ],
)
def test_a_valid_turn_stays_byte_for_byte(content):
    assert texts(cleaned(raw(content, FOUND, final()))[1])[0] == content


# 2.3 final answers


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        # an answer that is never closed swallows the summary and the second answer: the end of two
        # of the ten released files
        (
            assistant_text(
                "t", "<answer>\n<summary>\nIt is Bo.\n</summary>\n<answer>\nBo\n</answer>"
            ),
            final("Bo", "t"),
        ),
        (assistant_text("t", "<answer>Al</answer>\n<answer>\nBo\n</answer>"), final("Bo", "t")),
        (assistant_text("t", "<answer>Bo</answer></answer>"), None),
        (assistant_text("t", "<summary>s</summary>\n<answer>Bo</answer>"), final("Bo", "t")),
        (assistant_text("so <answer>Al</answer>", "<answer>\nBo\n</answer>"), final("Bo", "so Al")),
        (assistant_text("t", "<answer><summary>s</summary></answer><answer> </answer>"), None),
    ],
)
def test_a_nested_answer_becomes_the_last_one(content, wanted):
    account, clean = cleaned(raw(content))
    assert (clean and texts(clean)[0]) == wanted
    assert losses(account) == ([] if wanted else [("row", 0, "nested_answer")])
    assert account.counts["repairs/answer"] == (wanted is not None)


# 2.3 observations


def test_observations_are_converted_by_the_name_of_the_call_before_them():
    text = "A Google search for 'a' found 1 results:\n\n## Web Results\n1. [A](http://a)\n\ns"
    _, clean = cleaned(raw(SEARCH, observed(text), visit(), observed(text), final()))
    assert texts(clean) == [SEARCH, FOUND, visit(), observed(text), final()]


def test_a_message_of_role_tool_is_an_observation():
    """Probe W: it cost the whole row."""
    assert (
        texts(cleaned(raw(SEARCH, ("tool", HIT), final()))[1])
        == texts(cleaned(raw(SEARCH, ("tool", FOUND), final()))[1])
        == [SEARCH, FOUND, final()]
    )


def test_a_second_observation_is_an_orphan_and_is_counted():
    account, clean = cleaned(raw(SEARCH, FOUND, ("user", observed("x")), ("assistant", final())))
    assert losses(account) == [("observation", 0, "orphan_observation")] and texts(clean) == [
        SEARCH,
        FOUND,
        final(),
    ]


def test_a_call_that_nothing_answered_goes():
    account, clean = cleaned(
        raw(SEARCH, ("assistant", visit()), ("user", observed(PAGE)), ("assistant", final()))
    )
    assert losses(account) == [("turn", 0, "no_observation")] and texts(clean) == [
        visit(),
        observed(PAGE),
        final(),
    ]


LIMIT = "You have reached the iteration limit. Please answer now."
NOTICE = observed(LIMIT_MESSAGES["turn_limit"])


@pytest.mark.parametrize(
    ("contents", "wanted"),
    [
        ((SEARCH, LIMIT, final()), [SEARCH, NOTICE, final()]),
        (
            (SEARCH, FOUND, ("user", LIMIT), ("assistant", final())),
            [SEARCH, f"{FOUND}\n{NOTICE}", final()],
        ),
        (
            (SEARCH, FOUND, "<think>t</think>", LIMIT, final()),
            [SEARCH, f"{FOUND}\n{NOTICE}", final()],
        ),
        ((SEARCH, FOUND, PYTHON, LIMIT, final()), [SEARCH, f"{FOUND}\n{NOTICE}", final()]),
        ((PYTHON, LIMIT, final()), [final()]),
    ],
)
def test_a_bare_limit_message_is_wrapped_and_outlives_its_turn(contents, wanted):
    """One bare user message late in the dialogue makes the chat template strip
    all thinking before it.
    """
    clean = cleaned(raw(*contents))[1]
    assert texts(clean) == wanted and texts(cleaned(clean)[1]) == wanted


def test_lone_surrogates_become_replacement_characters_and_halves_are_joined():
    _, clean = cleaned(raw(call(think="\ud83d\ude00 \ud83d"), observed("\udc00"), final("B\udfff")))
    assert texts(clean) == [call(think="\U0001f600 \ufffd"), observed("\ufffd"), final("B\ufffd")]


# 2.4 pruning


def test_turns_with_other_tools_go_with_their_observation_and_are_counted_by_tool():
    scholar = call("google_scholar", query=["a"])
    account, clean = cleaned(
        raw(PYTHON, observed("1"), SEARCH, FOUND, scholar, observed("x"), final())
    )
    assert texts(clean) == [SEARCH, FOUND, final()]
    assert losses(account) == [("turn", 0, "disallowed_tool"), ("turn", 2, "disallowed_tool")]
    assert (
        account.counts["pruned_calls/PythonInterpreter"],
        account.counts["pruned_calls/google_scholar"],
    ) == (1, 1)


def test_a_turn_in_which_any_call_is_disallowed_goes():
    account, _ = cleaned(raw(SEARCH + PYTHON.partition("</think>")[2], FOUND, final()))
    assert losses(account) == [("turn", 0, "disallowed_tool")]


def test_with_drop_trajectory_one_disallowed_call_costs_the_row():
    """Later thoughts refer to results that pruning took away."""
    account, clean = cleaned(
        raw(SEARCH, FOUND, PYTHON, observed("1"), final()), disallowed="drop-trajectory"
    )
    assert clean is None and losses(account) == [("row", 1, "disallowed_tool")]


# 2.5 duplicates

DUPLICATES = {
    "an equal search": ((SEARCH, FOUND, SEARCH, FOUND), [1]),
    "queries in another order, case or spacing": (
        (call(query=["a b", "c"]), FOUND, call(query=["C", " A  b "]), FOUND),
        [1],
    ),
    "another query": ((SEARCH, FOUND, call(query=["b"]), FOUND), []),
    "R: a part of the queries": ((call(query=["a", "b"]), FOUND, SEARCH, FOUND), []),
    "R: a query twice": ((call(query=["a", "a"]), FOUND, SEARCH, FOUND), [1]),
    "Q: the retry after a time-out": ((visit(), observed(TIMEOUT), visit(), observed(PAGE)), []),
    "the retry after an error": ((SEARCH, observed("Tool execution error: x"), SEARCH, FOUND), []),
    "the retry after nothing was found": (
        (SEARCH, observed("No results found for 'a'. Try"), SEARCH, FOUND),
        [],
    ),
    "the retry of an unreadable page": ((visit(), observed(NO_PAGE), visit(), observed(PAGE)), []),
    "the first success is the one that stays": (
        (visit(), observed(TIMEOUT), visit(), observed(PAGE), visit(), observed(PAGE)),
        [2],
    ),
    "a failure after a success": ((visit(), observed(PAGE), visit(), observed(TIMEOUT)), [1]),
    "a visit with another goal": ((visit(), observed(PAGE), visit(goal="h"), observed(PAGE)), [1]),
    "a url with a fragment or a last slash": (
        (visit("http://a"), observed(PAGE), visit("http://a/#top"), observed(PAGE)),
        [1],
    ),
    "a url in another case": (
        (visit("http://a/B"), observed(PAGE), visit("http://a/b"), observed(PAGE)),
        [],
    ),
    "the same words as query and url": (
        (call(query=["http://a"]), FOUND, visit(), observed(PAGE)),
        [],
    ),
}


@pytest.mark.parametrize("case", DUPLICATES)
def test_only_calls_that_have_succeeded_before_are_duplicates(case):
    contents, gone = DUPLICATES[case]
    account, clean = cleaned(raw(*contents, final()))
    assert losses(account) == [("turn", index, "duplicate") for index in gone]
    assert len(turns_of(clean)) == len(contents) // 2 + 1 - len(gone)


def test_the_goal_may_be_part_of_the_signature():
    contents = (
        visit(),
        observed(PAGE),
        visit(goal="h"),
        observed(PAGE),
        visit(),
        observed(PAGE),
        final(),
    )
    assert [
        gone["turn"] for gone in cleaned(raw(*contents), goal_in_signature=True)[0].removed
    ] == [2]


def test_a_removed_duplicate_is_listed_with_its_call_and_the_turn_it_repeats():
    account, _ = cleaned(raw(SEARCH, FOUND, SEARCH, FOUND, final()))
    assert account.removed == [
        {
            "row": "row",
            "lost": "turn",
            "turn": 1,
            "reason": "duplicate",
            "first": 0,
            "call": {"query": ["a"]},
        }
    ]


# 2.8 resampling


def long_row(num_turns):
    return raw(
        *(text for k in range(num_turns - 1) for text in (call(query=[f"q{k}"]), FOUND)), final()
    )


@pytest.mark.parametrize(
    ("num_turns", "weight"), [(1, 1), (49, 1), (50, 1), (51, 2), (100, 2), (101, 5), (130, 5)]
)
def test_the_papers_multipliers(num_turns, weight):
    """Turns count after pruning, the answer included."""
    assert cleaned(long_row(num_turns))[1]["weight"] == weight


def test_the_papers_buckets_make_18745_instances():
    account = {n: cleaned(long_row(n))[0].kept_counts["train/instances"] for n in (50, 100, 101)}
    assert 3720 * account[50] + 4400 * account[100] + 1245 * account[101] == 18745


def test_limits_and_copies_can_be_chosen():
    settings = {"turn_limits": (2,), "copies": (3, 7)}
    assert [cleaned(long_row(n), **settings)[1]["weight"] for n in (2, 3)] == [3, 7]
    assert cleaned(long_row(200), turn_limits=(), copies=(1,))[1]["weight"] == 1


def test_materialised_copies_are_marked_and_stay_single_when_cleaned_again():
    account, first = cleaned(long_row(101), materialise=True)
    names, rows = zip(*((name, json.loads(line)) for name, line in account.lines), strict=True)
    assert names == ("train.jsonl", *(f"copies-{k}.jsonl" for k in range(1, 5))) and [
        row["copy"] for row in rows
    ] == [0, 1, 2, 3, 4]
    assert "weight" not in first
    for again in (cleaned(rows[3])[0], cleaned(rows[3], materialise=True)[0]):
        assert [json.loads(line) for _, line in again.lines] == [rows[3]] and again.kept_counts[
            "train/instances"
        ] == 1


def test_the_split_is_by_question_and_validation_rows_stand_once():
    rows = {
        f"q{k}": {"messages": [{"role": "user", "content": f"q{k}"}, *long_row(60)["messages"][1:]]}
        for k in range(200)
    }
    short = {q: {"messages": [row["messages"][0], row["messages"][-1]]} for q, row in rows.items()}
    where, other = (
        {q: cleaned(row, validation=0.3)[0].lines[0][0] for q, row in kind.items()}
        for kind in (rows, short)
    )
    assert where == other and 30 < list(where.values()).count("validation.jsonl") < 90
    weights = {where[q]: cleaned(row, validation=0.3)[1]["weight"] for q, row in rows.items()}
    assert weights == {"train.jsonl": 2, "validation.jsonl": 1}
    assert where != {
        q: cleaned(row, validation=0.3, seed=1)[0].lines[0][0] for q, row in rows.items()
    }


# Length


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(tiny_file(tmp_path_factory.mktemp("tiny"), tiny_spec()))


def test_tokens_are_those_of_the_tokenizer(tiny):
    account, clean = cleaned(long_row(5), tokenizer=tiny)
    encoded = ChatTokenizer(tiny).encode_messages(clean["messages"])
    assert account.kept_counts["tokens/all"] == len(encoded.ids)
    assert account.kept_counts["tokens/loss"] == sum(end - start for start, end in encoded.spans)


def test_a_row_that_is_too_long_goes(tiny):
    length = cleaned(long_row(5), tokenizer=tiny)[0].kept_counts["tokens/all"]
    assert cleaned(long_row(5), tokenizer=tiny, max_length=length)[1] is not None
    assert losses(cleaned(long_row(5), tokenizer=tiny, max_length=length - 1)[0]) == [
        ("row", None, "overlong")
    ]


def test_cutting_takes_the_last_turns_before_the_answer_and_lists_them(tiny):
    length = cleaned(long_row(5), tokenizer=tiny)[0].kept_counts["tokens/all"]
    account, clean = cleaned(long_row(5), tokenizer=tiny, max_length=length - 1, overlong="cut")
    whole = texts(cleaned(long_row(5))[1])
    assert texts(clean) == [*whole[:6], whole[-1]] and losses(account) == [("turn", 3, "overlong")]
    encoded = ChatTokenizer(tiny).encode_messages(clean["messages"])
    assert account.kept_counts["tokens/all"] == len(encoded.ids) <= length - 1
    assert account.kept_counts["tokens/loss"] == sum(end - start for start, end in encoded.spans)


def test_the_answer_is_never_cut(tiny):
    """With less room than question, one turn and answer the row goes, whatever --overlong says."""
    two = cleaned(long_row(2), tokenizer=tiny)[0].kept_counts["tokens/all"]
    assert (
        len(turns_of(cleaned(long_row(5), tokenizer=tiny, max_length=two, overlong="cut")[1])) == 2
    )
    assert losses(cleaned(long_row(5), tokenizer=tiny, max_length=two - 1, overlong="cut")[0]) == [
        ("row", None, "overlong")
    ]


# The real files


def real_row(name):
    row = copy.deepcopy(real(name))
    return row if name.startswith("sft") else {"messages": row["messages"]}


@needs_data
def test_of_the_ten_real_sft_files_only_two_final_answers_change():
    before = after = turns = 0
    for number in range(10):
        name = f"sft/{number:04d}"
        account, clean = cleaned(real_row(name))
        old, new = turns_of(real(name)), turns_of(clean)
        changed = [k for k, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1]]
        assert changed == ([len(old) - 1] if number in (1, 8) else []) and account.removed == []
        assert [m["content"] for m in clean["messages"][1::2]] == [
            m["content"] for m in real(name)["messages"][1::2]
        ]
        turns, before = turns + len(old), before + sum(parse_action(text).format_ok for text in old)
        after += sum(parse_action(text).format_ok for text in new)
    assert (turns, before, after) == (320, 318, 320)


@needs_data
def test_the_tokens_of_the_real_sft_files_are_those_expected_with_our_system_prompt():
    name = "sft/0000"
    clean = cleaned(real_row(name), system_prompt="full")[1]
    released = {"role": "system", "content": real(name)["messages"][0]["content"]}
    encoded = qwen().encode_messages([released, *clean["messages"][1:]])
    assert len(encoded.ids) == expected()[f"{name}.json"]["tokens"]


def released_signature(content):
    """Their signature: sorted set of stripped queries or urls, no goal; every call registers,
    whatever became of it.
    """
    action = parse_action(content)
    strings = action.arguments["query" if action.kind == "search" else "url"]
    return action.kind, tuple(sorted({text.strip() for text in strings}))


@needs_data
def test_the_ten_real_rollouts_have_fewer_duplicates_than_by_the_released_signature():
    """12 by theirs. A retry after a failed call is none; a search that differs in
    case only is one.
    """
    theirs, ours, turns = {}, {}, 0
    for number in range(10):
        name = f"rl/{number:04d}"
        account, _ = cleaned(real_row(name))
        seen, theirs[number] = set(), []
        for index, content in enumerate(turns_of(real(name))[:-1]):
            theirs[number] += [index] if released_signature(content) in seen else []
            seen.add(released_signature(content))
        assert all(gone["reason"] == "duplicate" for gone in account.removed)
        ours[number] = [gone["turn"] for gone in account.removed]
        turns += account.counts["turns/read"]
    assert turns == 691 and [len(gone) for gone in theirs.values()] == [
        1,
        1,
        0,
        2,
        1,
        1,
        2,
        1,
        1,
        2,
    ]
    assert ours == {
        0: [],
        1: [27],
        2: [],
        3: [40, 70],
        4: [44],
        5: [45],
        6: [61, 74, 75],
        7: [],
        8: [56],
        9: [53, 82],
    }
    case_only = {6: 61}
    assert all(
        index in theirs[number]
        for number, gone in ours.items()
        for index in gone
        if case_only.get(number) != index
    )


@needs_data
def test_the_timed_out_visit_of_rollout_0000_keeps_its_successful_retry():
    """Dedup that ignores the observation kept the time-out and deleted the page."""
    row, clean = real("rl/0000"), cleaned(real_row("rl/0000"))[1]
    contents = [message["content"] for message in row["messages"]]
    kept = [message["content"] for message in clean["messages"]]
    failed = next(
        k
        for k, text in enumerate(contents)
        if (split_observation(text) or [""])[0].strip() == TIMEOUT
    )
    urls = parse_action(contents[failed - 1]).arguments["url"]
    retries = [
        k
        for k in range(failed + 1, len(contents), 2)
        if (parse_action(contents[k]).arguments or {}).get("url") == urls
    ]
    assert (
        len(retries) == 1
        and contents[retries[0]] in kept
        and contents[retries[0] + 1] in kept
        and contents[failed] in kept
    )


@needs_data
@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_cleaning_the_clean_real_files_changes_nothing(kind):
    for number in range(10):
        account, clean = cleaned(real_row(f"{kind}/{number:04d}"))
        again = clean_row(config(), "row", clean)
        assert again.lines == account.lines and again.removed == []


def test_the_data_directory_is_the_one_the_counts_are_of():
    assert not DATA.is_dir() or len(list((DATA / "trajectories").glob("*/*.json"))) == 20


# Random rows

TEXT = st.text("ab<>/\n \ud800\"{}[]'.", max_size=12)
PIECE = st.sampled_from(
    [
        *SPECIAL_TOKENS,
        "<answer>",
        "</answer>",
        "<summary>",
        "</summary>",
        "t",
        "Bo",
        '{"name": "search", "arguments": {"query": ["a"]}}',
        '{"name": "visit", "arguments": {"urls": "u", "goal": ["g"]}}',
        '{"name": "PythonInterpreter", "arguments": {}}<code>1</code>',
        '{"name": "\\ud800", "arguments": {}}',
        "\n=======\n",
        "A Google search for 'a' found 2 results:\n",
        "1. [a](b)",
        "The limit is reached, answer",
    ]
)
NOISE = st.lists(PIECE | TEXT, max_size=9).map("".join)
QUERY = st.sampled_from(["a", "A ", "b", '["a", "b"]'])
TURN = st.one_of(
    st.builds(call, query=st.lists(QUERY, min_size=1, max_size=2)),
    st.builds(call, think=NOISE),
    st.builds(visit, url=st.sampled_from(["u", "u#x"])),
    st.just(PYTHON),
    NOISE.map(lambda text: assistant_text("t", text)),
    NOISE,
)
ANSWERED = st.one_of(
    st.sampled_from([HIT, PAGE, TIMEOUT, NO_PAGE]).map(observed),
    NOISE.map(observed),
    st.just(LIMIT),
    NOISE,
)
LAST = st.one_of(
    st.just(final()),
    st.builds(final, TEXT),
    NOISE.map(lambda text: final("Bo").replace("</answer>", text + "</answer>")),
    TURN,
)
DIALOGUE = st.tuples(st.lists(st.tuples(TURN, ANSWERED), max_size=5), LAST).map(
    lambda parts: conversation(*(x for pair in parts[0] for x in pair), parts[1])
)
ROLE = st.sampled_from(["user", "assistant", "system", "tool", "function", None])
MESSAGES = (
    st.lists(
        st.fixed_dictionaries({"role": ROLE, "content": TURN | ANSWERED | st.none()}) | st.none(),
        max_size=6,
    )
    | st.none()
)
ANSWER = st.none() | TEXT | st.lists(TEXT | st.integers(), max_size=2)
MORE = {
    "question": st.just(QUESTION) | TEXT,
    "gt": ANSWER,
    "meta": st.fixed_dictionaries({"question": st.just(QUESTION), "answer": ANSWER}),
    "copy": st.integers() | TEXT,
    "weight": TEXT,
    "answer": ANSWER,
}
ROW = st.one_of(
    st.fixed_dictionaries({"messages": DIALOGUE}),
    st.builds(
        lambda m, a: {"messages": m, "meta": {"question": QUESTION, "answer": a}}, DIALOGUE, ANSWER
    ),
    st.fixed_dictionaries({"messages": DIALOGUE | MESSAGES}, optional=MORE),
    st.binary(max_size=20) | TEXT | st.none() | st.lists(st.none(), max_size=1),
)
SETTINGS = st.sampled_from(
    [
        {},
        {},
        {"judge": "match"},
        {"disallowed": "drop-trajectory"},
        {"materialise": True, "copies": (2, 3, 4)},
        {"goal_in_signature": True},
    ]
)


@settings(max_examples=400)
@given(ROW, SETTINGS)
def test_random_rows_never_crash_never_pass_wrongly_and_are_accounted_for(row, options):
    account, clean = cleaned(row, **options)
    lost_rows = [gone for gone in account.removed if gone["lost"] == "row"]
    # kept + dropped = read
    assert account.counts["rows/read"] == 1 == (clean is not None) + len(lost_rows)
    assert (
        all(line.encode() for _, line in account.lines)
        and json.dumps(account.removed, ensure_ascii=False).encode()
    )
    if clean is None:
        return
    assert account.counts["turns/read"] == len(turns_of(clean)) + sum(
        gone["lost"] == "turn" for gone in account.removed
    )
    roles = [message["role"] for message in clean["messages"]]
    assert roles == ["system", *("user", "assistant") * (len(roles) // 2)]
    actions = [parse_action(text) for text in turns_of(clean)]
    assert all(action.format_ok for action in actions)
    assert [action.kind == "answer" for action in actions] == [False] * (len(actions) - 1) + [True]
    assert all(split_observation(message["content"]) for message in clean["messages"][3::2])
    again = clean_row(config(**options), "row", clean)
    if "copy" not in clean and options.get("materialise"):
        return
    # cleaning again changes nothing
    assert again.removed == [] and json.loads(again.lines[0][1]) == clean


def test_signatures_of_searches_and_visits_never_meet():
    class Step:
        action = parse_action(SEARCH)

    class Visit:
        action = parse_action(visit("a"))

    assert signature_of(Step, with_goal=False) != signature_of(Visit, with_goal=False)
