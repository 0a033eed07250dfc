"""Qwen3 against numbers that transformers computed, and its losses against written-out references.
Shapes: B rows  S sequence  N tokens.
"""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from loss_problems import LargestTensor
from safetensors.torch import load_file

from kernels import cross_entropy
from venus.model.attention import Layout
from venus.model.qwen3 import (
    ClippedPolicy,
    Qwen3,
    Qwen3Config,
    WeightedNLL,
    apply_rope,
    clipped_surrogate,
    k3_divergence,
    rope_cos_sin,
)
from venus.model.weights import load_model

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = ("tied_tf5", "untied_tf4")
FP32 = dict(rtol=0, atol=1e-5)  # sums of a few dozen terms of order 1


@pytest.fixture(scope="module", params=CASES)
def golden(request):
    """(model, expected tensors, greedy records) of one checkpoint."""
    directory = GOLDEN / request.param
    greedy = json.loads((directory / "greedy.json").read_text())["greedy"]
    return load_model(directory), load_file(directory / "expected.safetensors"), greedy


@pytest.fixture
def model():
    """Two layers, untied head, weights large enough that positions and norms matter."""
    return load_model(GOLDEN / "untied_tf4")


def batch(num_rows=3, length=11, seed=0):
    """ids, targets (already shifted) and a mask that keeps about half of the tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (num_rows, length + 1), generator=generator)
    mask = torch.rand(num_rows, length, generator=generator) < 0.5
    return tokens[:, :-1], tokens[:, 1:], mask


def reference_stats(model, ids, targets, mask, temperature=1.0):
    """log-probs and entropies from one full logits tensor, masked afterwards: what `token_stats`
    must not do and must equal.
    """
    log_softmax = (model(ids) @ model.lm_head.weight.T / temperature).log_softmax(-1)
    log_probs = log_softmax.gather(-1, targets[..., None])[..., 0]
    entropies = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_probs * mask, entropies * mask


def gradients(model, loss):
    return {
        name: g
        for (name, _), g in zip(
            model.named_parameters(),
            torch.autograd.grad(loss, list(model.parameters())),
            strict=True,
        )
    }


# Against transformers (tests/make_golden.py)


def test_logits_equal_transformers_near_the_start_and_the_end_of_the_context(golden):
    """fp32 max |difference| <= 1e-4 (1.3e-5 seen), in rows that start at positions 0 and
    32,757 and end at 262,143.

    RoPE is relative, so far positions change a logit only by the rounding of angles: equality there
    says it is transformers' rounding.
    """
    model, expected, _ = golden
    with torch.no_grad():
        logits = model.logits(model(expected["ids"], expected["positions"]).flatten(0, 1)).view_as(
            expected["logits"]
        )
    assert (logits - expected["logits"]).abs().max() <= 1e-4


def test_hidden_states_equal_transformers_after_every_layer(golden):
    """The first wrong layer is named; the last state is after the final norm."""
    model, expected, _ = golden
    states = []
    hooks = [
        model.model.embed_tokens.register_forward_hook(lambda module, args, out: states.append(out))
    ]
    hooks += [
        block.register_forward_hook(lambda module, args, out: states.append(out))
        for block in model.model.layers[:-1]
    ]
    with torch.no_grad():
        states.append(model(expected["ids"], expected["positions"]))
    for hook in hooks:
        hook.remove()
    for layer, (got, want) in enumerate(zip(states, expected["hidden_states"], strict=True)):
        assert (got - want).abs().max() <= 1e-4, f"state {layer}"


def test_greedy_continuations_equal_generate(golden):
    """The chosen token leads the second by at least .02 logits at every step, so
    the ids must be equal.
    """
    model, _, greedy = golden
    for record in greedy:
        ids = list(record["prompt"])
        for _ in record["continuation"]:
            with torch.no_grad():
                ids.append(int(model.logits(model(torch.tensor([ids]))[0, -1:]).argmax()))
        assert ids[len(record["prompt"]) :] == record["continuation"]


def test_default_positions_count_from_zero_in_every_row(golden):
    model, expected, _ = golden
    with torch.no_grad():
        assert torch.equal(
            model(expected["ids"]), model(expected["ids"], torch.arange(20).expand(3, 20))
        )


# config.json


def config_of(case, **changes):
    """A golden config.json as a dict; a change to None removes the key."""
    raw = json.loads((GOLDEN / case / "config.json").read_text()) | changes
    return {key: value for key, value in raw.items() if key not in changes or value is not None}


def test_the_spellings_of_transformers_4_and_5_read_the_same():
    old, new = config_of("untied_tf4"), config_of("tied_tf5")
    assert (
        "rope_theta" in old
        and "torch_dtype" in old
        and "rope_parameters" not in old
        and "dtype" not in old
    )
    assert (
        "rope_parameters" in new
        and "dtype" in new
        and "rope_theta" not in new
        and "torch_dtype" not in new
    )
    a, b = Qwen3Config.from_dict(old), Qwen3Config.from_dict(new)
    assert (a.rope_theta, b.rope_theta, a.dtype, b.dtype) == (5e6, 1e6, "float32", "float32")
    assert dataclasses.replace(a, rope_theta=b.rope_theta, tie_word_embeddings=True) == b


@pytest.mark.parametrize("case", CASES)
def test_the_config_we_write_reads_back_in_either_spelling(case):
    config = Qwen3Config.read(GOLDEN / case)
    written = config.to_dict()
    assert Qwen3Config.from_dict(written) == config
    for old in ("rope_theta", "torch_dtype"), ("rope_parameters", "dtype"):
        assert (
            Qwen3Config.from_dict({key: value for key, value in written.items() if key not in old})
            == config
        )


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_scaling", YARN),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_parameters", YARN | {"rope_theta": 1e6}),
        ("rope_parameters", {"rope_theta": 1e6, "rope_type": "yarn"}),
        (
            "rope_parameters",
            {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.5},
        ),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("attention_bias", True),
        ("attention_dropout", 0.1),
        ("hidden_act", "gelu"),
        ("num_experts", 128),
        ("quantization_config", {"quant_method": "fp8"}),
        ("model_type", "qwen3_moe"),
        ("model_type", "qwen2"),
        ("model_type", None),
    ],
)
def test_a_setting_that_would_change_the_arithmetic_is_named(key, value):
    with pytest.raises(ValueError, match=f"config.json: {key} = .*not supported") as error:
        Qwen3Config.from_dict(config_of("tied_tf5", **{key: value}))
    assert repr(value) in str(error.value) and "\n" not in str(error.value)


def test_two_thetas_that_disagree_are_an_error():
    with pytest.raises(ValueError, match="rope_theta 10000 .* 1000000.0 disagree"):
        Qwen3Config.from_dict(config_of("tied_tf5", rope_theta=10_000))


def test_every_missing_field_is_listed():
    with pytest.raises(
        ValueError, match="missing hidden_size, head_dim, rope_theta, tie_word_embeddings"
    ):
        Qwen3Config.from_dict(
            config_of(
                "untied_tf4",
                hidden_size=None,
                head_dim=None,
                rope_theta=None,
                tie_word_embeddings=None,
            )
        )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "24"),
        ("hidden_size", 0),
        ("vocab_size", 64.5),
        ("rope_theta", -1.0),
        ("tie_word_embeddings", "true"),
        ("dtype", 16),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(key, value):
    with pytest.raises(ValueError, match=f"config.json: {key} = {value!r}"):
        Qwen3Config.from_dict(config_of("untied_tf4", **{key: value}))


def test_query_heads_that_do_not_divide_among_kv_heads_are_an_error():
    with pytest.raises(ValueError, match="4 query heads do not divide among 3 kv heads"):
        Qwen3Config.from_dict(config_of("tied_tf5", num_key_value_heads=3))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), ("{", "not JSON"), ("[]", "list instead of a JSON object")],
)
def test_an_unreadable_config_is_one_line_that_names_the_file(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=rf"config\.json: {message}") as error:
        Qwen3Config.read(tmp_path)
    assert "\n" not in str(error.value)


# RoPE

POSITIONS = torch.tensor([[0, 1, 32_767, 262_143]])


@pytest.mark.parametrize("theta", [1e6, 5e6, 5_000_000])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_rope_equals_the_written_out_formula_bit_for_bit(theta, head_dim):
    """Three fp32 roundings in this order: theta^(2i/E), its inverse, the product with the position.
    A config may hold theta as an integer.
    """
    cos, sin = rope_cos_sin(POSITIONS, head_dim, theta, torch.float32)
    two_i = torch.tensor([float(i) for i in range(0, head_dim, 2)])
    inv_freq = 1.0 / torch.pow(torch.tensor(float(theta)), two_i / head_dim)
    for column, position in enumerate(POSITIONS[0].tolist()):
        angle = torch.tensor(float(position)) * inv_freq
        for half in (slice(None, head_dim // 2), slice(head_dim // 2, None)):
            assert torch.equal(cos[0, column, 0, half], torch.cos(angle))
            assert torch.equal(sin[0, column, 0, half], torch.sin(angle))


@pytest.mark.parametrize("theta", [1e6, 5e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_equals_transformers_bit_for_bit(theta, dtype):
    transformers = pytest.importorskip(
        "transformers", minversion="5.0", reason="the reference is transformers >= 5"
    )
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    rotary = Qwen3RotaryEmbedding(
        transformers.Qwen3Config(
            head_dim=128, rope_parameters={"rope_theta": theta, "rope_type": "default"}
        )
    )
    want = rotary(torch.zeros(1, dtype=dtype), POSITIONS)
    got = rope_cos_sin(POSITIONS, 128, theta, dtype)
    assert all(torch.equal(g[:, :, 0], w) for g, w in zip(got, want, strict=True))


def test_rope_in_fp32_is_documented_as_up_to_a_hundredth_from_fp64():
    """The rounding is the checkpoint's own and stays; bf16 angles, a common
    fault, are off by order 1.
    """
    cos, _ = rope_cos_sin(POSITIONS, 128, 5e6, torch.float32)
    exact = POSITIONS[0, :, None].double() / 5e6 ** (torch.arange(0, 128, 2).double() / 128)
    error = (cos[0, :, 0, :64] - exact.cos()).abs().amax(-1)
    assert error[0] == 0 and 1e-3 < error[3] <= 1e-2
    assert (exact.bfloat16().double().cos() - exact.cos()).abs().max() > 1


def test_rope_rotates_the_pairs_i_and_i_plus_half():
    """E = 4, the angles of position 1 and theta 100 are 1 and .1: (x0, x2) turn
    by 1, (x1, x3) by .1.
    """
    cos, sin = rope_cos_sin(torch.tensor([[1]]), 4, 100.0, torch.float32)
    got = (
        apply_rope(torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4), cos, sin).flatten().tolist()
    )
    c, s, c1, s1 = math.cos(1), math.sin(1), math.cos(0.1), math.sin(0.1)
    assert got == pytest.approx([c - 3 * s, 2 * c1 - 4 * s1, 3 * c + s, 4 * c1 + 2 * s1], abs=1e-6)


# Log-probabilities and entropies


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_stats_equal_the_full_logits(model, temperature):
    ids, targets, mask = batch()
    with torch.no_grad():
        got = model.token_stats(ids, targets, mask, temperature=temperature)
        want = reference_stats(model, ids, targets, mask, temperature)
    torch.testing.assert_close(got, want, **FP32)
    assert torch.equal(model.token_log_probs(ids, targets, mask, temperature=temperature), got[0])


def test_what_is_masked_is_exactly_zero_and_fp32(model):
    ids, targets, mask = batch()
    for values in model.bfloat16().token_stats(ids, targets, mask):
        assert values.dtype == torch.float32
        assert (values[~mask] == 0).all()
        assert (values[mask] != 0).all()


def test_gradients_of_token_stats_equal_the_full_logits(model):
    """Both outputs with random weights, every parameter; gradients are sums over the 33
    tokens and reach 20.
    """
    ids, targets, mask = batch()
    a, b = torch.randn(2, *ids.shape, generator=torch.Generator().manual_seed(1))
    grads = []
    for stats in (
        model.token_stats(ids, targets, mask),
        reference_stats(model, ids, targets, mask),
    ):
        grads.append(gradients(model, (a * stats[0] + b * stats[1]).sum()))
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-4)


def test_a_masked_target_may_hold_anything(model):
    """Padding ids are never read: not as a target, not through a zero times infinity."""
    ids, targets, mask = batch()
    got = model.token_log_probs(ids, targets.masked_fill(~mask, -100), mask)
    assert torch.equal(got, model.token_log_probs(ids, targets, mask))


def test_no_tensor_of_tokens_times_vocabulary_exists(monkeypatch):
    """256 selected tokens of a vocabulary of 1000 in chunks of 16: forward and backward stay below
    a tenth of [N, V], parameters too.
    """
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES_CPU", 16 * 4 * 1000)
    config = dataclasses.replace(Qwen3Config.read(GOLDEN / "untied_tf4"), vocab_size=1000)
    model = Qwen3(config)
    model.init_weights(0)
    tokens = torch.arange(257)[None] * 3 % 1000
    with LargestTensor() as largest:
        loss = model.token_loss(
            tokens[:, :-1], tokens[:, 1:], loss=WeightedNLL(torch.ones(1, 256))
        ).loss
        loss.backward()
    assert max(16, 24) * 1000 <= largest.numel <= 256 * 1000 // 10


def test_only_selected_rows_reach_the_head(model, monkeypatch):
    """A quarter of the tokens carries loss in SFT: the head must see that quarter."""
    seen = []
    original = cross_entropy.fp32_logits
    monkeypatch.setattr(
        cross_entropy,
        "fp32_logits",
        lambda hidden, *rest: seen.append(len(hidden)) or original(hidden, *rest),
    )
    ids, targets, mask = batch()
    model.token_log_probs(ids, targets, mask)
    assert sum(seen) == int(mask.sum()) < ids.numel()


# Losses


def test_token_loss_is_the_weighted_sum_of_the_reference(model):
    """Value and every gradient; weights differ from token to token and one is negative."""
    ids, targets, mask = batch()
    weights = torch.randn(ids.shape, generator=torch.Generator().manual_seed(2)) * mask
    got = model.token_loss(ids, targets, loss=WeightedNLL(weights))
    log_probs, entropies = reference_stats(model, ids, targets, mask)
    want = -(weights * log_probs).sum()
    torch.testing.assert_close(got.loss, want, **FP32)
    torch.testing.assert_close(
        gradients(model, got.loss), gradients(model, want), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(
        (got.log_probs_BS, got.entropies_BS), (log_probs.detach(), entropies.detach()), **FP32
    )
    assert not got.log_probs_BS.requires_grad and not got.entropies_BS.requires_grad


def test_the_loss_has_the_temperature_of_the_sampler(model):
    """Trap 18: a trainer that leaves the temperature out computes another distribution."""
    ids, targets, mask = batch()
    got = model.token_loss(ids, targets, loss=WeightedNLL(mask.float()), temperature=0.7)
    want = reference_stats(model, ids, targets, mask, temperature=0.7)[0]
    torch.testing.assert_close(got.log_probs_BS, want, **FP32)
    torch.testing.assert_close(got.loss, -want.sum(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda zeros: WeightedNLL(zeros),
        lambda zeros: ClippedPolicy(
            zeros + 1, zeros, old_BS=zeros, ref_BS=zeros, clip=0.2, dual_clip=3.0, beta=0.001
        ),
    ],
)
def test_all_tokens_masked_give_zero_loss_and_zero_gradients(model, make):
    """Trap 21: a mean over no tokens has been NaN; here the step must go through (another rank may
    hold the batch's only loss tokens).
    """
    ids, targets, _ = batch()
    result = model.token_loss(ids, targets, loss=make(torch.zeros(ids.shape)))
    assert result.loss == 0
    result.loss.backward()
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())


def test_a_masked_token_has_exactly_no_influence(model):
    """Trap 21: the last token of each row is masked; the gradient of its embedding row is exactly
    zero when no other token uses it.
    """
    ids, targets, _ = batch()
    ids, targets = ids % 60, targets % 60
    ids[:, -1] = 63
    weights = torch.ones(ids.shape)
    weights[:, -1] = 0
    model.token_loss(ids, targets, loss=WeightedNLL(weights)).loss.backward()
    assert (model.model.embed_tokens.weight.grad[63] == 0).all()
    assert (model.model.embed_tokens.weight.grad[ids[:, :-1].unique()] != 0).any(-1).all()


def nll(losses, weights):
    """Sum of WeightedNLL over tokens with the given losses (= -log p) and weights."""
    loss = WeightedNLL(torch.tensor([weights], dtype=torch.float32))
    return float(
        loss.value(-torch.tensor(losses, dtype=torch.float32), torch.arange(len(losses))).sum()
    )


@pytest.mark.parametrize(
    "split",
    [[[0, 1, 2, 3]], [[0], [1, 2, 3]], [[0, 1], [2, 3]], [[3], [2], [1], [0]], [[1, 3, 0], [2]]],
)
def test_token_and_sequence_means_do_not_depend_on_the_split(split):
    """Trap 16: sequences with token losses [4] and [1, 1, 2] have token mean 2.0 and sequence mean
    2.6667, never a mean of means.
    """
    losses = [4.0, 1.0, 1.0, 2.0]
    token_weights, sequence_weights = [1 / 4] * 4, [1 / 2, 1 / 6, 1 / 6, 1 / 6]
    assert sum(
        nll([losses[i] for i in part], [token_weights[i] for i in part]) for part in split
    ) == pytest.approx(2.0, abs=1e-6)
    assert sum(
        nll([losses[i] for i in part], [sequence_weights[i] for i in part]) for part in split
    ) == pytest.approx(8 / 3, abs=1e-6)


@pytest.mark.parametrize("split", [[[0], [1], [2], [3]], [[2, 0], [3, 1]], [[1], [0, 3, 2]]])
def test_packing_and_micro_batches_leave_the_gradient_alone(model, split):
    """Traps 16, 17: documents of unequal length, packed in any order and grouping, against one
    pack; gradients are compared, not weights.
    """
    lengths = [3, 9, 5, 7]
    generator = torch.Generator().manual_seed(4)
    documents = [torch.randint(64, (n + 1,), generator=generator) for n in lengths]
    num_tokens = sum(lengths)

    def accumulated(groups):
        model.zero_grad()
        for group in groups:
            ids, targets = (
                torch.cat([documents[i][cut] for i in group])[None]
                for cut in (slice(None, -1), slice(1, None))
            )
            positions = torch.cat([torch.arange(lengths[i]) for i in group])[None]
            layout = Layout.documents([lengths[i] for i in group])
            loss = WeightedNLL(torch.full(ids.shape, 1 / num_tokens))
            model.token_loss(
                ids, targets, loss=loss, positions_BS=positions, layout=layout
            ).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    torch.testing.assert_close(
        accumulated(split), accumulated([[0, 1, 2, 3]]), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(
    ("advantage", "ratio", "value", "slope"),
    [
        (1, 1.5, 1.2, 0),
        (1, 0.5, 0.5, 0.5),
        (-1, 1.5, -1.5, -1.5),
        (-1, 0.5, -0.8, 0),
        (-1, 5, -3, 0),
        (1, 1.0, 1, 1),
        (-1, 1.0, -1, -1),
    ],
)
def test_clip_values_and_gradients(advantage, ratio, value, slope):
    """Trap 20, clip .2, dual clip 3; slope = d value / d log p = ratio * A where not clipped. Last
    two rows: no tie halves it at ratio 1.
    """
    log_ratio = torch.tensor([math.log(ratio)], requires_grad=True)
    got = clipped_surrogate(log_ratio, torch.tensor([float(advantage)]), 0.2, 3.0)
    assert float(got.detach()) == pytest.approx(value, abs=1e-6)
    assert float(torch.autograd.grad(got, log_ratio)[0]) == pytest.approx(slope, abs=1e-6)


def test_k3_has_value_and_gradient():
    """Trap 19: p = .5, ref = .25 give .193147 and d k3 / d log p = .5; with a detached log-prob the
    gradient would be zero.
    """
    log_prob = torch.tensor([math.log(0.5)], requires_grad=True)
    got = k3_divergence(log_prob, torch.tensor([math.log(0.25)]))
    assert float(got.detach()) == pytest.approx(0.193147, abs=1e-6)
    assert float(torch.autograd.grad(got, log_prob)[0]) == pytest.approx(0.5, abs=1e-6)


def policy_gradient(advantages, log_probs, weights, **kwargs):
    """Loss and d loss / d log p of ClippedPolicy over one row."""
    log_probs_N = torch.tensor(log_probs, requires_grad=True)
    kwargs = {
        key: torch.tensor([value]) if isinstance(value, list) else value
        for key, value in kwargs.items()
    }
    constants = {"clip": 0.2, "dual_clip": 3.0, "beta": 0.001} | kwargs
    loss = ClippedPolicy(torch.tensor([advantages]), torch.tensor([weights]), **constants)
    value = loss.value(log_probs_N, torch.arange(len(log_probs))).sum()
    return float(value.detach()), torch.autograd.grad(value, log_probs_N)[0].tolist()


def test_without_old_log_probs_the_gradient_is_that_of_reinforce():
    """One update per batch: ratio 1, so the loss is -sum w A and its gradient -w A per token,
    whatever the log-probs.
    """
    value, grad = policy_gradient([1.5, -0.5, 0.0], [-0.1, -7.0, -2.0], [0.5, 0.25, 0.25], beta=0.0)
    assert value == pytest.approx(-(0.5 * 1.5 - 0.25 * 0.5), abs=1e-7)
    assert grad == pytest.approx([-0.75, 0.125, 0.0], abs=1e-7)


def test_old_equal_to_the_policy_gives_the_same_gradient_as_none():
    log_probs, advantages, weights = [-0.1, -7.0, -2.0], [1.5, -0.5, 0.25], [0.5, 0.25, 0.25]
    assert policy_gradient(advantages, log_probs, weights, old_BS=log_probs) == policy_gradient(
        advantages, log_probs, weights
    )


def test_the_kl_penalty_is_added_with_its_sign():
    """loss = w (-A + beta k3); d/dlogp = w (-A + beta (1 - ref/p)): the penalty
    pushes p towards ref.
    """
    value, grad = policy_gradient([2.0], [math.log(0.5)], [0.5], ref_BS=[math.log(0.25)], beta=0.1)
    assert value == pytest.approx(0.5 * (-2.0 + 0.1 * 0.193147), abs=1e-6)
    assert grad == pytest.approx([0.5 * (-2.0 + 0.1 * 0.5)], abs=1e-6)


def test_the_policy_loss_on_the_model_equals_its_formula(model):
    """Selected rows, per-token weights and old / ref log-probs meet in the right places: against
    the full logits, every gradient.
    """
    ids, targets, mask = batch()
    generator = torch.Generator().manual_seed(5)
    advantages, noise, more = torch.randn(3, *ids.shape, generator=generator)
    weights = torch.rand(ids.shape, generator=generator) * mask
    with torch.no_grad():
        log_probs = reference_stats(model, ids, targets, torch.ones_like(mask))[0]
    old, ref = log_probs + 0.3 * noise, log_probs + 0.3 * more
    loss = ClippedPolicy(advantages, weights, old, ref, clip=0.2, dual_clip=3.0, beta=0.5)
    got = model.token_loss(ids, targets, loss=loss).loss
    current = reference_stats(model, ids, targets, torch.ones_like(mask))[0]
    ratio = (current - old).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    surrogate = torch.where(advantages < 0, surrogate.clamp(min=3 * advantages), surrogate)
    k3 = (ref - current).exp() - (ref - current) - 1
    want = (weights * (-surrogate + 0.5 * k3)).sum()
    torch.testing.assert_close(got, want, **FP32)
    torch.testing.assert_close(gradients(model, got), gradients(model, want), rtol=1e-4, atol=1e-4)


# Random start


@pytest.mark.parametrize("case", CASES)
def test_init_weights_is_deterministic_per_seed(case):
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(states))  # the global generator must not matter
        model = Qwen3(Qwen3Config.read(GOLDEN / case))
        model.init_weights(seed)
        states.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not any(
        torch.equal(states[0][name], states[2][name]) for name in states[0] if "norm" not in name
    )


def test_init_weights_has_the_documented_scales():
    """Each standard deviation within 10 % (4 sigma for 800 weights); norms exactly 1."""
    model = Qwen3(
        dataclasses.replace(
            Qwen3Config.read(GOLDEN / "untied_tf4"), hidden_size=64, intermediate_size=96
        )
    )
    model.init_weights(0)
    std = {name: float(p.detach().std()) for name, p in model.named_parameters()}
    layer = "model.layers.1."
    assert std["model.embed_tokens.weight"] == pytest.approx(0.02, rel=0.1)
    assert std["lm_head.weight"] == pytest.approx(1 / 8, rel=0.1)  # fan_in 64
    assert std[layer + "self_attn.q_proj.weight"] == pytest.approx(1 / 8, rel=0.1)
    # fan_in = 4 heads of 16
    assert std[layer + "self_attn.o_proj.weight"] == pytest.approx(0.05 / 8, rel=0.1)
    assert std[layer + "mlp.down_proj.weight"] == pytest.approx(0.05 * 96**-0.5, rel=0.1)
    assert all((p == 1).all() for name, p in model.named_parameters() if "norm" in name)


def test_a_directory_without_weights_still_has_a_config(tmp_path):
    """The tiny world's model directory holds no weights: training starts from random there."""
    shutil.copy(GOLDEN / "tied_tf5" / "config.json", tmp_path)
    assert Qwen3Config.read(tmp_path) == Qwen3Config.read(GOLDEN / "tied_tf5")
