"""Paged decode attention under Triton's interpreter, against fp64 torch over rows that lie in no
pages. Started by test_processes.py.

The rule of interpreted_cross_entropy.py. Shapes as in paged_decode.py; M positions of a row.
"""

import os
import sys

assert "triton" not in sys.modules, "TRITON_INTERPRET is read when triton is imported"
os.environ["TRITON_INTERPRET"] = "1"

import random

import pytest
import torch

from kernels import paged_decode as module
from kernels.paged_decode import Blocks, num_splits, paged_decode
from venus.model.qwen3 import Qwen3, Qwen3Config
from venus.rollout.sampler import Sampler, SamplingParams

PAGE = 16
NEVER_WRITTEN = float("nan")


def problem(
    lengths,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    *,
    page_size=PAGE,
    dtype=torch.float32,
    seed=0,
    spare=3,
):
    """Queries, pages, tables and lengths, and each row's keys and values [M, K, E] on their own.
    Pages are dealt at random; what no row holds is NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in lengths]
    # page 0 is nobody's
    order = (torch.randperm(sum(counts) + spare, generator=generator) + 1).tolist()
    pages = [
        torch.full((len(order) + 1, page_size, num_kv_heads, head_dim), NEVER_WRITTEN, dtype=dtype)
        for _ in range(2)
    ]
    tables, rows = torch.zeros(len(lengths), max(1, *counts) + 1, dtype=torch.int32), []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        held, order = order[:count], order[count:]
        tables[row, :count] = torch.tensor(held, dtype=torch.int32)
        rows.append(
            [
                torch.randn(length, num_kv_heads, head_dim, generator=generator).to(dtype)
                for _ in range(2)
            ]
        )
        for buffer, values in zip(pages, rows[-1], strict=True):
            for number, page in enumerate(held):
                part = values[number * page_size : (number + 1) * page_size]
                buffer[page, : len(part)] = part
    q_RHE = torch.randn(len(lengths), num_heads, head_dim, generator=generator).to(dtype)
    return (q_RHE, *pages, tables, torch.tensor(lengths, dtype=torch.int32)), rows


def expected(q_RHE, rows, dtype):
    """Each row by itself, in `dtype`."""
    outputs = []
    for q_HE, (k_MKE, v_MKE) in zip(q_RHE.to(dtype), rows, strict=True):
        group = len(q_HE) // k_MKE.shape[1]
        k_MHE, v_MHE = (x.to(dtype).repeat_interleave(group, 1) for x in (k_MKE, v_MKE))
        scores_HM = torch.einsum("he,mhe->hm", q_HE, k_MHE) / q_HE.shape[1] ** 0.5
        outputs.append(torch.einsum("hm,mhe->he", scores_HM.softmax(-1), v_MHE))
    return torch.stack(outputs)


def errors(arguments, rows, kernel="triton"):
    """(ours, torch in the same dtype): the largest errors against fp64."""
    exact = expected(arguments[0], rows, torch.float64)
    plain = expected(arguments[0], rows, arguments[0].dtype)
    return [
        (x.double() - exact).abs().max().item()
        for x in (paged_decode(*arguments, kernel=kernel), plain)
    ]


RAGGED = [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 100, 37]


@pytest.mark.parametrize("kernel", ["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 2), (5, 1)])
def test_no_worse_than_torch_in_the_same_dtype(num_heads, num_kv_heads, dtype, kernel):
    """One token, a page less one, a whole page, one more, several; twice for bf16, whose rounding
    the interpreter truncates.
    """
    ours, plain = errors(*problem(RAGGED, num_heads, num_kv_heads, dtype=dtype), kernel)
    assert ours <= (2 if dtype == torch.bfloat16 else 1) * plain + 2e-6


def test_real_head_shapes():
    """32 query heads on 8 kv heads of 128, in pages of 256."""
    assert errors(*problem([300], 32, 8, 128, page_size=256))[0] < 5e-6


@pytest.mark.parametrize("kernel", ["triton", "torch"])
def test_a_row_without_tokens_gives_zeros(kernel):
    arguments, rows = problem([0, 20, 0])
    out = paged_decode(*arguments, kernel=kernel)
    assert out[[0, 2]].abs().max() == 0
    torch.testing.assert_close(
        out[1:2], expected(arguments[0][1:2], rows[1:2], torch.float32), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("seed", range(16))
def test_random_tables(monkeypatch, seed):
    """1-5 rows of up to 150 tokens, three page sizes, blocks smaller than a page, as large, and
    larger (then as large), 1-64 splits.
    """
    choose = random.Random(seed)
    monkeypatch.setitem(
        module.BLOCKS,
        "interpreter",
        Blocks(choose.choice([16, 32, 64]), choose.choice([1, 8, 64, 500]), 4, 1),
    )
    lengths = [choose.randint(1, 150) for _ in range(choose.randint(1, 5))]
    heads = choose.choice([(1, 1), (2, 1), (4, 1), (4, 2)])
    assert (
        errors(*problem(lengths, *heads, page_size=choose.choice([16, 32, 128]), seed=seed))[0]
        < 5e-6
    )


def test_splits_are_merged_by_their_share_of_the_softmax(monkeypatch):
    """One key holds nearly all the weight and lies in one of many splits: an average of the
    splits would drown it.
    """
    monkeypatch.setitem(module.BLOCKS, "interpreter", Blocks(16, 10_000, 4, 1))
    (q, keys, values, tables, lengths), rows = problem([128], 1, 1)
    rows[0][0][77] = q[0] * 50
    keys[tables[0, 77 // PAGE], 77 % PAGE] = q[0] * 50
    out = paged_decode(q, keys, values, tables, lengths, kernel="triton")
    torch.testing.assert_close(out, rows[0][1][77][None], rtol=1e-5, atol=1e-6)


def test_rows_may_share_pages():
    """A prefix by reference: the same pages in two tables give what two copies give."""
    (q, keys, values, tables, lengths), rows = problem([40, 40], 4, 2)
    tables[1] = tables[0]
    torch.testing.assert_close(
        paged_decode(q, keys, values, tables, lengths, kernel="triton"),
        expected(q, [rows[0], rows[0]], torch.float32),
        rtol=1e-5,
        atol=1e-6,
    )


def test_pages_may_be_views_of_one_tensor_beyond_two_to_the_31():
    """The last page starts 2^31 elements into its buffer (4 GB of address space, few pages of
    memory): 32-bit offsets would wrap.
    """
    (q, keys, values, tables, lengths), rows = problem([30], 1, 1, dtype=torch.bfloat16)
    step = 2**31 // (len(keys) - 1) + 1
    far = torch.empty(step * (len(keys) - 1) + keys[0].numel(), dtype=torch.bfloat16).as_strided(
        keys.shape, (step, *keys.stride()[1:])
    )
    far.copy_(keys)
    tables[0, :2] = torch.tensor([len(keys) - 1, tables[0, 1]])
    near = paged_decode(q, keys, values, tables, lengths, kernel="triton")
    torch.testing.assert_close(
        paged_decode(q, far, values, tables, lengths, kernel="triton"),
        near,
        rtol=0,
        atol=0,
        equal_nan=True,
    )


def test_the_sampler_decodes_the_same_with_it():
    """Three rows through a small model, a shared prefix among them: ids and log-probs of
    the contiguous cache.
    """
    model = Qwen3(
        Qwen3Config(50, 32, 48, 2, 4, 2, 16, 1e-6, 1e4, 256, True, "float32")
    ).requires_grad_(False)
    model.init_weights(0)
    outcomes = []
    for how in (
        {"kv_cache": "paged", "page_size": 16, "decode_kernel": "triton"},
        {"kv_cache": "contiguous"},
    ):
        sampler, done = Sampler(model, SamplingParams(()), num_slots=3, capacity=64, **how), []
        first = sampler.open()
        sampler.prefill(first, list(range(20)))
        slots = [first, sampler.fork(first, 20), sampler.open()]
        for slot, ids in zip(slots, ([20, 21], [30], list(range(15))), strict=True):
            sampler.feed(slot, ids, budget=3, key=slot)
        while sampler.rows:
            done += sampler.step()
        outcomes.append(
            sorted((generation.slot, generation.ids, generation.log_probs) for generation in done)
        )
    for (slot, ids, log_probs), wanted in zip(*outcomes, strict=True):
        assert (slot, ids) == wanted[:2] and log_probs == pytest.approx(wanted[2], abs=1e-5)


def test_splits_follow_from_shapes_alone():
    """16 rows of 8 heads on an H100: 128 programs times 8 are enough; no split is
    shorter than a block.
    """
    assert num_splits(module.BLOCKS["sm_90"], 16, 8, 32_768) == 8
    assert num_splits(module.BLOCKS["sm_90"], 1, 8, 200_000) == module.MAX_SPLITS
    assert num_splits(module.BLOCKS["sm_90"], 1, 8, 256) == 4
    assert num_splits(module.BLOCKS["sm_90"], 100, 8, 200_000) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({3: torch.zeros(2, 3, dtype=torch.int64)}, "int32 for 2 rows"),
        ({4: torch.ones(3, dtype=torch.int32)}, "int32 for 2 rows"),
        ({0: torch.zeros(2, 3, 16)}, "shapes do not fit"),
        ({0: torch.zeros(2, 4, 16, dtype=torch.float16)}, "one of bf16 and fp16"),
        ({1: torch.zeros(9, 24, 2, 16), 2: torch.zeros(9, 24, 2, 16)}, "page size 24"),
        ({0: torch.zeros(2, 16, 4).mT}, "strides do not fit"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = list(problem([20, 5])[0])
    for place, value in change.items():
        arguments[place] = value
    with pytest.raises(ValueError, match=message):
        paged_decode(*arguments, kernel="triton")
