"""Batched decoding over a KV cache: rows of different lengths that join and leave at any step,
noise that belongs to the row.

The sampler knows token ids, budgets and stop ids, and nothing of tools or text. A row is open from
its prompt to its last token; while its caller does something else it keeps its context and costs no
slot. A step is one forward pass: one token of every row that is decoding, `num_slots` at most, and
chunks of what other rows have yet to read. A token is drawn by inverting the cumulative
distribution at one uniform number from (key, position), so a row's ids depend on its prompt, its
key and the weights, not on its batch or on an interruption; in fp32 on the CPU its log-probs have
the same bits in any company.

A pool of pages may hold fewer tokens than all rows could fill. When it is full the youngest row
gives its pages up; what it had is read again when there is room. Nothing is dropped, and the oldest
row that has something to do always has its way. What was read again, or in a pass that also scores
an answer, was summed in another order: a later draw falls otherwise where its uniform lies on the
edge between two tokens, once in tens of thousands of tokens in fp32, more often in bf16.

Shapes: R rows  V vocab  N tokens  D hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.launch import choose_kernel
from venus.model.cache import KVCache, PagedKVCache, check_pool
from venus.model.decode import CachedLayout, chunk_kernel
from venus.model.qwen3 import Qwen3
from venus.rollout.decode_graph import DecodeGraph
from venus.rollout.noise import SamplingParams, draw, uniform_noise

FREE_SHARE = 0.9  # of the free GPU memory goes to the pool; the rest is for activations and logits
# tokens of a CPU step are padded to a multiple: a matrix product of few rows would
# round them otherwise
PAD = 8
KV_CACHES = ("auto", "paged", "contiguous")
DECODE_KERNELS = ("auto", "triton", "varlen", "ragged", "torch")


@dataclass
class Generation:
    """What one `feed` produced: sampled ids, the log-prob of each under the full temperature-scaled
    softmax (before top-k and top-p; temperature 1 when greedy), the probability mass that top-k and
    top-p kept, and whether a stop id (the last id, then) or the budget ended it.
    """

    slot: int
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    kept_mass: list[float] = field(default_factory=list)
    stopped: bool = False


@dataclass
class _Row:
    """An open row. Ids beyond the cached length are pending; the last one is what the next
    token is drawn from.
    """

    slot: int
    number: int  # in the order of opening
    ids: list[int] = field(default_factory=list)
    generation: Generation | None = None
    budget: int = 0
    key: int = 0
    # (prefix, answer) to be scored before a token is drawn
    answers: list[tuple[list[int], list[int]]] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    done: Callable[[list[float]], None] | None = None


class _Chunk(NamedTuple):
    """Several ids of a row to run in a step: the first `kept` stay, the last of those draws a token
    if `draws`, the others are an answer's branch.
    """

    row: _Row
    ids: list[int]
    kept: int
    draws: bool
    answer: Sequence[int] = ()


def _kernel_of(decode_kernel: str, weight: Tensor) -> str:
    """The kernel that a decode step uses beside these weights; ValueError for what they do not
    take.
    """
    takes_ragged = not weight.is_cuda and weight.dtype in (torch.float32, torch.float64)
    if decode_kernel == "ragged" and not takes_ragged:
        raise ValueError(
            f"decode_kernel ragged on {weight.device} in {weight.dtype}: it needs the CPU and fp32"
        )
    if decode_kernel == "auto" and takes_ragged:
        return "ragged"
    if decode_kernel in ("varlen", "ragged"):
        return decode_kernel
    return choose_kernel(decode_kernel, weight.device)


class Sampler:
    """Continuous batching: `num_rows` open rows (default `num_slots`) of `capacity` positions each,
    of which `num_slots` decode at once.

    open/fork a slot, feed it ids with a budget and a key, call `step` until its Generation comes
    back, feed again or close. The caller reads `length(slot)` for what the row holds. fp32 on CPU:
    log-probs equal `Qwen3.token_log_probs(temperature=T)` to 1e-5.

    kv_cache: "paged", one pool of `kv_tokens` tokens; "contiguous", every row its own stretch,
    which is faster on the CPU; "auto", paged on CUDA or where kv_tokens is given. kv_tokens None:
    all rows full, on CUDA at most what fits into the free memory. decode_kernel: "triton" (ours)
    and "varlen" (torch's flash attention), for pages on CUDA; "ragged", for the CPU; "torch",
    plain; "auto" is triton on CUDA, ragged on the CPU. cuda_graph: steps that only decode replay a
    graph of `num_slots` tokens. ValueError for what cannot be had, and for a pool that does not
    hold one row.
    """

    def __init__(
        self,
        model: Qwen3,
        params: SamplingParams,
        *,
        num_slots: int,
        capacity: int,
        num_rows: int | None = None,
        prefill_tokens: int = 2048,
        kv_cache: str = "auto",
        kv_tokens: int | None = None,
        page_size: int | None = None,
        decode_kernel: str = "auto",
        cuda_graph: bool = False,
    ):
        self.model = model
        self.params = params
        self.num_slots = num_slots
        self.capacity = capacity
        self.prefill_tokens = prefill_tokens
        self.device = model.lm_head.weight.device
        is_cuda = self.device.type == "cuda"
        self.is_paged = (
            kv_cache == "paged" or kv_cache == "auto" and (is_cuda or kv_tokens is not None)
        )
        self.page_size = page_size or (256 if is_cuda else 16)  # flash attention takes pages of 256
        self.kv_tokens = kv_tokens
        self.cuda_graph = cuda_graph
        if not self.is_paged and (
            kv_tokens is not None or cuda_graph or decode_kernel in ("triton", "varlen")
        ):
            raise ValueError(
                f"kv_cache {kv_cache} on {self.device}: a size in tokens, a decode kernel "
                "for pages or a CUDA graph need kv_cache paged"
            )
        if (cuda_graph or decode_kernel == "varlen") and not is_cuda:
            raise ValueError(
                f"cuda_graph {cuda_graph}, decode_kernel {decode_kernel} on {self.device}: "
                "they need a GPU"
            )
        self.kernel = _kernel_of(decode_kernel, model.lm_head.weight)
        if kv_tokens is not None:
            check_pool(kv_tokens, self.page_size, capacity)
        self.rows: dict[int, _Row] = {}  # the slots that have something to do
        self._opened: dict[int, _Row] = {}
        self._num_rows = num_rows or num_slots
        self._closed = list(range(self._num_rows))
        self._num_opened = 0
        self._is_full = False
        self.num_decoded = self.num_prefilled = self.num_scored = self.num_preempted = 0

    @cached_property
    def cache(self) -> KVCache:
        """Allocated when the first row is opened, beside the weights as they are then."""
        config, dtype = self.model.config, self.model.lm_head.weight.dtype
        shape = {
            "num_layers": config.num_hidden_layers,
            "num_rows": self._num_rows,
            "capacity": self.capacity,
            "head_dim": config.head_dim,
        }
        shape |= {"num_kv_heads": config.num_key_value_heads, "dtype": dtype, "device": self.device}
        if not self.is_paged:
            return KVCache(**shape)
        if self.kv_tokens is None:
            self.kv_tokens = self._num_rows * -(-self.capacity // self.page_size) * self.page_size
            if self.device.type == "cuda":
                # or the pool of the step before would still count as taken
                torch.cuda.empty_cache()
                token_bytes = (
                    2
                    * config.num_hidden_layers
                    * config.num_key_value_heads
                    * config.head_dim
                    * dtype.itemsize
                )
                self.kv_tokens = min(
                    self.kv_tokens,
                    int(FREE_SHARE * torch.cuda.mem_get_info(self.device)[0]) // token_bytes,
                )
        return PagedKVCache(**shape, num_tokens=self.kv_tokens, page_size=self.page_size)

    @cached_property
    def _graph(self) -> DecodeGraph:
        return DecodeGraph(self.model, self.cache, self.num_slots, self.kernel)

    @property
    def choices(self) -> dict:
        """What "auto" came to, to be saved with a run. kv_tokens None: not bounded,
        or not allocated yet.
        """
        if not self.is_paged:
            return {
                "kv_cache": "contiguous",
                "kv_tokens": None,
                "page_size": None,
                "chunk_kernel": "torch",
                "cuda_graph": False,
                "decode_kernel": self.kernel if self.kernel == "ragged" else "torch",
            }
        # of rollouts, whatever the masters are
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        return {
            "kv_cache": "paged",
            "kv_tokens": self.kv_tokens,
            "page_size": self.page_size,
            "chunk_kernel": chunk_kernel(self.device, dtype),
            "cuda_graph": self.cuda_graph,
            "decode_kernel": self.kernel,
        }

    # ---- rows

    @property
    def free(self) -> list[int]:
        """Rows that may be opened now: none while the pool has no page for each open row and one
        more, or some row waits for pages.
        """
        has_room = not self._is_full and (
            not self._closed or self.cache.fits(self._closed[0], 1, spare=len(self._opened))
        )
        return self._closed if has_room else []

    def open(self) -> int:
        """Take a free slot with an empty row."""
        slot = self._closed.pop(0)
        self._opened[slot] = _Row(slot, self._num_opened)
        self._num_opened += 1
        return slot

    # as wherever the cache is written: buffers that grew in inference mode refuse writes outside it
    @torch.inference_mode()
    def fork(self, source: int, length: int) -> int:
        """Take a free slot holding the first `length` positions of `source`: a prompt prefilled
        once serves its whole group.
        """
        slot = self.open()
        self._opened[slot].ids = self._opened[source].ids[:length]
        # less than all of it after a preemption: the row reads the rest itself
        self.cache.fork(source, [slot], min(length, self.cache.lengths[source]))
        return slot

    def close(self, slot: int) -> None:
        """Give a slot back."""
        assert slot not in self.rows, f"slot {slot} is still generating"
        del self._opened[slot]
        self.cache.truncate(slot, 0)
        self._closed.append(slot)
        # the lowest first, so that an interrupted and a fresh run use the same slots for
        # the same order of work
        self._closed.sort()
        self._is_full = False

    def length(self, slot: int) -> int:
        """Tokens in the context of an idle slot: all ids fed or sampled so far, except
        the last sampled one.
        """
        return len(self._opened[slot].ids)

    @torch.inference_mode()
    def prefill(self, slot: int, ids: list[int]) -> None:
        """Run `ids` through a slot at once, without drawing anything. Where the pool is full they
        are run later, by `step`.
        """
        row = self._opened[slot]
        row.ids += ids
        while chunk := row.ids[self.cache.lengths[slot] :][: self.prefill_tokens]:
            if not self.cache.fits(
                slot, self.cache.lengths[slot] + len(chunk), spare=self._num_holders(row)
            ):
                break
            self._forward([], [_Chunk(row, chunk, len(chunk), False)])

    def feed(self, slot: int, ids: list[int], *, budget: int, key: int) -> None:
        """Queue `ids` (at least one) for a slot, then up to `budget` tokens drawn with the noise of
        `key` (see `noise_key`).
        """
        assert slot not in self.rows and ids and budget > 0, (
            f"feed slot {slot}: {len(ids)} ids, budget {budget}"
        )
        if self.length(slot) + len(ids) + budget - 1 > self.capacity:
            raise ValueError(
                f"{self.length(slot)} cached + {len(ids)} new ids + {budget} to sample "
                f"exceed the context of {self.capacity}"
            )
        row = self.rows[slot] = self._opened[slot]
        row.ids += ids
        row.generation = Generation(slot)
        row.budget = budget
        row.key = key

    def score(
        self,
        slot: int,
        prefix_ids: list[int],
        answers: Sequence[list[int]],
        done: Callable[[list[float]], None],
    ) -> None:
        """Queue, after `feed`, the scoring of answers: done(values) is called in a `step` before
        the slot's first token is drawn.

        A value is the mean log-prob (nats, temperature 1) of the answer's tokens after the context
        and `prefix_ids`. They are run behind the context in the pass that ends it, seen by no other
        token, and forgotten. ValueError when context, prefix and answer exceed the capacity.
        """
        row = self.rows[slot]
        assert not row.generation.ids and not row.answers and all(answers), (
            f"score slot {slot}: {len(answers)} answers"
        )
        longest = len(row.ids) + len(prefix_ids) + max(map(len, answers)) - 1
        if longest > self.capacity:
            raise ValueError(
                f"a context of {len(row.ids)} tokens and an answer to score, {longest} in "
                f"all, exceed the context of {self.capacity}"
            )
        row.answers = [(prefix_ids, answer) for answer in answers]
        row.values = []
        row.done = done

    # ---- a step

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Run one pass: read what is pending, draw one token for every row that is ready, and
        return the generations that ended.
        """
        singles, chunks = self._plan()
        if not (singles or chunks):
            return []
        drawing, drawn, values = self._forward(singles, chunks)
        for row, value in values:
            row.values.append(value)
            del row.answers[0]
            if not row.answers:
                row.done(row.values)
        finished = []
        for row, token, log_prob, mass in zip(drawing, *drawn, strict=True):
            generation = row.generation
            generation.ids.append(token)
            generation.log_probs.append(log_prob)
            generation.kept_mass.append(mass)
            if token in self.params.stop_ids or len(generation.ids) == row.budget:
                generation.stopped = token in self.params.stop_ids
                finished.append(generation)
                del self.rows[row.slot]  # the token that ended it is fed again, before what follows
            else:
                row.ids.append(token)
        return finished

    def _plan(self) -> tuple[list[_Row], list[_Chunk]]:
        """Who runs, oldest first, with room for it: rows that decode, num_slots at most, and chunks
        of prefill_tokens together at most.
        """
        singles, chunks = [], []
        room = self.prefill_tokens
        self._is_full = False
        for row in sorted(self.rows.values(), key=lambda row: row.number):
            cached = self.cache.lengths[row.slot]
            if len(row.ids) - cached == 1 and not row.answers:
                if len(singles) < self.num_slots and self._make_room(
                    row, cached + 1, takes_any=not (singles or chunks)
                ):
                    singles.append(row)
                continue
            chunk = self._chunk(row, cached)
            # whole or not at all: where a row is cut must not depend on its batch mates
            if (len(chunk.ids) <= room or not chunks) and self._make_room(
                row, cached + len(chunk.ids), takes_any=not (singles or chunks)
            ):
                chunks.append(chunk)
                room -= len(chunk.ids)
        return singles, chunks

    def _chunk(self, row: _Row, cached: int) -> _Chunk:
        ids = row.ids[cached : cached + self.prefill_tokens]
        if cached + len(ids) < len(row.ids):
            return _Chunk(row, ids, len(ids), False)
        if not row.answers:
            return _Chunk(row, ids, len(ids), True)
        prefix, answer = row.answers[0]
        draws = len(row.answers) == 1  # else the last id is run again, before the next answer
        return _Chunk(row, [*ids, *prefix, *answer[:-1]], len(ids) - (not draws), draws, answer)

    def _make_room(self, row: _Row, length: int, *, takes_any: bool) -> bool:
        """Whether a row can grow to `length`, if need be after younger rows (with takes_any others,
        too) gave up their pages, the youngest first.

        A row that starts takes from nobody, leaves a page for every other one to grow into, or it
        would soon be the one to give up, and does not start before another one that waits.
        """
        if not self.is_paged:
            return True
        starts = not (self.cache.lengths[row.slot] or takes_any)
        if starts and (
            self._is_full
            or not self.cache.fits(
                row.slot, max(length, len(row.ids)), spare=self._num_holders(row)
            )
        ):
            self._is_full = True
            return False
        while not self.cache.fits(row.slot, length):
            holders = [
                other
                for other in self._opened.values()
                if other is not row and self.cache.lengths[other.slot]
            ]
            victim = max(holders, key=lambda other: other.number, default=None)
            assert victim or not takes_any, (
                f"a pool of {self.kv_tokens} tokens has no room for {length} of row {row.slot}"
            )
            if victim is None or not takes_any and victim.number < row.number:
                self._is_full = True
                return False
            # its ids are known, and its noise is counted by position
            self.cache.truncate(victim.slot, 0)
            self.num_preempted += 1
        self.cache.reserve(row.slot, length)  # now, so that rows after this one find what is left
        return True

    def _num_holders(self, row: _Row) -> int:
        """Other rows that have pages, those included which start in this step
        and have no length yet.
        """
        if not self.is_paged:
            return 0
        others = [other.slot for other in self._opened.values() if other is not row]
        return sum(self.cache.num_held[slot] > 0 for slot in others)

    def _forward(self, singles: list[_Row], chunks: list[_Chunk]) -> tuple[list[_Row], list, list]:
        """Run one pass. Returns the rows that drew, their tokens, log-probs and kept mass, and
        (row, value) of every answer.
        """
        slots = [row.slot for row in singles] + [chunk.row.slot for chunk in chunks]
        ids = [row.ids[-1] for row in singles]
        counts = [1] * len(singles) + [len(chunk.ids) for chunk in chunks]
        drawing = list(singles)
        draws_at = list(range(len(singles)))
        answers = []
        for chunk in chunks:
            if chunk.draws:
                drawing.append(chunk.row)
                draws_at.append(len(ids) + chunk.kept - 1)
            ids += chunk.ids
            if chunk.answer:
                answers.append((chunk, range(len(ids) - len(chunk.answer), len(ids))))
        ids += [0] * (-len(ids) % PAD)
        draws_at += [0] * (-len(draws_at) % PAD)
        wanted = [*draws_at, *(place for _, span in answers for place in span)]
        groups = self.model.config.num_groups
        layout = CachedLayout.of(
            self.cache,
            slots,
            counts,
            groups,
            self.device,
            num_tokens=len(ids),
            kernel=self.kernel,
            wanted=wanted if chunks else (),
        )
        ids_N = torch.tensor(ids, device=self.device)
        if self.cuda_graph and not chunks:
            hidden_ND = self._graph.run(ids_N, layout)
        else:
            hidden_ND = self.model(ids_N[None], layout.positions_N[None], layout, self.cache)[0]
        if layout.last is None:
            hidden_ND = hidden_ND[torch.tensor(wanted, dtype=torch.int64, device=self.device)]
        for row in singles:
            self.cache.advance(row.slot, 1)
        for chunk in chunks:
            self.cache.advance(chunk.row.slot, chunk.kept)
            # what a branch took is free again
            self.cache.truncate(chunk.row.slot, self.cache.lengths[chunk.row.slot])
            self.num_prefilled += chunk.kept - chunk.draws
            self.num_scored += len(chunk.ids) - chunk.kept
        self.num_decoded += len(drawing)
        if not (drawing or answers):
            return [], [[]] * 3, []
        return drawing, *self._read(self.model.logits(hidden_ND), drawing, answers)

    def _read(
        self, logits_NV: Tensor, drawing: list[_Row], answers: list[tuple[_Chunk, range]]
    ) -> tuple[list, list]:
        """Draw tokens and score answers, whose logits come last; one transfer to the host."""
        uniforms = uniform_noise(
            [row.key for row in drawing], [len(row.generation.ids) for row in drawing]
        )
        parts = draw(
            logits_NV[: len(drawing)], torch.from_numpy(uniforms).to(self.device), self.params
        )
        if answers:
            targets_N1 = torch.tensor(
                [token for chunk, _ in answers for token in chunk.answer], device=self.device
            )[:, None]
            parts = (
                *parts,
                torch.log_softmax(logits_NV[-len(targets_N1) :], dim=-1)
                .gather(-1, targets_N1)[:, 0]
                .double(),
            )
        numbers = torch.cat(parts).cpu().numpy()
        ids, log_probs, kept_mass = numbers[: 3 * len(drawing)].reshape(3, -1)
        means, start = [], 3 * len(drawing)
        for chunk, _ in answers:
            means.append((chunk.row, float(numbers[start : start + len(chunk.answer)].mean())))
            start += len(chunk.answer)
        return [ids.astype(int).tolist(), log_probs.tolist(), kept_mass.tolist()], means
