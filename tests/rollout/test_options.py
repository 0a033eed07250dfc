"""The flags of decoding: what they plan, what they make, and what they refuse."""

from dataclasses import replace

import pytest
from agent_fakes import tiny_model

from venus.model.qwen3 import Qwen3Config
from venus.rollout.noise import SamplingParams
from venus.rollout.options import DecodingOptions

QWEN3_4B = Qwen3Config(151936, 2560, 9728, 36, 32, 8, 128, 1e-6, 5e6, 262144, True)


def test_the_plan_of_a_pool_names_tokens_trajectories_and_hours():
    """By hand: 147,456 bytes a token, so 54 GB hold 366,210. Six rows of 60,000 fit; a step then
    reads 8.04 GB of weights and 53.1 GB of cache at 70 % of 3.35 TB/s, 26.1 ms. 16 trajectories of
    40,000 tokens are 40,000 * 16 / 6 steps: 0.77 hours.
    """
    options = DecodingOptions(slots=16, kv_memory=54.0, bandwidth=3.35)
    assert options.decoding_plan(QWEN3_4B, 128, 262_144, bf16=True, world_size=8) == [
        ("KV pool per GPU", "366,210 tokens, 50.3 GiB"),
        ("trajectories of 60,000 tokens at once", "6 of 16"),
        ("rollout hours", "0.77 for 16 trajectories of 40,000 sampled tokens per GPU, tools free"),
    ]


def test_twice_the_rollouts_take_twice_the_hours():
    options = DecodingOptions(slots=16, kv_tokens=366_210, bandwidth=3.35)
    assert options.decoding_plan(QWEN3_4B, 256, 262_144, bf16=True, world_size=8)[-1][1].startswith(
        "1.54 for 32 trajectories"
    )


def test_the_pool_of_a_gpu_is_what_its_memory_leaves():
    """`costs.kv_pool_tokens` at 80 GB with a sharded trainer beside it; no flag at all leaves the
    cache of all rows full.
    """
    how = {"bf16": True, "world_size": 8, "training": True, "reference": True}
    plan = dict(DecodingOptions(gpu_memory=80.0).decoding_plan(QWEN3_4B, 128, 262_144, **how))
    assert plan["KV pool per GPU"].startswith("376,")
    assert "rollout hours" not in plan
    assert DecodingOptions(slots=2).decoding_plan(QWEN3_4B, 128, 1000, bf16=True) == [
        ("KV cache, all rows full", "281.2 MiB")
    ]


def test_options_become_a_sampler():
    """Half a megabyte of the tiny model's 2 layers * 2 heads * 16 numbers * 2 * 4 bytes = 512 a
    token is 976 tokens.
    """
    model, params = tiny_model(64), SamplingParams(())
    sampler = DecodingOptions(slots=3, concurrent=5, kv_memory=0.0005).sampler(
        model, params, capacity=100
    )
    assert (
        sampler.num_slots,
        len(sampler.free),
        sampler.kv_tokens,
        sampler.choices["kv_cache"],
    ) == (3, 5, 976, "paged")
    assert (
        DecodingOptions(slots=3).sampler(model, params, capacity=100).choices["kv_cache"]
        == "contiguous"
    )
    with pytest.raises(ValueError, match="a KV pool of 96 tokens .* cannot hold one row of 100"):
        DecodingOptions(kv_tokens=96).sampler(model, params, capacity=100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 0}, "slots 0"),
        ({"concurrent": 15}, "concurrent 15: fewer than the 16 slots"),
        ({"kv_tokens": 0}, "kv_tokens 0"),
        ({"bandwidth": -1.0}, "bandwidth -1.0"),
        ({"kv_tokens": 9, "kv_memory": 1.0}, "kv_tokens and kv_memory"),
    ],
)
def test_options_that_make_no_sense_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        replace(DecodingOptions(), **change).validate()
