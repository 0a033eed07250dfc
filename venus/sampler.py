"""Batched decoding over a KV cache: rows of different lengths, a constant number of slots, noise that belongs to the row.

The sampler knows token ids, budgets and stop ids, and nothing of tools or text. A step runs one token for every slot, idle ones included, so that
the matrix products keep their shape whoever the batch mates are; a token is drawn by inverting the cumulative distribution at one uniform number
from (key, position). A row's ids therefore depend on its prompt, its key and the weights, not on its batch or on an interruption.

Shapes: R slots  V vocab  N tokens.
"""

import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from venus.attention import CachedLayout
from venus.cache import KVCache
from venus.model import Qwen3


@dataclass(frozen=True)
class SamplingParams:
    """How a token is drawn: temperature 0 is argmax; top_k 0 and top_p 1 keep the whole vocabulary; a row stops after one of `stop_ids`."""

    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self):
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(f"temperature {self.temperature} (>= 0), top_p {self.top_p} (in (0, 1]), top_k {self.top_k} (>= 0): out of range")


@dataclass
class Generation:
    """What one `feed` produced: sampled ids, the log-prob of each under the full temperature-scaled softmax (before top-k and top-p; temperature 1
    when greedy), the probability mass that top-k and top-p kept, and whether a stop id (the last id, then) or the budget ended it."""

    slot: int
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    kept_mass: list[float] = field(default_factory=list)
    stopped: bool = False


@dataclass
class _Row:
    pending: list[int]  # ids to run before the next token can be drawn; the last one is run by the decode step itself
    budget: int
    key: int
    generation: Generation


class Sampler:
    """Continuous batching over `num_slots` rows of `capacity` positions each.

    open/fork a slot, feed it ids with a budget and a key, call `step` until its Generation comes back, feed again or close. The caller reads
    `length(slot)` for what the row holds. fp32 on CPU: log-probs equal `Qwen3.token_log_probs(temperature=T)` to 1e-5.
    """

    def __init__(self, model: Qwen3, params: SamplingParams, *, num_slots: int, capacity: int, prefill_tokens: int = 2048):
        weight, config = model.lm_head.weight, model.config
        self.model, self.params, self.prefill_tokens = model, params, prefill_tokens
        self.device = weight.device
        self.cache = KVCache(
            num_layers=config.num_hidden_layers, num_rows=num_slots, capacity=capacity, num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim, dtype=weight.dtype, device=weight.device,
        )  # fmt: skip
        self.rows: dict[int, _Row] = {}  # the slots that have something to do
        self.free = list(range(num_slots))
        self.num_decoded = self.num_prefilled = 0

    def open(self) -> int:
        """Take a free slot with an empty row."""
        return self.free.pop(0)

    @torch.inference_mode()  # as wherever the cache is written: buffers that grew in inference mode refuse writes outside it
    def fork(self, source: int, length: int) -> int:
        """Take a free slot holding a copy of the first `length` positions of `source`: a prompt prefilled once serves its whole group."""
        slot = self.free.pop(0)
        self.cache.fork(source, [slot], length)
        return slot

    def close(self, slot: int) -> None:
        """Give a slot back."""
        assert slot not in self.rows, f"slot {slot} is still generating"
        self.cache.truncate(slot, 0)
        self.free.append(slot)
        self.free.sort()  # the lowest first, so that an interrupted and a fresh run use the same slots for the same order of work

    def length(self, slot: int) -> int:
        """Cached positions of a slot: all ids fed or sampled so far, except the last."""
        return self.cache.lengths[slot]

    @torch.inference_mode()
    def prefill(self, slot: int, ids: list[int]) -> None:
        """Run `ids` through a slot at once, without drawing anything."""
        for start in range(0, len(ids), self.prefill_tokens):
            self._extend([slot], [ids[start : start + self.prefill_tokens]])

    def feed(self, slot: int, ids: list[int], *, budget: int, key: int) -> None:
        """Queue `ids` (at least one) for a slot, then up to `budget` tokens drawn with the noise of `key` (see `noise_key`)."""
        assert slot not in self.rows and ids and budget > 0, f"feed slot {slot}: {len(ids)} ids, budget {budget}"
        if self.length(slot) + len(ids) + budget - 1 > self.cache.capacity:
            raise ValueError(f"{self.length(slot)} cached + {len(ids)} new ids + {budget} to sample exceed the context of {self.cache.capacity}")
        self.rows[slot] = _Row(list(ids), budget, key, Generation(slot))

    def step(self) -> list[Generation]:
        """Prefill what is waiting, draw one token for every ready row, and return the generations that ended."""
        self._prefill_pending()
        ready = [slot for slot, row in self.rows.items() if len(row.pending) == 1]
        if not ready:
            return []
        ids, log_probs, kept_mass = self._decode(ready)
        finished = []
        for slot, token, log_prob, mass in zip(ready, ids, log_probs, kept_mass, strict=True):
            row = self.rows[slot]
            row.pending = [token]
            generation = row.generation
            generation.ids.append(token)
            generation.log_probs.append(log_prob)
            generation.kept_mass.append(mass)
            generation.stopped = token in self.params.stop_ids
            if generation.stopped or len(generation.ids) == row.budget:
                finished.append(generation)
                del self.rows[slot]
        return finished

    @torch.inference_mode()
    def _prefill_pending(self) -> None:
        room, slots, chunks = self.prefill_tokens, [], []
        for slot, row in self.rows.items():
            count = min(len(row.pending) - 1, self.prefill_tokens)
            if 0 < count <= room:  # whole or not at all: where a row is cut must not depend on its batch mates
                slots.append(slot)
                chunks.append(row.pending[:count])
                row.pending = row.pending[count:]
                room -= count
        if slots:
            self._extend(slots, chunks)

    def _extend(self, slots: list[int], chunks: list[list[int]]) -> None:
        counts = [len(chunk) for chunk in chunks]
        layout = CachedLayout.of(self.cache, slots, counts, self.device)
        ids_1N = torch.tensor([[token for chunk in chunks for token in chunk]], device=self.device)
        self.model(ids_1N, layout.positions_N[None], layout, self.cache)
        for slot, count in zip(slots, counts, strict=True):
            self.cache.advance(slot, count)
        self.num_prefilled += sum(counts)

    @torch.inference_mode()
    def _decode(self, ready: list[int]) -> tuple[list[int], list[float], list[float]]:
        num_slots = len(self.cache.lengths)
        current = [0] * num_slots  # an idle slot runs token 0 into a position that stays invisible
        for slot in ready:
            current[slot] = self.rows[slot].pending[0]
        layout = CachedLayout.of(self.cache, range(num_slots), [1] * num_slots, self.device)
        hidden_1RD = self.model(torch.tensor([current], device=self.device), layout.positions_N[None], layout, self.cache)
        for slot in ready:
            self.cache.advance(slot, 1)
        self.num_decoded += len(ready)
        uniforms = np.zeros(num_slots)
        rows = [self.rows[slot] for slot in ready]
        uniforms[ready] = uniform_noise([row.key for row in rows], [len(row.generation.ids) for row in rows])
        drawn = draw(self.model.logits(hidden_1RD[0]), torch.from_numpy(uniforms).to(self.device), self.params)
        ids, log_probs, kept_mass = (values[ready] for values in torch.stack(drawn).cpu().numpy())
        return [int(token) for token in ids], log_probs.tolist(), kept_mass.tolist()


def draw(logits_RV: Tensor, uniforms_R: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a row: (ids, log-probs, kept mass), each [R] in fp64 so that they travel to the host as one tensor.

    The token is the first whose cumulative probability, over the kept ones in vocabulary order, exceeds u times the kept mass.
    """
    log_softmax_RV = torch.log_softmax(logits_RV / (params.temperature or 1.0), dim=-1)
    if params.temperature == 0:
        ids_R = logits_RV.argmax(-1)
        kept_mass_R = torch.ones_like(uniforms_R)
    else:
        probs_RV = log_softmax_RV.exp()
        if params.top_k or params.top_p < 1:
            probs_RV = _truncate(probs_RV, params)
        cumulative_RV = probs_RV.cumsum(-1, dtype=torch.float64)
        kept_mass_R = cumulative_RV[:, -1].clone()
        ids_R = torch.searchsorted(cumulative_RV, (uniforms_R * kept_mass_R)[:, None], right=True)[:, 0]
    log_probs_R = log_softmax_RV.gather(-1, ids_R[:, None])[:, 0]
    return ids_R.double(), log_probs_R.double(), kept_mass_R


def _truncate(probs_RV: Tensor, params: SamplingParams) -> Tensor:
    """Zero what top-k and then top-p leave out: top-p keeps the smallest set of most probable tokens whose mass reaches p."""
    sorted_RV, order_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
    if params.top_k:
        sorted_RV[:, params.top_k :] = 0
    before_RV = sorted_RV.cumsum(-1, dtype=torch.float64) - sorted_RV
    sorted_RV[before_RV >= params.top_p * sorted_RV.sum(-1, keepdim=True)] = 0
    return torch.zeros_like(probs_RV).scatter_(-1, order_RV, sorted_RV)


def noise_key(*parts: object) -> int:
    """A 64-bit key from (seed, question id, sample, turn), the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def uniform_noise(keys: list[int], positions: list[int]) -> np.ndarray:
    """One uniform in [0, 1) for each (key, position), by the splitmix64 finaliser over key + position * golden ratio; float64."""
    with np.errstate(over="ignore"):
        x = np.array(keys, dtype=np.uint64) + (np.array(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
