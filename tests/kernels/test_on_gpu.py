"""The kernels on a CUDA device, against fp64: the same rules as under the interpreter, at sizes
that have several tiles in every direction.

Shapes: N tokens  V vocab
        D hidden. Needs no conftest: pytest --noconftest -m gpu tests/kernels/test_on_gpu.py
"""

import random

import pytest
import torch
import torch.nn.functional as F

from kernels.cross_entropy import linear_log_probs, linear_token_loss
from kernels.gt_score import branch_attention, branch_attention_ref, plan_rows
from kernels.paged_decode import paged_decode, paged_decode_torch
from venus.model.attention import Layout, attend, plan_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def problem(num_tokens, hidden, vocab, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    h = (
        torch.randn(num_tokens, hidden, generator=generator, device="cuda")
        .to(dtype)
        .requires_grad_()
    )
    w = (
        (torch.randn(vocab, hidden, generator=generator, device="cuda") * hidden**-0.5 * 3)
        .to(dtype)
        .requires_grad_()
    )
    upstream = torch.randn(2, num_tokens, generator=generator, device="cuda")
    return h, w, torch.randint(vocab, (num_tokens,), generator=generator, device="cuda"), upstream


def plain(h, w, targets, temperature):
    log_softmax = F.log_softmax(h @ w.T / temperature, dim=-1)
    return log_softmax.gather(-1, targets[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(
        -1
    )


def with_gradients(function, h, w, targets, upstream, temperature):
    log_probs, entropies = function(h, w, targets, temperature)
    grads = torch.autograd.grad((upstream[0] * log_probs + upstream[1] * entropies).sum(), (h, w))
    return [x.detach().double() for x in (log_probs, entropies, *grads)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(300, 256, 1000), (1, 128, 515), (257, 2560, 4099)], ids=str)
def test_log_probs_entropies_and_gradients(shape, dtype, temperature):
    h, w, targets, upstream = problem(*shape, dtype)
    exact = with_gradients(
        plain,
        h.detach().double().requires_grad_(),
        w.detach().double().requires_grad_(),
        targets,
        upstream.double(),
        temperature,
    )
    same = with_gradients(plain, h, w, targets, upstream.to(dtype), temperature)
    got = with_gradients(
        lambda *args: linear_log_probs(*args[:3], temperature=args[3], kernel="triton"),
        h,
        w,
        targets,
        upstream,
        temperature,
    )
    for ours, theirs, truth in zip(got, same, exact, strict=True):
        assert (ours - truth).norm() <= (theirs - truth).norm() + 1e-5 * truth.norm()


def test_the_real_vocabulary_in_several_chunks_is_the_same_every_time():
    """2,500 rows in one-pass chunks of 1 GiB, twice: no atomics, so every bit agrees; and
    against the recompute form.
    """
    outcomes = []
    for _ in range(2):
        h, w, targets, (a, _) = problem(2500, 512, 151_936, torch.bfloat16)
        loss, log_probs, entropies = linear_token_loss(
            h,
            w,
            targets,
            lambda log_probs, rows, a=a: (a[rows] * log_probs, a[rows]),
            kernel="triton",
        )
        outcomes.append((log_probs, entropies, *torch.autograd.grad(loss, (h, w))))
    assert all(torch.equal(x, y) for x, y in zip(*outcomes, strict=True))
    log_probs, entropies = linear_log_probs(h, w, targets, kernel="triton")
    grads = torch.autograd.grad((a * log_probs).sum(), (h, w))
    torch.testing.assert_close((log_probs, entropies), outcomes[0][:2], rtol=1e-4, atol=1e-4)
    for ours, other in zip(grads, outcomes[0][2:], strict=True):
        assert (ours - other).float().norm() <= 1e-2 * other.float().norm()


@pytest.mark.parametrize("seed", range(20))
def test_random_packings(seed):
    choose = random.Random(seed)
    spans, size = [], 0
    for _ in range(choose.randint(1, 3)):
        doc, trunk, length = size, choose.randint(1, 700), choose.randint(1, 40)
        spans.append((doc, doc + trunk, doc, doc))
        size += trunk
        for cut in (choose.randint(0, trunk) for _ in range(choose.randint(0, 6))):
            spans.append((size, size + length, doc, doc + cut))
            size += length
    heads, kv_heads = choose.choice([(8, 8), (8, 4), (8, 2), (5, 1)])
    q, k, v = (
        torch.randn(size, n, 128, device="cuda", dtype=torch.bfloat16)
        for n in (heads, kv_heads, kv_heads)
    )
    exact = branch_attention_ref(q.double(), k.double(), v.double(), spans)
    same = branch_attention_ref(q, k, v, spans)
    got = branch_attention(q, k, v, plan_rows(spans, heads // kv_heads, q.device))
    for ours, theirs, truth in zip(got, same, exact, strict=True):
        assert (ours.double() - truth).abs().max() <= (theirs.double() - truth).abs().max() + 2e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_paged_decode_over_ragged_rows(dtype):
    """16 rows of up to 5,000 tokens and one empty, pages of 256 dealt at random, in a CUDA graph
    that is replayed with other lengths.
    """
    rows, width = 17, 20
    generator = torch.Generator("cuda").manual_seed(0)
    keys, values = (
        torch.randn(rows * width + 1, 256, 8, 128, generator=generator, device="cuda").to(dtype)
        for _ in range(2)
    )
    tables = (
        torch.randperm(rows * width, generator=generator, device="cuda").view(rows, width) + 1
    ).int()
    q = torch.randn(rows, 32, 128, generator=generator, device="cuda").to(dtype)
    lengths = torch.randint(1, 5000, (rows,), generator=generator, device="cuda").int()
    paged_decode(q, keys, values, tables, lengths)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = paged_decode(q, keys, values, tables, lengths)
    lengths.copy_(torch.randint(1, 5000, (rows,), generator=generator, device="cuda"))
    lengths[3] = 0
    graph.replay()
    exact = paged_decode_torch(q.double(), keys.double(), values.double(), tables, lengths)
    same = paged_decode_torch(q, keys, values, tables, lengths)
    assert (got.double() - exact).abs().max() <= (same.double() - exact).abs().max() + 2e-3


def test_documents_go_through_flash_attention_with_gradients():
    q, k, v = (
        torch.randn(1, 500, n, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (8, 2, 2)
    )
    layout = Layout.documents([200, 1, 299])
    results = []
    for planned in (plan_attention(layout, q.flatten(2), 4, "auto"), layout):
        out = attend(q, k, v, planned)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    for ours, spans in zip(*results, strict=True):
        torch.testing.assert_close(ours, spans, rtol=2e-2, atol=6e-2)
