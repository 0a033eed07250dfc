"""The chunked linear cross-entropy against one full logits matrix. Shapes: N tokens  V vocab  D
hidden.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from loss_problems import LargestTensor, problem, upstream

from kernels import cross_entropy
from kernels.cross_entropy import linear_log_probs, linear_log_probs_ref


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_values_equal_one_full_log_softmax(temperature):
    """fp32 against fp32: the sums have 101 terms, so 1e-5 is a hundred roundings."""
    inputs = problem()
    got = linear_log_probs(*inputs, temperature=temperature, chunk_bytes=5 * 4 * 101)
    want = linear_log_probs_ref(*inputs, temperature=temperature)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use", ["log_probs", "entropies", "both"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradients_equal_autograd_through_the_full_matrix(use, temperature):
    """The hand-written dz of the module docstring, in both outputs, against
    autograd over the reference.
    """
    grads = []
    for function in (partial(linear_log_probs, chunk_bytes=5 * 4 * 101), linear_log_probs_ref):
        inputs = problem()
        log_probs, entropies = function(*inputs, temperature=temperature)
        a, b = upstream(len(log_probs))
        loss = (a * log_probs).sum() * (use != "entropies") + (b * entropies).sum() * (
            use != "log_probs"
        )
        grads.append(torch.autograd.grad(loss, inputs[:2]))
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=5e-5)  # entries reach 30


@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
def test_chunk_size_changes_nothing(chunk_rows):
    """Only the last bits may move (another matmul shape); the weight gradient is a sum over chunks
    of entries up to 30.
    """
    results = []
    for rows in (chunk_rows, 16):
        inputs = problem()
        log_probs, entropies = linear_log_probs(*inputs, chunk_bytes=rows * 4 * 101)
        a, b = upstream(len(log_probs))
        results.append(
            (
                log_probs,
                entropies,
                *torch.autograd.grad((a * log_probs + b * entropies).sum(), inputs[:2]),
            )
        )
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=2e-5)


def test_bf16_is_no_worse_than_torch_in_bf16():
    """Error (2-norm) against fp32 on the same bf16 inputs, of values and gradients: at most that of
    torch's own bf16 path (seen: 0, 1/2, 2/3).
    """
    hidden_ND, weight_VD, targets = problem(dtype=torch.bfloat16)
    a = upstream(len(targets))[0]

    def run(function, dtype):
        h, w = (x.detach().to(dtype).requires_grad_() for x in (hidden_ND, weight_VD))
        log_probs = function(h, w)
        return [
            log_probs.detach().float(),
            *(
                g.float()
                for g in torch.autograd.grad((a.to(log_probs.dtype) * log_probs).sum(), (h, w))
            ),
        ]

    exact = run(lambda h, w: linear_log_probs_ref(h, w, targets)[0], torch.float32)
    plain = run(lambda h, w: -F.cross_entropy(h @ w.T, targets, reduction="none"), torch.bfloat16)
    ours = run(
        lambda h, w: linear_log_probs(h, w, targets, chunk_bytes=5 * 4 * 101)[0], torch.bfloat16
    )
    for name, want, torch_bf16, got in zip(
        ("log_probs", "d hidden", "d weight"), exact, plain, ours, strict=True
    ):
        assert (got - want).norm() <= (torch_bf16 - want).norm() + 1e-6, name
    assert (ours[0] - exact[0]).abs().max() < 1e-4  # the logits are never rounded to bf16


def test_logits_of_a_thousand_keep_value_and_entropy():
    """H = lse - sum p z was 0.15 nats off here: the rounding of sum p (lse near 3000 is spaced
    2.4e-4) was multiplied by z.
    """
    hidden_ND, weight_VD, targets = problem()
    got = linear_log_probs(hidden_ND * 300, weight_VD, targets)
    want = linear_log_probs_ref(hidden_ND * 300, weight_VD, targets)
    assert torch.isfinite(torch.stack(got)).all()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-3)


def test_a_row_without_upstream_gradient_gets_exactly_zero():
    """Fused cross-entropies have returned gradients for masked rows (trap 21)."""
    hidden_ND, weight_VD, targets = problem()
    a, b = upstream(len(targets))
    kept = torch.arange(len(targets)) % 3 == 0
    log_probs, entropies = linear_log_probs(hidden_ND, weight_VD, targets, chunk_bytes=5 * 4 * 101)
    ((a * log_probs + b * entropies) * kept).sum().backward()
    assert (hidden_ND.grad[~kept] == 0).all()
    assert (hidden_ND.grad[kept] != 0).any(-1).all()


def test_a_tokens_weight_scales_its_gradient_exactly():
    """Per-token weights are no afterthought (trap 21): a weight doubled doubles that row's gradient
    bit for bit and leaves the others.
    """
    grads = []
    for factor in (1.0, 2.0):
        hidden_ND, weight_VD, targets = problem()
        weights = upstream(len(targets))[0].clone()
        weights[5] *= factor
        (weights * linear_log_probs(hidden_ND, weight_VD, targets)[0]).sum().backward()
        grads.append(hidden_ND.grad)
    assert torch.equal(grads[1][5], 2 * grads[0][5])
    others = torch.arange(len(targets)) != 5
    assert torch.equal(grads[1][others], grads[0][others])


def test_no_tokens_give_empty_results_and_zero_gradients():
    hidden_ND, weight_VD, targets = problem(num_tokens=0)
    log_probs, entropies = linear_log_probs(hidden_ND, weight_VD, targets)
    assert log_probs.shape == entropies.shape == (0,)
    assert log_probs.dtype == entropies.dtype == torch.float32
    (log_probs.sum() + entropies.sum()).backward()
    assert hidden_ND.grad.shape == (0, 16)
    assert (weight_VD.grad == 0).all()


def test_no_tensor_is_larger_than_a_chunk():
    """N x V would be 76,800 numbers; one chunk of 8 rows is 2,400, and nothing else
    may be larger.
    """
    inputs = problem(num_tokens=256, vocab=300, hidden=8)
    with LargestTensor() as largest:
        log_probs, entropies = linear_log_probs(*inputs, chunk_bytes=8 * 4 * 300)
        (log_probs.sum() + entropies.sum()).backward()
    assert largest.numel == 8 * 300
    with LargestTensor() as largest:  # the meter does see the full matrix where there is one
        linear_log_probs_ref(*inputs)
    assert largest.numel == 256 * 300


def test_the_default_chunk_is_bounded_whatever_the_vocabulary(monkeypatch):
    """Without `chunk_bytes` the module's constant counts; a vocabulary larger than a
    chunk goes row by row.
    """
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES_CPU", 100)
    inputs = problem(num_tokens=24, vocab=300, hidden=8)
    with LargestTensor() as largest:
        got = linear_log_probs(*inputs)
    assert largest.numel == max(300, 300 * 8)  # one row of logits; the head itself, transposed
    torch.testing.assert_close(got, linear_log_probs_ref(*inputs), rtol=1e-5, atol=1e-5)


def test_temperature_divides_the_logits():
    """Trap 18: logits [2, 0]; a trainer that forgets the sampler's T = 2 sees the ratio 1.204824
    at identical weights.
    """
    hidden_ND, weight_VD, targets = torch.tensor([[2.0, 0.0]]), torch.eye(2), torch.tensor([0])
    at_1, at_2 = (
        linear_log_probs(hidden_ND, weight_VD, targets, temperature=t)[0] for t in (1.0, 2.0)
    )
    assert math.exp(at_1 - at_2) == pytest.approx(1.204824, abs=1e-6)


def test_entropy_is_in_nats():
    """Equal logits: ln V. Two outcomes .8 and .2: .500402."""
    entropies = linear_log_probs(torch.zeros(1, 4), torch.ones(7, 4), torch.tensor([3]))[1]
    assert float(entropies) == pytest.approx(math.log(7), abs=1e-6)
    entropies = linear_log_probs(
        torch.tensor([[math.log(4), 0.0]]), torch.eye(2), torch.tensor([1])
    )[1]
    assert float(entropies) == pytest.approx(0.500402, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, w, t: (h[:, :5], w, t), "shapes do not fit"),
        (lambda h, w, t: (h, w, t[:-1]), "shapes do not fit"),
        (lambda h, w, t: (h[None], w, t), "shapes do not fit"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        linear_log_probs(*change(*problem()))


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_that_is_not_positive_is_an_error(temperature):
    with pytest.raises(ValueError, match="temperature"):
        linear_log_probs(*problem(), temperature=temperature)


def test_a_padding_target_is_an_error_and_no_mask():
    """-100 marks padding elsewhere; here rows are selected beforehand, and a negative target must
    not read another row's logit.
    """
    hidden_ND, weight_VD, targets = problem()
    targets[3] = -100
    with pytest.raises(ValueError, match="out of bounds"):
        linear_log_probs(hidden_ND, weight_VD, targets)
