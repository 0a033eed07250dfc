"""The sampler against full forward passes and against the distribution it claims to draw from.
Shapes: R slots  V vocab.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from agent_fakes import tiny_model

from venus.model.weights import load_model
from venus.rollout.noise import SamplingParams, draw, noise_key, uniform_noise
from venus.rollout.sampler import Sampler

GOLDEN = Path(__file__).parents[1] / "golden"
STOP = 63
PROMPTS = [
    torch.randint(62, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (9, 1, 40, 23)
]


@pytest.fixture(scope="module")
def model():
    return tiny_model(64)


def new_sampler(model, num_slots=8, capacity=400, stop_ids=(STOP,), prefill_tokens=2048, **params):
    return Sampler(
        model,
        SamplingParams(stop_ids, **params),
        num_slots=num_slots,
        capacity=capacity,
        prefill_tokens=prefill_tokens,
    )


def finish(sampler):
    """Step until every fed row is done: {slot: Generation}."""
    done = {}
    while sampler.rows:
        done |= {generation.slot: generation for generation in sampler.step()}
    return done


def sample(sampler, prompt, budget=60, key=1):
    """Open a slot, feed it a prompt and finish it."""
    slot = sampler.open()
    sampler.feed(slot, prompt, budget=budget, key=key)
    return finish(sampler)[slot]


def trainer_log_probs(model, prompt, ids, temperature):
    """What token_log_probs says of the same tokens in one forward pass."""
    tokens = torch.tensor([[*prompt, *ids]])
    mask = torch.zeros_like(tokens[:, :-1])
    mask[:, len(prompt) - 1 :] = 1
    return model.token_log_probs(tokens[:, :-1], tokens[:, 1:], mask, temperature=temperature)[
        0, len(prompt) - 1 :
    ].tolist()


# Decoding against the model


@pytest.mark.parametrize("name", ["untied_tf4", "tied_tf5"])
def test_greedy_decoding_gives_the_golden_continuations(name):
    """Made once by transformers' generate: ids of a cached decode, from weights
    that someone else wrote.
    """
    model = load_model(GOLDEN / name).requires_grad_(False)
    for case in json.loads((GOLDEN / name / "greedy.json").read_text(encoding="utf-8"))["greedy"]:
        sampler = new_sampler(model, num_slots=3, stop_ids=(), temperature=0)
        assert (
            sample(sampler, case["prompt"], budget=len(case["continuation"])).ids
            == case["continuation"]
        )


def test_greedy_cached_decoding_equals_the_uncached_argmax(model):
    for prompt in PROMPTS:
        got = sample(new_sampler(model, temperature=0, stop_ids=()), prompt).ids
        ids = list(prompt)
        for _ in got:
            ids.append(int(model.logits(model(torch.tensor([ids]))[0, -1:]).argmax()))
        assert got == ids[len(prompt) :]


def test_each_token_is_drawn_with_the_noise_of_its_key_and_position(model):
    """A row by hand: full forward pass, softmax, the first token whose cumulative probability
    exceeds the uniform of (key, number of token).
    """
    for key, prompt in enumerate(PROMPTS):
        got = sample(new_sampler(model, stop_ids=()), prompt, budget=30, key=key).ids
        ids = list(prompt)
        for uniform in uniform_noise([key] * 30, range(30)):
            cumulative = (
                model.logits(model(torch.tensor([ids]))[0, -1:])[0].double().softmax(-1).cumsum(-1)
            )
            ids.append(int((cumulative <= uniform).sum()))
        assert got == ids[len(prompt) :]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 2.5, "top_p": 0.6},
        {"top_k": 5},
        {"top_k": 9, "top_p": 0.3},
    ],
)
def test_log_probs_are_those_the_trainer_recomputes(model, params):
    """Whatever top-p and top-k left out, the log-prob is that of the full temperature-scaled
    softmax (trap 18): 1e-5 in fp32.
    """
    for key, prompt in enumerate(PROMPTS):
        generation = sample(new_sampler(model, **params), prompt, key=key)
        wanted = trainer_log_probs(model, prompt, generation.ids, params.get("temperature", 1.0))
        np.testing.assert_allclose(generation.log_probs, wanted, rtol=0, atol=1e-5)


def test_greedy_log_probs_are_those_of_temperature_one(model):
    generation = sample(new_sampler(model, temperature=0), PROMPTS[0])
    np.testing.assert_allclose(
        generation.log_probs,
        trainer_log_probs(model, PROMPTS[0], generation.ids, 1.0),
        rtol=0,
        atol=1e-5,
    )


def test_turns_fed_one_after_another_equal_one_full_forward(model):
    """Prompt, 20 tokens, an observation of 7, 20 more tokens, and again: all log-probs equal those
    of one pass over the whole sequence.
    """
    sampler, context, sampled = new_sampler(model, stop_ids=()), list(PROMPTS[3]), []
    slot, new = sampler.open(), list(PROMPTS[3])
    for turn in range(3):
        sampler.feed(slot, new, budget=20, key=turn)
        generation = finish(sampler)[slot]
        sampled += [(len(context), generation)]
        context += generation.ids
        # the last sampled id goes first into the next feed
        assert sampler.length(slot) == len(context) - 1
        new = [context[-1], *PROMPTS[0][:7]]
        context += PROMPTS[0][:7]
    for start, generation in sampled:
        wanted = trainer_log_probs(model, context[:start], generation.ids, 1.0)
        np.testing.assert_allclose(generation.log_probs, wanted, rtol=0, atol=1e-5)


# Rows do not depend on each other


@pytest.fixture(scope="module")
def alone(model):
    return [sample(new_sampler(model), prompt, key=10 + k) for k, prompt in enumerate(PROMPTS)]


def assert_equal(generations, wanted):
    assert [generation.ids for generation in generations] == [
        generation.ids for generation in wanted
    ]
    for got, want in zip(generations, wanted, strict=True):
        np.testing.assert_allclose(got.log_probs, want.log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_a_row_has_the_same_ids_alone_and_with_three_mates(model, alone, order):
    sampler, slots = new_sampler(model), {}
    for k in order:
        slots[k] = sampler.open()
        sampler.feed(slots[k], PROMPTS[k], budget=60, key=10 + k)
    done = finish(sampler)
    assert_equal([done[slots[k]] for k in range(4)], alone)


def test_a_row_that_starts_late_has_the_same_ids(model, alone):
    """Rows come and go at their own pace; here one joins every 13 steps."""
    sampler, slots, done = new_sampler(model), {}, {}
    for k in range(4):
        slots[k] = sampler.open()
        sampler.feed(slots[k], PROMPTS[k], budget=60, key=10 + k)
        for _ in range(13):
            done |= {generation.slot: generation for generation in sampler.step()}
    done |= finish(sampler)
    assert_equal([done[slots[k]] for k in range(4)], alone)


@pytest.mark.parametrize("prefill_tokens", [1, 3, 17, 41])
def test_the_size_of_prefill_chunks_changes_nothing(model, alone, prefill_tokens):
    """Prompts of 9, 1, 40 and 23 tokens share the chunks; a prompt may be spread over many steps
    while others already decode.
    """
    sampler, slots = new_sampler(model, prefill_tokens=prefill_tokens), []
    for k, prompt in enumerate(PROMPTS):
        slots.append(sampler.open())
        sampler.feed(slots[k], prompt, budget=60, key=10 + k)
    done = finish(sampler)
    assert_equal([done[slot] for slot in slots], alone)


def test_an_idle_row_keeps_its_context_while_others_decode(model):
    """An idle slot runs a scratch token in every step; it must not enter the row
    that waits for its tool.
    """
    quiet, busy, turns = new_sampler(model, stop_ids=()), new_sampler(model, stop_ids=()), []
    for sampler in (quiet, busy):
        slot = sampler.open()
        sampler.feed(slot, PROMPTS[0], budget=20, key=1)
        first = finish(sampler)[slot]
        if sampler is busy:
            sample(sampler, PROMPTS[2], budget=90, key=5)
        sampler.feed(slot, [first.ids[-1], 3, 4, 5], budget=20, key=2)
        turns.append(finish(sampler)[slot])
    assert_equal(turns[1:], turns[:1])


def test_an_interrupted_row_goes_on_with_the_same_ids(model):
    """A new sampler is given prompt, first turn and observation at once, as after a crash: the
    second turn has the ids of the first run.
    """
    sampler = new_sampler(model, stop_ids=())
    slot = sampler.open()
    sampler.feed(slot, PROMPTS[0], budget=20, key=1)
    first = finish(sampler)[slot]
    sampler.feed(slot, [first.ids[-1], 3, 4, 5], budget=20, key=2)
    resumed = sample(
        new_sampler(model, stop_ids=()), [*PROMPTS[0], *first.ids, 3, 4, 5], budget=20, key=2
    )
    assert_equal([resumed], [finish(sampler)[slot]])


def test_forked_rows_have_the_ids_of_unforked_ones_and_the_prompt_runs_once(model):
    sampler, slots = new_sampler(model), [0]
    assert sampler.open() == 0
    sampler.prefill(0, PROMPTS[2][:-1])
    slots += [sampler.fork(0, len(PROMPTS[2]) - 1) for _ in range(3)]
    for key, slot in enumerate(slots):
        sampler.feed(slot, PROMPTS[2][-1:], budget=60, key=key)
    done = finish(sampler)
    assert sampler.num_prefilled == len(PROMPTS[2]) - 1
    assert_equal(
        [done[slot] for slot in slots],
        [sample(new_sampler(model), PROMPTS[2], key=key) for key in range(4)],
    )


def test_a_long_prompt_can_be_forked(model):
    """The cache starts at 256 positions. Once grown inside inference mode its buffers are inference
    tensors, and `fork`, which ran outside, was refused the copy: every group whose context had
    passed 256 tokens died.
    """
    prompt = (PROMPTS[2] * 8)[:300]
    sampler = new_sampler(model)
    sampler.prefill(sampler.open(), prompt[:-1])
    slot = sampler.fork(0, 299)
    sampler.feed(slot, prompt[-1:], budget=20, key=1)
    assert_equal([finish(sampler)[slot]], [sample(new_sampler(model), prompt, budget=20, key=1)])


def test_a_source_that_went_on_can_still_be_forked_at_its_prompt(model):
    sampler = new_sampler(model)
    slot = sampler.open()
    sampler.feed(slot, PROMPTS[3], budget=30, key=8)
    finish(sampler)
    fork = sampler.fork(slot, len(PROMPTS[3]) - 1)
    sampler.feed(fork, PROMPTS[3][-1:], budget=60, key=9)
    assert_equal([finish(sampler)[fork]], [sample(new_sampler(model), PROMPTS[3], key=9)])


def test_a_closed_slot_forgets_its_row(model):
    sampler = new_sampler(model, num_slots=1, capacity=100)
    sample(sampler, PROMPTS[2], key=4)
    sampler.close(0)
    assert_equal(
        [sample(sampler, PROMPTS[0], key=10)],
        [sample(new_sampler(model, num_slots=1), PROMPTS[0], key=10)],
    )


# Ends


def test_the_budget_ends_a_row(model):
    generation = sample(new_sampler(model, stop_ids=()), PROMPTS[0], budget=7)
    assert (
        len(generation.ids),
        len(generation.log_probs),
        len(generation.kept_mass),
        generation.stopped,
    ) == (7, 7, 7, False)


def test_each_stop_id_ends_a_row_and_is_kept(model):
    """The ids before are those without a stop id: 60 tokens, cut behind the first of either."""
    free = sample(new_sampler(model, stop_ids=()), PROMPTS[0]).ids
    for stops in ([free[20]], [free[40]], [free[5], free[30]]):
        end = min(free.index(stop) for stop in stops) + 1
        generation = sample(new_sampler(model, stop_ids=tuple(stops)), PROMPTS[0])
        assert (generation.ids, generation.stopped) == (free[:end], True)


def test_a_stop_id_at_the_end_of_the_budget_counts_as_stopped(model):
    free = sample(new_sampler(model, stop_ids=()), PROMPTS[0]).ids
    end = free.index(free[20]) + 1
    assert sample(new_sampler(model, stop_ids=(free[20],)), PROMPTS[0], budget=end).stopped


def test_a_row_fills_the_context_to_its_last_position(model):
    """9 prompt tokens and 31 sampled ones fit a context of 40: the last sampled id is never run."""
    sampler = new_sampler(model, capacity=39, stop_ids=())
    wanted = sample(new_sampler(model, stop_ids=()), PROMPTS[0], budget=31, key=3)
    assert_equal([sample(sampler, PROMPTS[0], budget=31, key=3)], [wanted])
    assert sampler.length(0) == 39


def test_more_than_the_context_is_refused_with_the_figures(model):
    sampler = new_sampler(model, capacity=39)
    with pytest.raises(
        ValueError, match="0 cached .* 9 new ids .* 32 to sample exceed the context of 39"
    ):
        sampler.feed(sampler.open(), PROMPTS[0], budget=32, key=3)


@pytest.mark.parametrize(
    "params", [{"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.01}, {"top_k": -1}]
)
def test_sampling_parameters_out_of_range_are_refused(params):
    with pytest.raises(ValueError, match=f"{next(iter(params))} {next(iter(params.values()))}"):
        SamplingParams((1,), **params)


# The draw


def draw_many(probs, count, **params):
    """Draw `count` times from log(probs) with the noise of one key: (ids, log-probs,
    kept mass) as arrays.
    """
    uniforms = torch.from_numpy(uniform_noise([noise_key("draw")] * count, range(count)))
    logits = torch.tensor(probs).log().expand(count, -1)
    ids, log_probs, kept_mass = draw(logits, uniforms, SamplingParams((), **params))
    return ids.long().numpy(), log_probs.numpy(), kept_mass.numpy()


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_the_full_log_probs():
    """Trap 18: top-p .8 over [.6, .3, .1] keeps .9; the log-prob stays log .6, not log .6/.9,
    which is .105361 higher.
    """
    ids, log_probs, kept_mass = draw_many([0.6, 0.3, 0.1], 2000, top_p=0.8)
    assert set(ids) == {0, 1}
    np.testing.assert_allclose(kept_mass, 0.9, rtol=0, atol=1e-6)
    np.testing.assert_allclose(log_probs, np.log([0.6, 0.3])[ids], rtol=0, atol=1e-6)
    assert math.log(1 / 0.9) == pytest.approx(0.105361, abs=1e-6)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0.05, 0.4, 0.1, 0.3, 0.15]),
        ({"top_k": 2}, [0, 0.4, 0, 0.3, 0]),
        ({"top_k": 99}, [0.05, 0.4, 0.1, 0.3, 0.15]),
        ({"top_p": 0.39}, [0, 0.4, 0, 0, 0]),
        ({"top_p": 0.45}, [0, 0.4, 0, 0.3, 0]),
        ({"top_p": 0.86}, [0, 0.4, 0.1, 0.3, 0.15]),
        ({"top_p": 1e-9}, [0, 0.4, 0, 0, 0]),
        # of the .85 that top-k left, .68 is to be reached
        ({"top_k": 3, "top_p": 0.8}, [0, 0.4, 0, 0.3, 0]),
        ({"temperature": 0.5}, [0.0025, 0.16, 0.01, 0.09, 0.0225]),
        ({"temperature": 0.5, "top_k": 2}, [0, 0.16, 0, 0.09, 0]),
    ],
)
def test_sampled_frequencies_match_the_kept_probabilities(params, kept):
    """Chi-square over 20,000 seeded draws, threshold 24: exceeded by chance once in 10,000 (4
    degrees of freedom); nothing else is drawn.
    """
    ids, _, kept_mass = draw_many([0.05, 0.4, 0.1, 0.3, 0.15], 20_000, **params)
    full = sum(p ** (1 / params.get("temperature", 1.0)) for p in [0.05, 0.4, 0.1, 0.3, 0.15])
    np.testing.assert_allclose(kept_mass, sum(kept) / full, rtol=0, atol=1e-6)
    counts, expected = np.bincount(ids, minlength=5), 20_000 * np.array(kept) / sum(kept)
    assert not counts[expected == 0].any()
    assert ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum() < 24


def test_equally_probable_tokens_are_cut_in_vocabulary_order():
    ids, _, kept_mass = draw_many([0.25] * 4, 500, top_k=2)
    assert set(ids) == {0, 1}
    np.testing.assert_allclose(kept_mass, 0.5, rtol=0, atol=1e-6)


def test_no_uniform_draws_a_token_of_probability_zero():
    """The ends of [0, 1) at tokens that top-k removed on either side."""
    uniforms = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    logits = torch.tensor([0.1, 0.4, 0.3, 0.15, 0.05]).log().expand(2, -1)
    for params, ends in (({"top_k": 2}, [1, 2]), ({"top_k": 3}, [1, 3]), ({}, [0, 4])):
        assert draw(logits, uniforms, SamplingParams((), **params))[0].tolist() == ends


def test_a_vocabulary_of_qwen_size_is_drawn_to_the_last_token():
    """A flat distribution over 151,936 tokens: half of the mass lies before the middle one, and the
    largest uniform draws the last.
    """
    logits = torch.zeros(2, 151_936)
    uniforms = torch.tensor([0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(logits, uniforms, SamplingParams(()))[0].tolist() == [75_968, 151_935]


# The noise


def test_noise_is_splitmix64():
    """The published first outputs of splitmix64 with seed 0, whose n-th state is n
    times the golden ratio.
    """
    outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert uniform_noise([0, 0, 0], [0, 1, 2]).tolist() == [(x >> 11) / 2**53 for x in outputs]


def test_noise_keys_are_the_same_in_every_process_and_machine():
    """Pinned, since Python's own hash() differs from process to process: a resumed run must
    find its noise again.
    """
    assert noise_key(0, "test-003-2hop-004", 2, 1) == 14392596360041222329
    assert (
        len(
            {
                noise_key(seed, q, s, t)
                for seed in range(3)
                for q in ("1", "11", 1)
                for s in range(3)
                for t in range(3)
            }
        )
        == 81
    )


def test_noise_is_uniform_along_positions_and_along_keys():
    """Kolmogorov-Smirnov: sqrt(n) D stays below 1.95 (exceeded by chance once in 1,000; the draws
    are fixed). Neighbours are uncorrelated.
    """
    count = 20_000
    along_positions = uniform_noise([noise_key(0, "q", 0, 0)] * count, range(count))
    along_keys = uniform_noise(
        [noise_key(0, "q", sample, 0) for sample in range(count)], [0] * count
    )
    for uniforms in (along_positions, along_keys):
        ordered, grid = np.sort(uniforms), np.arange(count + 1) / count
        distance = max((grid[1:] - ordered).max(), (ordered - grid[:-1]).max())
        assert math.sqrt(count) * distance < 1.95
        assert abs(np.corrcoef(uniforms[1:], uniforms[:-1])[0, 1]) < 4 / math.sqrt(count)
