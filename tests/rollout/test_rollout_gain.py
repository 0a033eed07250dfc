"""Information gain scored while the rollout runs against the packed scoring of the finished
trajectory; the straggler policy.
"""

import copy
import threading

import pytest
from agent_fakes import (
    LIMITS,
    SEED,
    FakeTool,
    answer,
    fake_tools,
    question,
    scripted_agent,
    search,
    tiny_model,
    tiny_tokenizer,
    visit,
)
from tiny_runs import tiny_world

from venus.curation.formats import load_rows
from venus.rl.info_gain import GainRule, score_turns
from venus.rollout.agent import Agent, Job, Limits
from venus.rollout.noise import SamplingParams, noise_key
from venus.rollout.sampler import Sampler
from venus.tokenizer import ChatTokenizer
from venus.tools.base import ToolResult
from venus.tools.offline import offline_tools
from venus.trajectory import Question, read_questions

ALIASES = ("x", "an x of another name", "y")
SCRIPTS = {
    ("q0", 0): [search("a"), visit("gone"), visit("u"), answer()],
    ("q0", 1): [
        visit("slow"),
        "<think>\nno action</think>",
        visit("u"),
        visit("u"),
        search("b"),
        answer(),
    ],
    ("q0", 2): [answer()],
    ("q1", 0): [visit("u"), visit("blank"), "not a turn", answer()],
    ("q1", 1): [search("a"), answer()],
}


class ForcedSampler(Sampler):
    """The real sampler, whose draws are replaced by prepared ids: scripts[noise key
    of a turn] = its ids.
    """

    def __init__(self, scripts, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scripts = scripts

    def _read(self, logits_NV, drawing, answers):
        drawn, values = super()._read(logits_NV, drawing, answers)
        drawn[0] = [self.scripts[row.key][len(row.generation.ids)] for row in drawing]
        return drawn, values


def forced_agent(model, tokenizer, turns, tools, rule, *, limits=LIMITS, seed=SEED, **options):
    """An agent whose rows play turns[question id, sample], ids of each turn, over a real cache."""
    scripts = {
        noise_key(seed, *key, number): ids
        for key, rows in turns.items()
        for number, ids in enumerate(rows)
    }
    params = SamplingParams((tokenizer.im_end_id, tokenizer.endoftext_id))
    sampler = ForcedSampler(scripts, model, params, capacity=limits.max_context, **options)
    return Agent(
        sampler, tokenizer, tools, limits, system="sys", run="r", seed=seed, manifest={}, gain=rule
    )


def assert_gains_are_packed_ones(model, tokenizer, trajectories, rule):
    """Where nothing is scored, both say None; where something is, they agree to
    the rounding of fp32.
    """
    packed = copy.deepcopy(trajectories)
    score_turns(model, tokenizer, packed, rule)
    got, wanted = (
        [[turn.info_gain for turn in trajectory.turns] for trajectory in side]
        for side in (trajectories, packed)
    )
    assert any(gain is not None for gains in wanted for gain in gains)
    for gains, wanted_gains in zip(got, wanted, strict=True):
        assert gains == pytest.approx(wanted_gains, abs=1e-5)


@pytest.mark.parametrize(
    "rule",
    [
        GainRule("visit", "log_prob", "first"),
        GainRule("all", "prob", "first"),
        GainRule("visit", "log_prob", "max"),
        GainRule("all", "log_prob", "max"),
    ],
)
@pytest.mark.parametrize(
    "options",
    [{"num_slots": 2}, {"num_slots": 2, "num_rows": 4, "kv_tokens": 2000, "prefill_tokens": 64}],
)
def test_gain_scored_in_the_rollout_equals_packed_gain(tmp_path, rule, options):
    """Visits that found something, nothing, failed or timed out, a duplicate, a malformed turn,
    groups of unequal samples.
    """
    tokenizer = tiny_tokenizer(tmp_path)
    model, end = tiny_model(tokenizer.vocab_size), [tokenizer.im_end_id]
    turns = {
        key: [tokenizer.encode(text.removeprefix("<think>\n")) + end for text in texts]
        for key, texts in SCRIPTS.items()
    }
    results = {
        "gone": ToolResult("the page is gone", "error"),
        "slow": ToolResult("timed out", "timeout"),
        "blank": ToolResult("nothing", "empty"),
    }
    limits = Limits(max_turns=6, max_turn_tokens=120, max_observation_tokens=100, max_context=1900)
    agent = forced_agent(
        model, tokenizer, turns, fake_tools(visit=results), rule, limits=limits, **options
    )
    jobs = [Job(Question(name, "Who?", ALIASES), sample) for name, sample in SCRIPTS]
    trajectories = list(agent.run(jobs))
    assert sorted((t.question_id, t.sample) for t in trajectories) == sorted(SCRIPTS)
    assert_gains_are_packed_ones(model, tokenizer, trajectories, rule)


def test_gain_scored_in_the_rollout_equals_packed_gain_on_the_world(tmp_path_factory):
    """The experts' turns over the world's own pages."""
    world = tiny_world(tmp_path_factory)
    tokenizer = ChatTokenizer(world / "model")
    model = tiny_model(tokenizer.vocab_size)
    rows = load_rows(world / "sft" / "few.jsonl")
    questions = read_questions(world / "questions" / "few.jsonl")
    turns = {
        (question.id, 0): [
            tokenizer.turn_ids(message["content"])
            for message in row["messages"]
            if message["role"] == "assistant"
        ]
        for question, row in zip(questions, rows, strict=True)
    }
    limits = Limits(max_turns=6, max_turn_tokens=120, max_observation_tokens=300, max_context=2000)
    rule = GainRule("visit", "log_prob", "first")
    agent = forced_agent(model, tokenizer, turns, offline_tools(), rule, limits=limits, num_slots=4)
    trajectories = list(agent.run([Job(question, 0) for question in questions]))
    assert all(trajectory.prediction in trajectory.ground_truth for trajectory in trajectories)
    assert_gains_are_packed_ones(model, tokenizer, trajectories, rule)


def test_a_group_scores_its_question_once(tmp_path):
    """Four samples that answer at once: nothing is scored but the value at the question,
    by the first of them.
    """
    tokenizer = tiny_tokenizer(tmp_path)
    model, end = tiny_model(tokenizer.vocab_size), [tokenizer.im_end_id]
    turns = {
        ("q", sample): [tokenizer.encode(answer().removeprefix("<think>\n")) + end]
        for sample in range(4)
    }
    limits = Limits(max_turns=2, max_turn_tokens=120, max_observation_tokens=100, max_context=1200)
    agent = forced_agent(
        model,
        tokenizer,
        turns,
        fake_tools(),
        GainRule("visit", "log_prob", "first"),
        limits=limits,
        num_slots=4,
    )
    list(agent.run([Job(question(), sample) for sample in range(4)]))
    assert (
        agent.sampler.num_scored
        == len(tokenizer.answer_prefix_ids) + len(tokenizer.ground_truth_ids("x")) - 1
    )


def test_a_ground_truth_longer_than_a_turn_is_refused_before_anything_runs(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path)
    agent = forced_agent(
        tiny_model(tokenizer.vocab_size),
        tokenizer,
        {},
        fake_tools(),
        GainRule("visit", "log_prob", "first"),
        num_slots=1,
    )
    job = Job(Question("q", "Who?", ("x " * 500,)), 0)
    with pytest.raises(
        ValueError,
        match="question q: scoring its ground truth takes .* tokens, and --max-turn-tokens leaves "
        "room for 400",
    ):
        agent.run([job])


# Stragglers


@pytest.fixture
def hanging():
    """A search tool whose call "hang" waits until the test is over."""
    release = threading.Event()
    yield {
        "search": FakeTool(
            "search", {"hang": lambda _: (release.wait(60), ToolResult("late", "ok"))[1]}
        ),
        "visit": FakeTool("visit"),
    }
    release.set()


def some_agent(tmp_path, hanging, num_hanging, num_jobs=10, **options):
    scripts = {
        ("q", n): [search("hang" if n < num_hanging else f"a{n}"), answer()]
        for n in range(num_jobs)
    }
    agent = scripted_agent(tiny_tokenizer(tmp_path), scripts, tools=hanging, **options)
    agent.limits = agent.limits.replace(cut_off_share=0.2)
    return agent, [Job(question(), n) for n in range(num_jobs)]


def test_the_last_share_of_the_rollouts_is_given_up(tmp_path, hanging):
    """Of ten rollouts two hang in their tools: the other eight count, these are stragglers, which
    leave statistics and loss.
    """
    agent, jobs = some_agent(tmp_path, hanging, 2)
    trajectories = list(agent.run(jobs))
    assert len(trajectories) == 10
    late = {
        t.sample: (t.stop_reason, t.outcome.status, t.kept, len(t.turns))
        for t in trajectories
        if t.stop_reason != "answered"
    }
    assert late == {0: ("straggler", "cut_off", False, 1), 1: ("straggler", "cut_off", False, 1)}


def test_rollouts_that_have_not_begun_are_given_up_without_a_turn(tmp_path, hanging):
    agent, jobs = some_agent(tmp_path, hanging, 0, num_jobs=4, num_slots=1)
    agent.limits = agent.limits.replace(cut_off_share=0.5)
    trajectories = list(agent.run(jobs))
    assert [(t.sample, t.stop_reason, len(t.turns)) for t in trajectories] == [
        (0, "answered", 2),
        (1, "answered", 2),
        (2, "straggler", 0),
        (3, "straggler", 0),
    ]


def test_rollouts_finished_before_count_for_the_share(tmp_path, hanging):
    """A resumed step: eight of ten were done, so the two that are left are given up at once, as the
    first process would have done.
    """
    agent, jobs = some_agent(tmp_path, hanging, 2)
    assert [t.stop_reason for t in agent.run(jobs[:2], num_done=8)] == ["straggler"] * 2
