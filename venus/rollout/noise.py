"""How a token is drawn: from which part of the softmax, and with whose noise.

Shapes: R rows  V vocab.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from venus.cli import Options, option


@dataclass(frozen=True)
class SamplingOptions(Options):
    """From which part of the softmax a token is drawn."""

    temperature: float = option(
        1.0, group="sampling", help="softmax temperature; 0 is greedy", least=0, most=100
    )
    top_p: float = option(
        1.0,
        help="sample from the smallest set of tokens with this probability mass",
        above=0,
        most=1,
    )
    top_k: int = option(
        0, help="sample from this many most probable tokens; 0 is all of them", least=0
    )


@dataclass(frozen=True)
class SamplingParams(SamplingOptions):
    """How a row is sampled: it stops after one of `stop_ids`."""

    stop_ids: tuple[int, ...]


def draw(
    logits_RV: Tensor, uniforms_R: Tensor, params: SamplingParams
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a row: (ids, log-probs, kept mass), each [R] in fp64 so that they travel to
    the host as one tensor.

    The token is the first whose cumulative probability, over the kept ones in vocabulary order,
    exceeds u times the kept mass.
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
        ids_R = torch.searchsorted(cumulative_RV, (uniforms_R * kept_mass_R)[:, None], right=True)[
            :, 0
        ]
    log_probs_R = log_softmax_RV.gather(-1, ids_R[:, None])[:, 0]
    return ids_R.double(), log_probs_R.double(), kept_mass_R


def _truncate(probs_RV: Tensor, params: SamplingParams) -> Tensor:
    """Zero what top-k and then top-p leave out: top-p keeps the smallest set of most probable
    tokens whose mass reaches p.
    """
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
    """One uniform in [0, 1) for each (key, position), by the splitmix64 finaliser over key +
    position * golden ratio; float64.
    """
    with np.errstate(over="ignore"):
        x = np.array(keys, dtype=np.uint64) + (
            np.array(positions, dtype=np.uint64) + np.uint64(1)
        ) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
