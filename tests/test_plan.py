"""The formulas of --dry-run at Qwen3-4B's size, against figures worked out by hand.

Qwen3-4B: 4,022,468,096 parameters, 36 layers, hidden 2560, 8 kv heads of 128.
"""

import pytest

from venus.plan import kv_bytes, readable_bytes, training_bytes, training_flops

SIZE = {"parameters": 4_022_468_096, "layers": 36, "hidden": 2560}


@pytest.mark.parametrize(("world_size", "gigabytes"), [(1, 64.4), (2, 32.2), (4, 16.1), (8, 8.0)])
def test_masters_gradients_and_moments_are_16_bytes_a_parameter_over_the_ranks(world_size, gigabytes):
    items = training_bytes(**SIZE, world_size=world_size, tokens=1, reference=False, bf16=True)
    assert items["weights, gradients, AdamW"] / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(("bf16", "gigabytes"), [(True, 8.0), (False, 16.1)])
def test_a_reference_is_one_more_copy_of_the_weights_and_none_without_one(bf16, gigabytes):
    items = training_bytes(**SIZE, world_size=1, tokens=1, reference=True, bf16=bf16)
    assert items["reference model"] / 1e9 == pytest.approx(gigabytes, abs=0.05)
    assert training_bytes(**SIZE, world_size=1, tokens=1, reference=False, bf16=bf16)["reference model"] == 0


def test_activations_are_167_kib_a_token_and_layer_at_hidden_2560_in_bf16():
    """32,768 tokens: 5.6 GB for one layer, 36 of them without checkpointing; fp32 is twice that, half the hidden size half."""
    one = {"world_size": 1, "tokens": 32_768, "reference": False}
    bf16 = training_bytes(**SIZE, **one, bf16=True)["activations"]
    assert bf16 / 36 / 1e9 == pytest.approx(5.6, abs=0.05)
    assert training_bytes(**SIZE, **one, bf16=False)["activations"] == 2 * bf16
    assert training_bytes(**{**SIZE, "hidden": 1280}, **one, bf16=True)["activations"] == bf16 // 2


def test_a_cached_token_of_qwen3_4b_takes_147456_bytes():
    assert kv_bytes(layers=36, kv_heads=8, head_dim=128, tokens=1, bf16=True) == 147_456
    assert kv_bytes(layers=36, kv_heads=8, head_dim=128, tokens=3, bf16=False) == 6 * 147_456


def test_training_takes_six_flops_a_parameter_and_token():
    assert training_flops(parameters=4_000_000_000, tokens=1000) == 2.4e13


@pytest.mark.parametrize(("count", "text"), [(0, "0.0 B"), (1023, "1023.0 B"), (1536, "1.5 KiB"), (3 * 2**20, "3.0 MiB"), (5 * 2**42, "20480.0 GiB")])
def test_bytes_are_shown_in_the_largest_unit_that_fits(count, text):
    assert readable_bytes(count) == text
