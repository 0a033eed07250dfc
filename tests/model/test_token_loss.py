"""Losses with their slopes, the one-pass form that uses them, and the choice of kernel. Shapes: N
tokens  V vocab  D hidden.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loss_problems import LargestTensor, problem, upstream

from kernels.cross_entropy import linear_log_probs, linear_token_loss
from kernels.launch import choose_kernel
from venus.model.qwen3 import ClippedPolicy, WeightedNLL

V = 101  # of `problem`


def policy_fields(seed=0):
    generator = torch.Generator().manual_seed(seed)
    log_probs, old, ref, advantages, weights = torch.randn(
        5, 400, dtype=torch.float64, generator=generator
    )
    return log_probs, {
        "old_BS": log_probs + 0.5 * old,
        "ref_BS": log_probs + ref,
        "advantages_BS": 3 * advantages,
        "weights_BS": weights,
    }


def objective_of(loss):
    rows = torch.arange(loss.weights_BS.numel())
    return lambda log_probs, part: (
        loss.value(log_probs, rows[part]),
        loss.slope(log_probs, rows[part]),
    )


@pytest.mark.parametrize("drop", [(), ("old_BS",), ("ref_BS",), ("old_BS", "ref_BS")])
def test_the_slope_is_the_derivative_of_the_value(drop):
    """400 random tokens in fp64; with `old`, ratios from 0.2 to 5, so that both clips and the dual
    clip (at 1.5) hold for some.
    """
    log_probs, fields = policy_fields()
    loss = ClippedPolicy(
        **{name: None if name in drop else value for name, value in fields.items()},
        clip=0.2,
        dual_clip=1.5,
        beta=0.3,
    )
    rows = torch.arange(400)
    log_probs.requires_grad_()
    autograd = torch.autograd.grad(loss.value(log_probs, rows).sum(), log_probs)[0]
    torch.testing.assert_close(
        loss.slope(log_probs.detach(), rows), autograd, rtol=1e-12, atol=1e-12
    )
    if drop == ("ref_BS",):
        assert 50 < (autograd == 0).sum() < 350  # clipped, and not


def test_the_slope_of_the_likelihood_is_minus_its_weight():
    weights = upstream(9)[:1]
    assert torch.equal(
        WeightedNLL(weights).slope(torch.zeros(4), torch.tensor([8, 0, 3, 3])),
        -weights[0, [8, 0, 3, 3]],
    )


def fixed_policy(temperature=1.0):
    """A clipped loss of the tokens of `problem()`; the old and reference log-probs lie around
    theirs, so that some are clipped.
    """
    log_probs = linear_log_probs(*problem(), temperature=temperature)[0].detach()
    a, b = upstream(37)
    old, ref = log_probs + 0.5 * upstream(37, seed=2)
    return ClippedPolicy(
        3 * a[None], b[None], old[None], ref[None], clip=0.2, dual_clip=3.0, beta=0.3
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_rows", [1, 5, 1000])
def test_one_pass_equals_autograd_through_the_two_pass_form(chunk_rows, temperature):
    """Loss, log-probs, entropies and both gradients, scaled by an upstream gradient of -2; entries
    of the gradients reach 100.
    """
    loss, outcomes = fixed_policy(temperature), []
    for form in ("one pass", "recompute"):
        h, w, targets = problem()
        if form == "one pass":
            total, log_probs, entropies = linear_token_loss(
                h,
                w,
                targets,
                objective_of(loss),
                temperature=temperature,
                chunk_bytes=chunk_rows * 4 * V,
            )
        else:
            log_probs, entropies = linear_log_probs(h, w, targets, temperature=temperature)
            total = loss.value(log_probs, torch.arange(37)).sum()
        outcomes.append((total, log_probs, entropies, *torch.autograd.grad(-2 * total, (h, w))))
    torch.testing.assert_close(outcomes[0], outcomes[1], rtol=1e-5, atol=2e-4)


def test_the_block_size_of_the_cpu_changes_nothing(monkeypatch):
    """The passes over the logits go block by block; rows are independent, so not a bit may move."""
    outcomes = []
    for block_bytes in (1, 7 * 4 * V, 2**20):
        monkeypatch.setattr("kernels.cross_entropy.BLOCK_BYTES_CPU", block_bytes)
        h, w, targets = problem()
        total, *stats = linear_token_loss(h, w, targets, objective_of(fixed_policy()))
        outcomes.append((*stats, *torch.autograd.grad(total, (h, w))))
    for other in outcomes[1:]:
        assert all(torch.equal(x, y) for x, y in zip(outcomes[0], other, strict=True))


def test_bf16_on_the_cpu_is_summed_in_fp32():
    """Only the returned gradients are rounded: within half a bf16 step (2^-9) of the fp32
    result on the same inputs.
    """
    h, w, targets = problem(dtype=torch.bfloat16)
    loss = objective_of(fixed_policy())
    exact = [x.detach().float().requires_grad_() for x in (h, w)]
    want = torch.autograd.grad(
        linear_token_loss(*exact, targets, loss, chunk_bytes=5 * 4 * V)[0], exact
    )
    got = torch.autograd.grad(
        linear_token_loss(h, w, targets, loss, chunk_bytes=5 * 4 * V)[0], (h, w)
    )
    for ours, exactly in zip(got, want, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), exactly, rtol=2**-8, atol=1e-6)


def test_a_token_of_slope_zero_gets_exactly_zero():
    h, w, targets = problem()
    kept = torch.arange(37) % 3 == 0
    linear_token_loss(h, w, targets, objective_of(WeightedNLL(kept.float())))[0].backward()
    assert (h.grad[~kept] == 0).all()
    assert (h.grad[kept] != 0).any(-1).all()


def test_no_tokens_give_zero_loss_and_zero_gradients():
    h, w, targets = problem(num_tokens=0)
    total, log_probs, entropies = linear_token_loss(
        h, w, targets, objective_of(WeightedNLL(torch.zeros(0)))
    )
    total.backward()
    assert total == 0
    assert log_probs.shape == entropies.shape == (0,)
    assert (w.grad == 0).all()


def test_one_pass_makes_no_tensor_larger_than_a_chunk():
    """N x V would be 25,856 numbers; a chunk of 20 rows is 2,020, and the head 1,616."""
    h, w, targets = problem(num_tokens=256)
    with LargestTensor() as largest:
        linear_token_loss(
            h, w, targets, objective_of(WeightedNLL(torch.ones(256))), chunk_bytes=20 * 4 * V
        )[0].backward()
    assert largest.numel == 256 * 16  # the hidden rows


def test_without_gradients_nothing_is_multiplied_twice():
    """Evaluating a loss costs the forward product alone, and gives the same loss."""
    h, w, targets = problem()
    with torch.no_grad():
        quiet = linear_token_loss(h, w, targets, objective_of(fixed_policy()))
    assert not quiet[0].requires_grad
    torch.testing.assert_close(
        quiet,
        tuple(x.detach() for x in linear_token_loss(h, w, targets, objective_of(fixed_policy()))),
        rtol=1e-6,
        atol=1e-6,
    )


def test_backward_runs_once():
    h, w, targets = problem()
    total = linear_token_loss(h, w, targets, objective_of(WeightedNLL(torch.ones(37))))[0]
    total.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="backward runs once"):
        total.backward()


def test_without_triton_the_torch_forms_serve():
    """macOS has no Triton: the kernels must still parse, auto be torch, and "triton" an error that
    says why. A process of its own imports afresh.
    """
    code = """
import sys
sys.modules["triton"] = None
import torch
from kernels import cross_entropy, gt_score, launch
x = torch.eye(3)
print(cross_entropy.linear_log_probs(x, x, torch.arange(3))[0].tolist())
try:
    launch.choose_kernel("triton", "cpu")
except ValueError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    numbers, error = done.stdout.splitlines()
    assert json.loads(numbers) == pytest.approx([1 - math.log(math.e + 2)] * 3, abs=1e-6)
    assert "triton is not installed" in error


def test_auto_is_triton_on_cuda_and_torch_elsewhere():
    assert [choose_kernel("auto", device) for device in ("cuda", "cuda:1", "cpu")] == [
        "triton",
        "triton",
        "torch",
    ]
    assert [choose_kernel("torch", device) for device in ("cuda", "cpu")] == ["torch", "torch"]


def test_triton_without_cuda_is_an_error():
    """A kernel that was asked for by name is never replaced silently."""
    with pytest.raises(ValueError, match="kernel 'triton'"):
        linear_log_probs(*problem(), kernel="triton")
    with pytest.raises(ValueError, match="'cuda': choose one of auto, triton, torch"):
        choose_kernel("cuda", "cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, w, t: (h.bfloat16(), w, t), "dtypes do not fit"),
        (lambda h, w, t: (h.double(), w.double(), t), "dtypes do not fit"),
        (lambda h, w, t: (h.to("meta"), w, t), "devices do not fit"),
        (lambda h, w, t: (h.T.contiguous().T, w, t), "rows are not contiguous"),
        (lambda h, w, t: (h, w, t + 101), "out of bounds"),
    ],
)
def test_what_a_kernel_could_not_read_is_an_error_beforehand(change, message):
    with pytest.raises(ValueError, match=message):
        linear_log_probs(*change(*problem()))
