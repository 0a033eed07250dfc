"""Stand-ins around the agent: a sampler that plays prepared turns, tools that count their calls, a
tiny model. Also run by child processes.
"""

import dataclasses
import itertools
import os
import signal
from pathlib import Path

from chat_samples import tiny_file, tiny_spec

from venus.model.qwen3 import Qwen3, Qwen3Config
from venus.protocol import assistant_text, format_answer, format_tool_call
from venus.rollout.agent import Agent, Job, Limits
from venus.rollout.noise import noise_key
from venus.rollout.sampler import Generation, Sampler, SamplingParams
from venus.tokenizer import ChatTokenizer
from venus.tools.base import ToolResult
from venus.trajectory import Question

SEED = 7
LIMITS = Limits(max_turns=6, max_turn_tokens=400, max_observation_tokens=300, max_context=8000)


def tiny_tokenizer(directory):
    Path(directory).mkdir(parents=True, exist_ok=True)
    return ChatTokenizer(tiny_file(Path(directory), tiny_spec()))


def question(name="q", text="Who?", corpus=None):
    return Question(name, text, ("x",), corpus)


def search(*queries, think="look"):
    return assistant_text(think, format_tool_call("search", {"query": list(queries)}))


def visit(*urls, goal="it", think="read"):
    return assistant_text(think, format_tool_call("visit", {"url": list(urls), "goal": goal}))


def answer(text="x", think="done"):
    return assistant_text(think, format_answer(text))


class ScriptedSampler:
    """The Sampler's interface over prepared turns: scripts[question id, sample] lists
    the ids of its turns.

    A turn is found by its noise key, so a key other than (seed, question, sample, turn) is a
    KeyError. Log-probs are -1/64, -2/64, ... over the script, exact floats. `contexts` keeps what
    each row held when it was closed, `feeds` the (slot, budget) of every feed.
    """

    def __init__(self, scripts, tokenizer, *, num_slots=4, capacity=8000, seed=SEED):
        self.stop_ids, self.capacity = (tokenizer.im_end_id, tokenizer.endoftext_id), capacity
        self.turns, self.first = {}, {}
        for (name, sample), turns in scripts.items():
            counts = itertools.accumulate(map(len, turns), initial=0)
            for number, (ids, first) in enumerate(zip(turns, counts, strict=False)):
                self.turns[noise_key(seed, name, sample, number)] = (ids, first)
        self.free, self.rows, self.context = list(range(num_slots)), {}, {}
        self.contexts, self.feeds, self.num_prefilled = [], [], 0

    def open(self):
        slot = self.free.pop(0)
        self.context[slot] = []
        return slot

    def fork(self, source, length):
        slot = self.open()
        assert length <= len(self.context[source])
        self.context[slot] = self.context[source][:length]
        return slot

    def prefill(self, slot, ids):
        self.context[slot] += ids
        self.num_prefilled += len(ids)

    def close(self, slot):
        assert slot not in self.rows
        self.contexts.append(self.context.pop(slot))
        self.free = sorted([*self.free, slot])

    def feed(self, slot, ids, *, budget, key):
        assert slot not in self.rows and ids
        held = self.context[slot]
        if len(held) + len(ids) + budget - 1 > self.capacity:
            raise ValueError(f"{len(held)} + {len(ids)} + {budget} exceed the context")
        held += ids
        self.rows[slot] = (*self.turns[key], budget)
        self.feeds.append((slot, budget))

    def step(self):
        finished = []
        for slot, (ids, first, budget) in self.rows.items():
            ids = ids[:budget]
            stopped = ids[-1] in self.stop_ids
            assert stopped or len(ids) == budget, (
                f"a turn of {len(ids)} ids neither stops nor fills its budget of {budget}"
            )
            self.context[slot] += ids[:-1]  # the last one is run with the next feed
            log_probs = [-(first + k + 1) / 64 for k in range(len(ids))]
            finished.append(Generation(slot, list(ids), log_probs, [1.0] * len(ids), stopped))
        self.rows.clear()
        return finished


class FakeTool:
    """Returns results[first string of the call] (a ToolResult, or an exception to raise), else
    "found <string>"; records its calls.

    A list of results is used up one by one.
    """

    def __init__(self, name, results=None):
        self.name, self.results, self.calls = name, dict(results or {}), []

    def __call__(self, arguments, *, corpus, deadline):
        string = (arguments.get("query") or arguments.get("url"))[0]
        self.calls.append((arguments, corpus, deadline))
        result = self.results.get(string, ToolResult(f"found {string}", "ok"))
        if isinstance(result, list):
            result = result.pop(0)
        if isinstance(result, Exception):
            raise result
        return result(string) if callable(result) else result


def fake_tools(**results):
    return {name: FakeTool(name, results.get(name)) for name in ("search", "visit")}


def scripted_agent(
    tokenizer,
    scripts,
    *,
    tools=None,
    limits=LIMITS,
    num_slots=4,
    run="r",
    seed=SEED,
    manifest=None,
    **changes,
):
    """An agent over scripts[question id, sample] = turns, each ids as sampled or the text that is
    sampled, <think> and newline left out.
    """
    limits = dataclasses.replace(limits, **changes)
    end = [tokenizer.im_end_id]
    ids = {
        key: [
            tokenizer.encode(turn.removeprefix("<think>\n")) + end
            if isinstance(turn, str)
            else turn
            for turn in turns
        ]
        for key, turns in scripts.items()
    }
    sampler = ScriptedSampler(
        ids, tokenizer, num_slots=num_slots, capacity=limits.max_context, seed=seed
    )
    return Agent(
        sampler,
        tokenizer,
        tools or fake_tools(),
        limits,
        system="sys",
        run=run,
        seed=seed,
        manifest=manifest or {"made": "by hand"},
    )


def play(tokenizer, turns, **options):
    """The one trajectory of one scripted rollout."""
    agent = scripted_agent(tokenizer, {("q", 0): turns}, **options)
    [trajectory] = agent.run([Job(question(), 0)])
    # what the model saw is what is recorded
    assert agent.sampler.contexts == [trajectory.token_ids[:-1]]
    return trajectory


def tiny_model(vocab_size, seed=0):
    """Two layers, grouped heads, sharper than at the start so that its distributions are
    neither flat nor certain.
    """
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = Qwen3(config)
    model.init_weights(seed)
    model.lm_head.weight.data *= 3
    return model.requires_grad_(False)


def model_agent(tokenizer, model, tools, *, num_slots=8, run="r", seed=SEED, temperature=1.0):
    """An agent over a real sampler with small limits."""
    limits = Limits(max_turns=3, max_turn_tokens=24, max_observation_tokens=64, max_context=1200)
    stop_ids = (tokenizer.im_end_id, tokenizer.endoftext_id)
    params = SamplingParams(stop_ids, temperature=temperature)
    sampler = Sampler(model, params, num_slots=num_slots, capacity=limits.max_context)
    return Agent(
        sampler,
        tokenizer,
        tools,
        limits,
        system="sys",
        run=run,
        seed=seed,
        manifest={"made": "by a model"},
    )


SCRIPTS = {
    (f"q{n}", sample): [search(f"a{n}{sample}"), visit(f"u{n}"), answer(f"{n}")]
    for n in range(3)
    for sample in range(2)
}
JOBS = [Job(question(f"q{n}"), sample) for n in range(3) for sample in range(2)]


def collect_and_die(directory, calls):
    """Child process: collect JOBS into directory/t.jsonl and kill itself, without any warning, in
    the given tool call.
    """
    from venus.rollout.collect import collect

    count = itertools.count(1)

    def call(string):
        if next(count) == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return ToolResult(f"found {string}", "ok")

    tools = fake_tools(
        search={f"a{n}{sample}": call for n in range(3) for sample in range(2)},
        visit={f"u{n}": call for n in range(3)},
    )
    collect(
        scripted_agent(tiny_tokenizer(directory), SCRIPTS, tools=tools, num_slots=1),
        JOBS,
        Path(directory) / "t.jsonl",
        progress=None,
    )
