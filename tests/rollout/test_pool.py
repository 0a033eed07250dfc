"""A pool of pages against rows of their own: the same ids and log-probs whatever is shared,
preempted or waiting, and no page lost or written twice.
"""

import numpy as np
import pytest
import torch
from agent_fakes import tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from venus.model.cache import PagedKVCache
from venus.rollout.sampler import Sampler, SamplingParams

STOP, CAPACITY, PAGE = 63, 56, 4
MODEL = tiny_model(64)
SMALLEST = CAPACITY  # tokens of a pool that holds one full row


class CheckedSampler(Sampler):
    """A sampler over a pool that checks it before and after every pass: no page is lost, no row
    writes where another one reads.
    """

    def _forward(self, singles, chunks):
        ends = {row.slot: self.cache.lengths[row.slot] + 1 for row in singles}
        ends |= {
            chunk.row.slot: self.cache.lengths[chunk.row.slot] + len(chunk.ids) for chunk in chunks
        }
        for slot, end in ends.items():
            self.cache.reserve(slot, end)
        written = [
            page
            for slot, end in ends.items()
            for page in set(self._pages(slot, self.cache.lengths[slot], end))
        ]
        assert len(written) == len(set(written)) and 0 not in written
        assert all(self.cache.holders[page] == 1 for page in written)
        out = super()._forward(singles, chunks)
        self.check()
        return out

    def _pages(self, slot, start, end):
        return self.cache.tables_RW[slot, start // PAGE : -(-end // PAGE)].tolist()

    def check(self):
        """Every page is free or held, by as many rows as its count says, and a row holds
        what its length needs.
        """
        held = [
            page
            for slot, count in enumerate(self.cache.num_held)
            for page in self.cache.tables_RW[slot, :count].tolist()
        ]
        for page in range(1, len(self.cache.holders)):
            assert self.cache.holders[page] == held.count(page)
            assert (page in self.cache.free) == (page not in held)
        assert len(self.cache.free) == len(set(self.cache.free))
        assert self.cache.num_held == [-(-length // PAGE) for length in self.cache.lengths]


def paged(num_rows, kv_tokens, num_slots=3, prefill_tokens=9, **options):
    options |= {
        "num_slots": num_slots,
        "capacity": CAPACITY,
        "num_rows": num_rows,
        "prefill_tokens": prefill_tokens,
    }
    return CheckedSampler(
        MODEL, SamplingParams((STOP,)), kv_tokens=kv_tokens, page_size=PAGE, **options
    )


def contiguous(num_rows):
    return Sampler(MODEL, SamplingParams((STOP,)), num_slots=num_rows, capacity=CAPACITY)


def ids_of(rng, count):
    return rng.integers(0, 62, count).tolist()


class Job:
    """A row's life: a prompt, perhaps the prefix of a group's, then turns of sampled tokens with
    observations between them.
    """

    def __init__(self, number, seed):
        rng = np.random.default_rng(seed)
        self.group = int(rng.integers(3))
        self.prompt = ids_of(np.random.default_rng(self.group), 3 + 5 * self.group) + ids_of(
            rng, int(rng.integers(1, 4))
        )
        self.shared = 3 + 5 * self.group
        self.observations = [
            ids_of(rng, int(rng.integers(1, 7))) for _ in range(int(rng.integers(0, 3)))
        ]
        self.budget = int(rng.integers(1, 7))
        self.key = 100 + number
        self.pause = int(rng.integers(0, 6))
        self.answers = [
            ids_of(rng, int(rng.integers(1, 4))) for _ in range(int(rng.integers(0, 3)))
        ]
        self.turns, self.values, self.slot, self.waits = [], [], None, 0

    def feed(self, sampler, ids):
        sampler.feed(self.slot, ids, budget=self.budget, key=self.key + 1000 * len(self.turns))
        if self.answers:
            sampler.score(
                self.slot, [5], self.answers, lambda values: self.values.append(list(values))
            )


def play(sampler, jobs):
    """Open the jobs as rows become free, let each wait between its turns, and finish them all;
    returns [(turns, values)].
    """
    waiting, active, idle, steps = list(jobs), {}, [], 0
    while waiting or active:
        while waiting and sampler.free:
            job = waiting.pop(0)
            source = next((other for other in active.values() if other.group == job.group), None)
            if source is not None:
                job.slot = sampler.fork(source.slot, job.shared)
            else:
                job.slot = sampler.open()
                sampler.prefill(job.slot, job.prompt[: job.shared])
            active[job.slot] = job
            job.feed(sampler, job.prompt[job.shared :])
        for generation in sampler.step():
            job = active[generation.slot]
            job.turns.append(generation)
            if len(job.turns) > len(job.observations):
                del active[job.slot]
                sampler.close(job.slot)
            else:
                idle.append([steps + job.pause, job])
        for due, job in [entry for entry in idle if entry[0] <= steps]:
            idle.remove([due, job])
            job.feed(sampler, [job.turns[-1].ids[-1], *job.observations[len(job.turns) - 1]])
        steps += 1
        assert steps < 5000, "the rows do not come to an end"
    return [(job.turns, job.values) for job in jobs]


def assert_same(got, wanted):
    for (turns, values), (wanted_turns, wanted_values) in zip(got, wanted, strict=True):
        assert [turn.ids for turn in turns] == [turn.ids for turn in wanted_turns]
        for turn, wanted_turn in zip(turns, wanted_turns, strict=True):
            np.testing.assert_allclose(turn.log_probs, wanted_turn.log_probs, rtol=0, atol=1e-5)
        np.testing.assert_allclose(np.ravel(values), np.ravel(wanted_values), rtol=0, atol=1e-5)


@settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(
    seeds=st.lists(st.integers(0, 10_000), min_size=1, max_size=14),
    num_rows=st.integers(1, 12),
    extra=st.integers(0, 120),
    num_slots=st.integers(1, 6),
    prefill_tokens=st.integers(1, 20),
)
def test_any_pool_gives_the_ids_and_log_probs_of_rows_of_their_own(
    seeds, num_rows, extra, num_slots, prefill_tokens
):
    """Random prompts that share prefixes, turns, pauses and answers to score, over pools from one
    row's worth up. fp32 rounding stays below 1e-5.
    """
    jobs = [Job(number, seed) for number, seed in enumerate(seeds)]
    wanted = play(contiguous(14), jobs)
    sampler = paged(
        num_rows,
        SMALLEST + extra,
        num_slots=min(num_slots, num_rows),
        prefill_tokens=prefill_tokens,
    )
    assert_same(play(sampler, [Job(number, seed) for number, seed in enumerate(seeds)]), wanted)
    sampler.check()
    assert sorted(sampler.cache.free) == list(range(1, (SMALLEST + extra) // PAGE + 1)), (
        "every page came back"
    )


def test_the_smallest_pool_serves_many_rows_by_preempting_the_youngest():
    """Six rows of up to 56 tokens over a pool of 56: each is pushed out and read again, and ends
    with the ids it has alone.
    """
    seeds = [3, 14, 15, 92, 65, 35]
    sampler = paged(6, SMALLEST, num_slots=6)
    got = play(sampler, [Job(number, seed) for number, seed in enumerate(seeds)])
    assert sampler.num_preempted > 0
    assert_same(got, play(contiguous(6), [Job(number, seed) for number, seed in enumerate(seeds)]))


def test_rows_start_in_their_order_and_leave_room_to_grow():
    """Prompts of 11 tokens are three pages of 4 and grow into a fourth. Of 14 pages three rows take
    nine and leave one for each; a fourth row would find room at first and soon push out or be
    pushed out, and the short one behind it does not overtake it.
    """
    sampler = paged(5, SMALLEST, num_slots=5, prefill_tokens=100)
    slots = [sampler.open() for _ in range(5)]
    for slot, length in zip(slots, (11, 11, 11, 11, 2), strict=True):
        sampler.feed(slot, ids_of(np.random.default_rng(slot), length), budget=5, key=slot)
    sampler.step()
    assert [sampler.cache.lengths[slot] for slot in slots] == [11, 11, 11, 0, 0]
    while sampler.rows:
        for generation in sampler.step():
            sampler.close(generation.slot)
    assert sampler.num_preempted == 0


def test_a_pool_of_one_page_less_than_a_row_is_refused_with_the_figures():
    with pytest.raises(
        ValueError,
        match=r"a KV pool of 55 tokens \(13 pages of 4\) cannot hold one row of 56: give it at "
        r"least 56 tokens",
    ):
        paged(6, SMALLEST - 1)


def test_a_full_row_fits_the_smallest_pool():
    sampler = paged(2, SMALLEST)
    slot = sampler.open()
    sampler.feed(slot, ids_of(np.random.default_rng(0), CAPACITY - 5), budget=6, key=1)
    other = sampler.open()
    sampler.feed(other, [1, 2, 3], budget=6, key=2)
    done = {}
    while sampler.rows:
        for generation in sampler.step():
            done[generation.slot] = generation
            sampler.close(generation.slot)
    assert len(done[slot].ids) == 6 or done[slot].stopped
    assert done[other].ids


def test_a_group_holds_its_prompt_once_until_a_row_writes():
    """A prompt of 10 tokens is three pages of 4; four rows hold the same three, and each takes a
    copy of the last one only, at its first token.
    """
    sampler = paged(4, 400, num_slots=4)
    prompt = ids_of(np.random.default_rng(0), 11)
    slots = [sampler.open()]
    sampler.prefill(slots[0], prompt[:10])
    slots += [sampler.fork(slots[0], 10) for _ in range(3)]
    assert 100 - len(sampler.cache.free) == 3
    for key, slot in enumerate(slots):
        sampler.feed(slot, prompt[10:], budget=3, key=key)
    sampler.step()
    assert 100 - len(sampler.cache.free) == 2 + 4
    assert sampler.cache.tables_RW[slots, 0].tolist() == [sampler.cache.tables_RW[0, 0]] * 4


def test_a_page_shared_by_two_rows_is_never_written():
    """Rows fork in mid-page; what the source then writes must not show in the fork, nor
    the other way round.
    """
    shape = {
        "num_layers": 1,
        "num_rows": 2,
        "capacity": 16,
        "num_kv_heads": 1,
        "head_dim": 2,
        "dtype": torch.float32,
        "device": "cpu",
    }
    cache = PagedKVCache(**shape, num_tokens=32, page_size=4)

    def write(row, value, count):
        start = cache.lengths[row]
        cache.reserve(row, start + count)
        places = torch.from_numpy(cache.places([row] * count, range(start, start + count)))
        cache.write(0, places, torch.full((count, 1, 2), value), torch.full((count, 1, 2), value))
        cache.advance(row, count)

    write(0, 1.0, 6)
    cache.fork(0, [1], 5)
    write(1, 2.0, 3)
    write(0, 3.0, 3)
    assert cache.read(0, 0, 9)[0][0, :, 0].tolist() == [1.0] * 6 + [3.0] * 3
    assert cache.read(0, 1, 8)[0][0, :, 0].tolist() == [1.0] * 5 + [2.0] * 3


def test_rows_that_start_together_do_not_count_the_same_pages():
    """Three prompts of 18 tokens, five pages each, over 14 pages: the third found the pages free
    that the second had been promised, and the pass ended in an assertion. It waits until the first
    is done.
    """
    sampler, slots = paged(3, SMALLEST, prefill_tokens=100), []
    for key in range(3):
        slots.append(sampler.open())
        sampler.feed(slots[-1], ids_of(np.random.default_rng(key), 18), budget=2, key=key)
    sampler.step()
    assert [sampler.cache.lengths[slot] for slot in slots] == [18, 18, 0]
    assert sampler.free == []
    done = {}
    while sampler.rows:
        for generation in sampler.step():
            done[generation.slot] = generation
            sampler.close(generation.slot)
    assert sorted(done) == slots


def test_a_row_that_waits_for_its_tool_costs_no_slot():
    """Two slots, three rows: while one waits, the other two decode; every pass has at
    most two single tokens.
    """
    sampler, slots = paged(3, 400, num_slots=2), []
    for key in range(3):
        slots.append(sampler.open())
        sampler.feed(slots[-1], [key + 1, 7], budget=8 if key else 1, key=key)
    sampler.step()  # all read their prompts and draw
    assert slots[0] not in sampler.rows
    before = sampler.num_decoded
    sampler.step()
    assert sampler.num_decoded - before == 2


def test_a_long_observation_is_read_while_other_rows_decode():
    """32 tokens in chunks of 4 take eight passes; the row beside them draws a token in each."""
    sampler = Sampler(MODEL, SamplingParams(()), num_slots=2, capacity=CAPACITY, prefill_tokens=4)
    busy, reader = sampler.open(), sampler.open()
    sampler.feed(busy, [1], budget=20, key=1)
    sampler.feed(reader, ids_of(np.random.default_rng(0), 32), budget=2, key=2)
    row = sampler.rows[busy]
    for count in range(1, 8):
        sampler.step()
        assert len(row.generation.ids) == count and not sampler.rows[reader].generation.ids
    sampler.step()
    assert len(sampler.rows[reader].generation.ids) == 1


# The CUDA graph


def test_a_graph_of_all_slots_gives_the_ids_of_single_passes(monkeypatch):
    """Its buffers stay, and idle slots write to page 0: everything but the capture itself, for
    which a stand-in repeats the pass on the CPU.
    """

    def capture(forward):
        output = forward()
        return lambda: output.copy_(forward()), output

    monkeypatch.setattr("venus.rollout.decode_graph.capture", torch.inference_mode()(capture))
    seeds, ids = [3, 14, 15, 92], []
    for cuda_graph in (False, True):
        sampler = paged(4, 200, num_slots=4, decode_kernel="torch")
        sampler.cuda_graph = cuda_graph
        ids.append(play(sampler, [Job(number, seed) for number, seed in enumerate(seeds)]))
    assert_same(*ids)


# Answers scored in passing


@pytest.mark.parametrize("kv_tokens", [None, SMALLEST])
def test_a_scored_answer_has_the_log_prob_of_a_forward_pass_and_changes_nothing(kv_tokens):
    rng = np.random.default_rng(1)
    context, prefix, answers = ids_of(rng, 13), [5, 6], [[7, 8, 9], [11]]
    plain, scoring, values = contiguous(1), paged(1, kv_tokens or 400), []
    for sampler in (plain, scoring):
        sampler.feed(sampler.open(), context, budget=8, key=3)
    scoring.score(0, prefix, answers, values.extend)
    wanted, got = (
        [generation for _ in range(12) for generation in sampler.step()]
        for sampler in (plain, scoring)
    )
    assert got[0].ids == wanted[0].ids
    for answer, value in zip(answers, values, strict=True):
        ids = torch.tensor([[*context, *prefix, *answer]])
        mask = (torch.arange(ids.shape[1] - 1) >= ids.shape[1] - 1 - len(answer))[None]
        log_probs = MODEL.token_log_probs(ids[:, :-1], ids[:, 1:], mask)[mask]
        assert value == pytest.approx(log_probs.mean().item(), abs=1e-5)
    # the last id once more, for the second answer
    assert scoring.num_scored == sum(len(prefix) + len(answer) - 1 for answer in answers) + 1


def test_an_answer_without_room_is_refused_with_the_figures():
    sampler = contiguous(1)
    sampler.feed(sampler.open(), [1] * 54, budget=2, key=0)
    with pytest.raises(
        ValueError,
        match="a context of 54 tokens and an answer to score, 57 in all, exceed the context of 56",
    ):
        sampler.score(0, [2], [[3, 4, 5]], print)


# Choices


def test_what_auto_came_to_is_named():
    kernels = {"decode_kernel": "ragged", "chunk_kernel": "torch", "cuda_graph": False}
    assert (
        contiguous(1).choices
        == {"kv_cache": "contiguous", "kv_tokens": None, "page_size": None} | kernels
    )
    assert paged(1, 60).choices == {"kv_cache": "paged", "kv_tokens": 60, "page_size": 4} | kernels


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache": "contiguous", "kv_tokens": 400}, "kv_cache contiguous on cpu"),
        ({"cuda_graph": True}, "need kv_cache paged"),
        ({"kv_cache": "paged", "cuda_graph": True}, "cuda_graph True.*they need a GPU"),
        (
            {"kv_cache": "paged", "decode_kernel": "varlen"},
            "decode_kernel varlen on cpu: they need a GPU",
        ),
        ({"decode_kernel": "triton"}, "a decode kernel for pages.* need kv_cache paged"),
    ],
)
def test_what_the_device_cannot_do_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampler(MODEL, SamplingParams(()), num_slots=1, capacity=CAPACITY, **options)
