"""The Triton form of the fused cross-entropy under Triton's interpreter, against fp64 torch.
Started by test_processes.py in a process of its own.

The rule: error against fp64 <= error of torch's plain path in the same dtype, plus a little. The
interpreter truncates fp32 to bf16 where a GPU rounds to nearest, which doubles the error of dz:
hence the factor 2 for bf16. Races, register and memory limits it does not see.
Shapes: N tokens  V vocab  D hidden.
"""

import os
import sys

assert "triton" not in sys.modules, "TRITON_INTERPRET is read when triton is imported"
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
import torch.nn.functional as F

from kernels import cross_entropy
from kernels.cross_entropy import Tiles, linear_log_probs, linear_token_loss

NAMES = ("log_probs", "entropies", "d hidden", "d weight")


@pytest.fixture(params=["pointers", "descriptors"])
def tiles(request, monkeypatch):
    """Small tiles, so that 50 rows of 1,000 logits have several, with ragged edges on all sides;
    both ways of loading.
    """
    monkeypatch.setitem(
        cross_entropy.TILES,
        "interpreter",
        Tiles(32, 128, 64, 2, 4, 1, request.param == "descriptors"),
    )


def problem(num_tokens=50, hidden=96, vocab=1000, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    weight_VD = (torch.randn(vocab, hidden, generator=generator) * 0.4).to(dtype)
    return (
        hidden_ND,
        weight_VD,
        torch.randint(vocab, (num_tokens,), generator=generator),
        torch.randn(2, num_tokens, generator=generator),
    )


def plain(hidden_ND, weight_VD, targets_N, temperature):
    """What one would write in torch, in the dtype of the inputs."""
    log_softmax_NV = F.log_softmax(hidden_ND @ weight_VD.T / temperature, dim=-1)
    return log_softmax_NV.gather(-1, targets_N[:, None])[:, 0], -(
        log_softmax_NV.exp() * log_softmax_NV
    ).sum(-1)


def triton(hidden_ND, weight_VD, targets_N, temperature, **kwargs):
    return linear_log_probs(
        hidden_ND, weight_VD, targets_N, temperature=temperature, kernel="triton", **kwargs
    )


def results(function, hidden_ND, weight_VD, targets_N, upstream, temperature=1.0, **kwargs):
    """Log-probs, entropies and both gradients for random upstream gradients on
    both outputs, in fp64.
    """
    h, w = hidden_ND.clone().requires_grad_(), weight_VD.clone().requires_grad_()
    log_probs, entropies = function(h, w, targets_N, temperature, **kwargs)
    a, b = upstream.to(log_probs.dtype)
    grads = torch.autograd.grad((a * log_probs + b * entropies).sum(), (h, w))
    return [x.detach().double() for x in (log_probs, entropies, *grads)]


def assert_no_worse(got, same_dtype, exact, factor=1.0):
    for name, ours, theirs, truth in zip(NAMES, got, same_dtype, exact, strict=True):
        error = (ours - truth).norm().item()
        allowed = factor * (theirs - truth).norm().item() + 1e-6 * truth.norm().item()
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_and_gradients_are_no_worse_than_torch_in_the_same_dtype(tiles, dtype, temperature):
    h, w, targets, upstream = problem(dtype=dtype)
    exact = results(plain, h.double(), w.double(), targets, upstream.double(), temperature)
    same_dtype = results(plain, h, w, targets, upstream, temperature)
    got = results(triton, h, w, targets, upstream, temperature)
    assert_no_worse(got, same_dtype, exact, factor=2.0 if dtype == torch.bfloat16 else 1.0)
    # whatever the inputs' dtype, logits and sums are fp32
    torch.testing.assert_close(got[:2], exact[:2], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("seed", range(8))
def test_ragged_shapes(tiles, seed):
    """N, V and D next to, below and above multiples of the tile; fp32 sums of a thousand terms
    agree with fp64 to 1e-5.
    """
    generator = torch.Generator().manual_seed(100 + seed)
    num_tokens, vocab = (int(torch.randint(1, high, (), generator=generator)) for high in (80, 400))
    # descriptors want rows of 16-byte steps
    hidden = 4 * int(torch.randint(1, 40, (), generator=generator))
    inputs = problem(num_tokens, hidden, vocab, seed=seed)
    exact = results(plain, *(x.double() if x.is_floating_point() else x for x in inputs))
    for chunk_bytes in (None, 2000):
        got = results(triton, *inputs, chunk_bytes=chunk_bytes)
        for name, ours, truth in zip(NAMES, got, exact, strict=True):
            assert (ours - truth).norm() <= 1e-5 * truth.norm() + 1e-6, name


def test_the_real_vocabulary(monkeypatch):
    """V = 151,936 in tiles of 2,048 columns (the last holds 384), forward and backward with
    both upstream gradients.
    """
    monkeypatch.setitem(cross_entropy.TILES, "interpreter", Tiles(32, 2048, 64, 8, 4, 1, False))
    inputs = problem(num_tokens=8, hidden=64, vocab=151_936)
    exact = results(plain, *(x.double() if x.is_floating_point() else x for x in inputs))
    for name, ours, truth in zip(NAMES, results(triton, *inputs), exact, strict=True):
        assert (ours - truth).norm() <= 1e-5 * truth.norm(), name


def test_logits_of_a_thousand_keep_value_and_entropy(tiles):
    h, w, targets, _ = problem()
    got = triton(h * 100, w, targets, 1.0)
    torch.testing.assert_close(
        [x.double() for x in got],
        list(plain(h.double() * 100, w.double(), targets, 1.0)),
        rtol=1e-5,
        atol=1e-3,
    )


def test_a_row_without_upstream_gradient_gets_exactly_zero(tiles):
    """Trap 21: fused cross-entropies have returned gradients for masked rows, and NaN
    when all were masked.
    """
    h, w, targets, upstream = problem()
    kept = torch.arange(50) % 3 == 0
    grad_hidden = results(triton, h, w, targets, upstream * kept)[2]
    assert (grad_hidden[~kept] == 0).all()
    assert (grad_hidden[kept] != 0).any(-1).all()
    *_, grad_hidden, grad_weight = results(triton, h, w, targets, upstream * 0)
    assert (grad_hidden == 0).all()
    assert (grad_weight == 0).all()


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_no_row_and_one_row(tiles, num_tokens):
    inputs = problem(num_tokens)
    exact = results(plain, *(x.double() if x.is_floating_point() else x for x in inputs))
    for got in (results(triton, *inputs), results(triton, *inputs, chunk_bytes=1)):
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5)
    h, w = inputs[0].requires_grad_(), inputs[1].requires_grad_()
    loss, _, _ = linear_token_loss(
        h, w, inputs[2], policy_objective(*problem(num_tokens)[3]), kernel="triton"
    )
    loss.backward()
    assert torch.isfinite(w.grad).all()
    assert num_tokens or (loss == 0 and (w.grad == 0).all())


def test_vectors_need_not_be_contiguous():
    """The gradient of a sum is one number expanded over the rows, and targets may be every second
    of a longer list: kernels read neighbours.
    """
    h, w, targets, (a, _) = problem()
    spread = torch.stack([targets, torch.zeros_like(targets)], dim=1)[:, 0]
    for function in (triton, plain):
        x, y = h.clone().requires_grad_(), w.clone().requires_grad_()
        log_probs, entropies = function(x, y, spread, 1.0)
        want = torch.autograd.grad(log_probs.sum() + entropies.mean(), (x, y))
        if function is triton:
            got = want
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    grads = []
    for slopes in (a[:1].expand(50), a[:1].repeat(50).double()):
        x, y = h.clone().requires_grad_(), w.clone().requires_grad_()
        loss, _, _ = linear_token_loss(
            x,
            y,
            spread,
            lambda log_probs, rows, s=slopes: (s[rows] * log_probs, s[rows]),
            kernel="triton",
        )
        grads.append(torch.autograd.grad(loss, (x, y)))
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    torch.testing.assert_close(
        grads[0][0] / a[0],
        torch.autograd.grad(plain(x, y, targets, 1.0)[0].sum(), x)[0],
        rtol=1e-4,
        atol=1e-4,
    )


def test_row_offsets_pass_two_to_the_31():
    """Row 2 of this view starts 2^31 elements into its buffer (4 GB of address space, three pages
    of memory): 32-bit offsets would wrap.
    """
    h, w, targets, upstream = problem(num_tokens=3, hidden=64, vocab=130, dtype=torch.bfloat16)
    far = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((3, 64), (2**30, 1))
    far.copy_(h)
    torch.testing.assert_close(
        triton(far, w, targets, 1.0), triton(h, w, targets, 1.0), rtol=0, atol=0
    )
    del far, upstream


def policy_objective(a, b):
    """A loss that is not linear in log p, whose slope changes from token to token."""
    return lambda log_probs, rows: (
        a[rows] * log_probs + (b[rows] * log_probs).sin(),
        a[rows] + b[rows] * (b[rows] * log_probs).cos(),
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_one_pass_form_is_no_worse_than_torch_in_the_same_dtype(dtype, temperature):
    """In chunks of 16 rows, with a loss whose slope depends on log p, scaled by an
    upstream gradient of 3.
    """
    h, w, targets, (a, b) = problem(dtype=dtype)

    def run(form, h, w):
        h, w = h.clone().requires_grad_(), w.clone().requires_grad_()
        if form == "triton":
            loss, log_probs, entropies = linear_token_loss(
                h,
                w,
                targets,
                policy_objective(a, b),
                temperature=temperature,
                kernel="triton",
                chunk_bytes=16 * 4 * 1000,
            )
        else:
            log_probs, entropies = plain(h, w, targets, temperature)
            objective = policy_objective(*(x.to(log_probs.dtype) for x in (a, b)))
            loss = objective(log_probs, slice(0, 50))[0].sum()
        return [
            x.detach().double()
            for x in (log_probs, entropies, *torch.autograd.grad(3 * loss, (h, w)))
        ]

    exact = run("plain", h.double(), w.double())
    assert_no_worse(
        run("triton", h, w),
        run("plain", h, w),
        exact,
        factor=2.0 if dtype == torch.bfloat16 else 1.0,
    )


def test_a_row_longer_than_a_block_is_carried_along(monkeypatch):
    """The running maximum rises and falls over the blocks of a row: 1,000 logits in
    blocks of 128.
    """
    monkeypatch.setattr(cross_entropy, "ROW_BLOCK", 128)
    h, w, targets, (a, b) = problem()
    _, log_probs, entropies = linear_token_loss(
        h.requires_grad_(), w * 30, targets, policy_objective(a, b), kernel="triton"
    )
    want = plain(h.detach().double(), w.double() * 30, targets, 1.0)
    torch.testing.assert_close(
        [log_probs.double(), entropies.double()], list(want), rtol=1e-5, atol=1e-4
    )


def test_rows_that_tma_cannot_read_are_an_error(monkeypatch):
    monkeypatch.setitem(cross_entropy.TILES, "interpreter", Tiles(32, 128, 64, 2, 4, 1, True))
    h, w, targets, _ = problem(hidden=98)  # 98 * 2 bytes is no multiple of 16
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        triton(h.bfloat16(), w.bfloat16(), targets, 1.0)
