"""Cached rows of unequal length against full forward passes. Shapes: R cache rows  K kv heads  T
positions  E head_dim.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

from venus.model.attention import CachedLayout, attend
from venus.model.cache import KVCache, PagedKVCache
from venus.model.weights import load_model

GOLDEN = Path(__file__).parents[1] / "golden"
KIND, KERNEL = "contiguous", "ragged"
# two layers, sums of up to a hundred terms, another order of summation
FP32 = dict(rtol=0, atol=2e-5)
SEQUENCES = [
    torch.randint(64, (90,), generator=torch.Generator().manual_seed(seed)).tolist()
    for seed in range(4)
]


@pytest.fixture(scope="module")
def model():
    return load_model(GOLDEN / "untied_tf4").requires_grad_(False)


@pytest.fixture(scope="module")
def full(model):
    """[4, 90, D]: the hidden states of every sequence without a cache."""
    return model(torch.tensor(SEQUENCES))


@pytest.fixture(
    autouse=True, params=["contiguous-ragged", "paged-ragged", "contiguous-torch", "paged-torch"]
)
def kind(request, monkeypatch):
    """Every test runs over rows of their own and over pages of 8 from a pool that just holds all
    rows, single tokens attended fast and plainly.
    """
    kind, kernel = request.param.split("-")
    monkeypatch.setattr(sys.modules[__name__], "KIND", kind)
    monkeypatch.setattr(sys.modules[__name__], "KERNEL", kernel)
    return kind


def bare_cache(num_layers, num_rows, capacity, num_kv_heads, head_dim):
    shape = {
        "num_layers": num_layers,
        "num_rows": num_rows,
        "capacity": capacity,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }
    shape |= {"dtype": torch.float32, "device": "cpu"}
    return (
        KVCache(**shape)
        if KIND == "contiguous"
        else PagedKVCache(**shape, num_tokens=num_rows * -(-capacity // 8) * 8, page_size=8)
    )


def new_cache(model, num_rows=4, capacity=100):
    config = model.config
    return bare_cache(
        config.num_hidden_layers, num_rows, capacity, config.num_key_value_heads, config.head_dim
    )


def step(model, cache, tokens, advance=True):
    """Run {row: new ids} in the dict's order through the cache and return {row: hidden states}."""
    layout = CachedLayout.of(
        cache,
        list(tokens),
        [len(ids) for ids in tokens.values()],
        model.config.num_groups,
        kernel=KERNEL,
    )
    flat = torch.tensor([token for ids in tokens.values() for token in ids])[None]
    hidden = model(flat, layout.positions_N[None], layout, cache)[0].split(
        [len(ids) for ids in tokens.values()]
    )
    if advance:
        for row, ids in tokens.items():
            cache.advance(row, len(ids))
    return dict(zip(tokens, hidden, strict=True))


def feed(model, cache, upto, order=None):
    """Extend every row r of the cache with its sequence up to `upto[r]` tokens and return the
    hidden states of what was added.
    """
    order = range(len(upto)) if order is None else order
    return step(
        model, cache, {row: SEQUENCES[row][cache.lengths[row] : upto[row]] for row in order}
    )


# Extending and decoding


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]])
def test_ragged_extension_in_any_order_equals_the_full_forward(model, full, order):
    """First chunks of 5, 1, 17, 64 tokens, then 3, 40, 2, 1 more: every hidden state equals that
    of the whole sequence.
    """
    cache, done = new_cache(model), [0] * 4
    for upto in ([5, 1, 17, 64], [8, 41, 19, 65]):
        got = feed(model, cache, upto, order)
        for row in range(4):
            torch.testing.assert_close(got[row], full[row, done[row] : upto[row]], **FP32)
        done = upto
    assert cache.lengths == done


def test_decoding_step_by_step_equals_the_full_forward(model, full):
    """Ragged rows, one token each per step, across the width of 64 at which the
    batched path grows.
    """
    cache = new_cache(model)
    start = [5, 1, 17, 60]
    feed(model, cache, start)
    for i in range(20):
        got = feed(model, cache, [n + i + 1 for n in start])
        for row, n in enumerate(start):
            torch.testing.assert_close(got[row][0], full[row, n + i], **FP32)


def test_one_token_in_some_rows_equals_the_full_forward(model, full):
    """Rows 3 and 1 alone, in that order: not the batched path; rows 0 and 2 stay as they are."""
    cache = new_cache(model)
    feed(model, cache, [5, 1, 17, 60])
    got = step(model, cache, {3: SEQUENCES[3][60:61], 1: SEQUENCES[1][1:2]})
    torch.testing.assert_close(got[3][0], full[3, 60], **FP32)
    torch.testing.assert_close(got[1][0], full[1, 1], **FP32)
    assert cache.lengths == [5, 2, 17, 61]
    torch.testing.assert_close(feed(model, cache, [6, 3, 18, 62])[0][0], full[0, 5], **FP32)


def test_extension_and_decoding_may_be_mixed_in_one_step(model, full):
    cache = new_cache(model)
    feed(model, cache, [5, 1, 17, 60])
    got = feed(model, cache, [6, 31, 18, 60 + 9])
    for row, span in enumerate([(5, 6), (1, 31), (17, 18), (60, 69)]):
        torch.testing.assert_close(got[row], full[row, slice(*span)], **FP32)


def test_of_the_last_block_only_what_is_wanted_is_made_and_the_cache_is_whole(model, full):
    """A decoding row and two chunks; wanted are the last tokens of two rows, and one
    amid a chunk, twice.
    """
    cache = new_cache(model)
    feed(model, cache, [5, 1, 17, 60])
    counts = {0: 1, 1: 30, 3: 9}
    ids = [
        token
        for row, count in counts.items()
        for token in SEQUENCES[row][cache.lengths[row] :][:count]
    ]
    layout = CachedLayout.of(
        cache,
        list(counts),
        list(counts.values()),
        model.config.num_groups,
        kernel=KERNEL,
        wanted=[0, 39, 10, 10],
    )
    hidden = model(torch.tensor([ids]), layout.positions_N[None], layout, cache)[0]
    if KERNEL == "torch":
        assert layout.last is None
        hidden = hidden[[0, 39, 10, 10]]
    torch.testing.assert_close(
        hidden, torch.stack([full[0, 5], full[3, 68], full[1, 10], full[1, 10]]), **FP32
    )
    for row, count in counts.items():
        cache.advance(row, count)
    for row, got in enumerate(feed(model, cache, [7, 33, 19, 71]).values()):
        end = cache.lengths[row]
        torch.testing.assert_close(got, full[row, end - len(got) : end], **FP32)


def test_greedy_with_the_cache_equals_greedy_without(model):
    """Ragged prompts decoded together; the golden continuations of transformers
    are of the same model.
    """
    records = json.loads((GOLDEN / "untied_tf4" / "greedy.json").read_text())["greedy"]
    cache = new_cache(model, num_rows=len(records))
    new = {row: record["prompt"] for row, record in enumerate(records)}
    out = [[] for _ in records]
    for _ in records[0]["continuation"]:
        hidden = step(model, cache, new)
        new = {row: [int(model.logits(states[-1:]).argmax())] for row, states in hidden.items()}
        for row, ids in new.items():
            out[row] += ids
    assert out == [record["continuation"] for record in records]


def test_a_row_decodes_to_the_same_bits_whatever_its_mates_hold(model):
    """Row 1 beside other sequences of other lengths: the batched paths keep every bit, the plain
    one over pages within one width of 64.
    """
    results = []
    for mates in ([5, 17, 40], [33, 2, 9 if KERNEL == "torch" else 89]):
        cache = new_cache(model)
        step(model, cache, {1: SEQUENCES[1][:20]})  # prefilled alone
        step(
            model, cache, {row: SEQUENCES[row][:n] for row, n in zip((0, 2, 3), mates, strict=True)}
        )
        results.append(
            step(model, cache, {row: SEQUENCES[row][cache.lengths[row] :][:1] for row in range(4)})[
                1
            ]
        )
    assert torch.equal(*results)


def test_grouped_heads_read_their_own_kv_head_when_decoding():
    """Six query heads over two kv heads, one query a row, against attention written out."""
    generator = torch.Generator().manual_seed(0)
    cache = bare_cache(1, 2, 10, 2, 8)
    past_k, past_v = torch.randn(2, 2, 4, 2, 8, generator=generator)  # rows, positions, kv heads, E
    for row in range(2):
        cache.reserve(row, 4)
        cache.write(
            0, torch.from_numpy(cache.places([row] * 4, range(4))), past_k[row], past_v[row]
        )
        cache.advance(row, 4)
    q, k, v = (torch.randn(1, 2, heads, 8, generator=generator) for heads in (6, 2, 2))
    out = attend(q, k, v, CachedLayout.of(cache, [0, 1], [1, 1], 3, kernel=KERNEL), cache, 0)
    for row in range(2):
        keys, values = (
            torch.cat([past[row], new[0, row, None]]).repeat_interleave(3, dim=1)
            for past, new in ((past_k, k), (past_v, v))
        )
        weights = (torch.einsum("he,the->ht", q[0, row], keys) / 8**0.5).softmax(-1)
        torch.testing.assert_close(
            out[0, row], torch.einsum("ht,the->he", weights, values), rtol=0, atol=2e-6
        )


# Forking and truncating


def test_a_forked_row_goes_on_like_its_source(model, full):
    """A prompt prefilled once and forked to a rollout group; each copy then lives on its own."""
    cache = new_cache(model)
    step(model, cache, {2: SEQUENCES[0][:30]})
    cache.fork(2, [0, 3], 30)
    assert cache.lengths == [30, 0, 30, 30]
    # row 0 turns elsewhere
    other = step(model, cache, {0: SEQUENCES[1][30:40], 3: SEQUENCES[0][30:35]})
    torch.testing.assert_close(other[3], full[0, 30:35], **FP32)
    torch.testing.assert_close(
        step(model, cache, {2: SEQUENCES[0][30:41]})[2], full[0, 30:41], **FP32
    )
    torch.testing.assert_close(
        step(model, cache, {3: SEQUENCES[0][35:37]})[3], full[0, 35:37], **FP32
    )


def test_a_row_that_fills_its_buffer_can_be_forked(model):
    """A prompt of more than 514 tokens, read at once, grows the buffers to exactly its length; the
    copy from the whole buffer into itself was refused as overlapping memory, so that no such prompt
    could be shared by a group.
    """
    ids = torch.randint(64, (560,), generator=torch.Generator().manual_seed(0)).tolist()
    cache = new_cache(model, num_rows=3, capacity=600)
    step(model, cache, {1: ids})
    assert KIND == "paged" or cache.keys_RKTE[0].shape[2] == 560
    cache.fork(1, [0, 2], 560)
    assert cache.lengths == [560] * 3
    for layer in range(2):
        for source, *copies in zip(
            *(cache.read(layer, row, 560) for row in (1, 0, 2)), strict=True
        ):
            assert source.any() and all(torch.equal(source, copy) for copy in copies)


def test_forking_a_prefix_of_a_row_equals_having_read_only_that(model, full):
    """The target held something longer before: its old tail must not show."""
    cache = new_cache(model)
    feed(model, cache, [40, 60, 0, 0], order=[0, 1])
    cache.fork(0, [1], 25)
    assert cache.lengths[:2] == [40, 25]
    torch.testing.assert_close(
        step(model, cache, {1: SEQUENCES[0][25:30]})[1], full[0, 25:30], **FP32
    )


def test_a_truncated_row_forgets_what_it_held(model, full):
    cache = new_cache(model)
    step(
        model,
        cache,
        {
            0: SEQUENCES[0][:10] + SEQUENCES[3][:20],
            1: SEQUENCES[1][:50],
            2: SEQUENCES[2][:5],
            3: SEQUENCES[3][:5],
        },
    )
    cache.truncate(0, 10)
    cache.truncate(1, 0)
    # the batched path
    got = step(
        model,
        cache,
        {0: SEQUENCES[0][10:11], 1: SEQUENCES[1][:1], 2: SEQUENCES[2][5:6], 3: SEQUENCES[3][5:6]},
    )
    torch.testing.assert_close(got[0][0], full[0, 10], **FP32)
    torch.testing.assert_close(got[1][0], full[1, 0], **FP32)
    torch.testing.assert_close(
        feed(model, cache, [25, 9, 6, 6], order=[1, 0])[1], full[1, 1:9], **FP32
    )


def test_a_row_cannot_be_lengthened_by_truncating_or_forking(model):
    cache = new_cache(model)
    step(model, cache, {0: SEQUENCES[0][:10]})
    with pytest.raises(AssertionError, match="truncate row 0 of 10 to 11"):
        cache.truncate(0, 11)
    with pytest.raises(AssertionError, match="fork 11 of 10"):
        cache.fork(0, [1], 11)


# Scratch writes and capacity


def test_a_write_beyond_the_length_is_invisible(model, full):
    """An answer branch, or the token of an idle slot, is written and forgotten; later
    steps keep every bit.
    """
    caches = [new_cache(model) for _ in range(2)]
    results = []
    for cache, with_scratch in zip(caches, (True, False), strict=True):
        feed(model, cache, [5, 1, 17, 60])
        if with_scratch:
            step(model, cache, {0: SEQUENCES[3][:20], 3: SEQUENCES[1][:7]}, advance=False)
            step(model, cache, {row: [63] for row in range(4)}, advance=False)
        results.append(
            [
                *feed(model, cache, [6, 2, 18, 61]).values(),
                *feed(model, cache, [9, 7, 19, 62]).values(),
            ]
        )
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert caches[0].lengths == [9, 7, 19, 62]


def test_answers_scored_from_the_cache_leave_it_as_it_was(model, full):
    """Cut at b - 1, feed token b - 1 again: branches at 10, 30 and 50 give equal bits in either
    order, and the trunk goes on after them.
    """
    answer = [7, 21, 3]
    results = {}
    for order in ([10, 30, 50], [50, 30, 10]):
        cache = new_cache(model, num_rows=2)
        step(model, cache, {0: SEQUENCES[0][:60]})
        for cut in order:
            cache.fork(0, [1], cut - 1)
            states = step(model, cache, {1: [SEQUENCES[0][cut - 1], *answer]}, advance=False)[1]
            results.setdefault(cut, []).append(states)
            torch.testing.assert_close(
                states, model(torch.tensor([SEQUENCES[0][:cut] + answer]))[0, cut - 1 :], **FP32
            )
        assert cache.lengths[0] == 60
        torch.testing.assert_close(
            step(model, cache, {0: SEQUENCES[0][60:62]})[0], full[0, 60:62], **FP32
        )
    assert all(torch.equal(*pair) for pair in results.values())


def test_advancing_beyond_the_capacity_is_an_error_that_changes_nothing(model):
    cache = new_cache(model, num_rows=1, capacity=8)
    step(model, cache, {0: SEQUENCES[0][:7]})
    with pytest.raises(AssertionError, match=r"row 0: 7 \+ 2 positions of 8"):
        cache.advance(0, 2)
    assert cache.lengths == [7]


def test_more_tokens_than_the_capacity_are_refused_before_anything_is_written(model):
    """On a GPU the write itself would be a device-side assert that kills the process."""
    cache = new_cache(model, num_rows=2, capacity=8)
    with pytest.raises(
        ValueError, match="a row of 12 tokens exceeds the cache of 8: raise the context length"
    ):
        step(model, cache, {1: SEQUENCES[0][:12]})
    assert cache.lengths == [0, 0]
    assert all((part == 0).all() for row in range(2) for part in cache.read(0, row, 8))


@pytest.mark.parametrize("batched", [False, True])
def test_buffers_that_grow_keep_what_they_held(model, batched):
    """Buffers start small and double: rows of 700 and 20 tokens, fed in steps that cross 257 and
    514, equal full forwards.
    """
    tokens = [
        torch.randint(64, (n,), generator=torch.Generator().manual_seed(n)).tolist()
        for n in (700, 20)
    ]
    cache = new_cache(model, num_rows=2, capacity=1000)
    assert KIND == "paged" or cache.keys_RKTE[0].shape[2] < 700
    step(model, cache, {0: tokens[0][:250], 1: tokens[1][:5]})
    parts = [step(model, cache, {0: [token], 1: [0]})[0] for token in tokens[0][250:260] * batched]
    parts.append(step(model, cache, {0: tokens[0][cache.lengths[0] : 690]})[0])
    cache.truncate(1, 5)
    torch.testing.assert_close(
        torch.cat(parts), model(torch.tensor([tokens[0]]))[0, 250:690], rtol=0, atol=1e-4
    )
    torch.testing.assert_close(
        step(model, cache, {1: tokens[1][5:]})[1], model(torch.tensor([tokens[1]]))[0, 5:], **FP32
    )
    assert KIND == "paged" or cache.keys_RKTE[0].shape[2] <= cache.capacity + 1
