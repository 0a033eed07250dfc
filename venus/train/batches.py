"""From documents to packed micro-batches: seeded order, balanced over ranks, and the same gradient
however they are cut.

Shapes: N tokens of a packed sequence (batch dimension 1).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from venus.model.attention import Layout


@dataclass(frozen=True)
class Document:
    """One sequence to train on: ids, and per-token numbers for the tokens AS TARGETS (index k
    belongs to ids[k], whatever predicts it).
    """

    ids: Sequence[int]
    per_token: Mapping[str, Sequence[float] | Tensor]

    def __post_init__(self):
        for name, values in self.per_token.items():
            if len(values) != len(self.ids):
                raise ValueError(f"{len(values)} {name} for {len(self.ids)} ids")


@dataclass(frozen=True)
class Packed:
    """Documents side by side, shifted: ids_1N[0, n] predicts targets_1N[0, n]; `fields` hold the
    per-token numbers of the targets, fp32 [1, N].
    """

    ids_1N: Tensor
    targets_1N: Tensor
    positions_1N: Tensor
    layout: Layout
    fields: dict[str, Tensor]


def pack(
    documents: Sequence[Document], device: torch.device | str = "cpu", *, multiple_of: int = 1
) -> Packed:
    """Concatenate the documents, each shifted by one inside itself, so that no document predicts
    the first token of the next.

    A dummy document fills the length up to a multiple of `multiple_of`.
    """
    names = documents[0].per_token.keys()
    if padding := -sum(len(document.ids) - 1 for document in documents) % multiple_of:
        documents = [*documents, dummy_document(names, padding)]
    lengths = [len(document.ids) - 1 for document in documents]

    def joined(parts) -> Tensor:
        return torch.cat([torch.as_tensor(part) for part in parts])[None].to(device)

    return Packed(
        joined(torch.tensor(document.ids[:-1]) for document in documents),
        joined(torch.tensor(document.ids[1:]) for document in documents),
        joined(torch.arange(length) for length in lengths),
        Layout.documents(lengths),
        {
            name: joined(
                torch.as_tensor(document.per_token[name], dtype=torch.float32)[1:]
                for document in documents
            )
            for name in names
        },
    )


def micro_batches(lengths: Sequence[int], max_tokens: int, num_ranks: int) -> list[list[list[int]]]:
    """Deal documents (by index) into micro-batches of at most `max_tokens` each (a longer document
    stands alone): [rank][micro-batch][index].

    Longest first, each into the micro-batch with the fewest tokens, over as few rounds as fit. All
    ranks get the same number of micro-batches, some possibly empty: the caller pads those with a
    zero-weight dummy, since every rank must take part in every collective.
    """
    assert lengths and num_ranks >= 1
    num_rounds = max(
        1, -(-sum(min(length, max_tokens) for length in lengths) // (max_tokens * num_ranks))
    )
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    while True:
        bins: list[list[int]] = [[] for _ in range(num_rounds * num_ranks)]
        sizes = [0] * len(bins)
        for index in order:
            smallest = min(range(len(bins)), key=lambda number: (sizes[number], number))
            bins[smallest].append(index)
            sizes[smallest] += lengths[index]
        if all(
            size <= max_tokens or len(members) == 1
            for size, members in zip(sizes, bins, strict=True)
        ):
            return [bins[rank::num_ranks] for rank in range(num_ranks)]
        num_rounds += 1


def dummy_document(names: Iterable[str], num_predictions: int = 1) -> Document:
    """Tokens without weight: padding, and the forward and backward of a rank
    that has nothing to do.
    """
    zeros = [0] * (num_predictions + 1)
    return Document(zeros, dict.fromkeys(names, zeros))


def epoch_plan(weights: Sequence[int], *, seed: int, epoch: int) -> list[int]:
    """The order of one epoch, which holds item i weights[i] times, 1/weights[i] of the epoch apart;
    it depends on (seed, epoch) only.
    """
    offsets = np.random.default_rng((seed, epoch)).random(len(weights))
    places = [
        ((copy + offset) / weight, item)
        for item, (weight, offset) in enumerate(zip(weights, offsets, strict=True))
        for copy in range(weight)
    ]
    return [item for _, item in sorted(places)]


def epoch_batches(
    weights: Sequence[int], batch_size: int, *, seed: int, epoch: int
) -> list[list[int]]:
    """The optimizer batches of one epoch, none of which holds an item twice: `epoch_plan` cut up,
    unless copies meet in one of its batches.

    Then the copies are dealt, an item's one after the other, one to each batch in turn: with no
    more copies than batches no two of an item meet (McNaughton's rule), and copies beyond that
    number are left out. ValueError when even so the batches cannot be filled.
    """
    plan = epoch_plan(weights, seed=seed, epoch=epoch)
    num_batches = steps_per_epoch(weights, batch_size)
    size = min(batch_size, len(plan))
    batches = [plan[size * number : size * (number + 1)] for number in range(num_batches)]
    if all(len(set(batch)) == size for batch in batches):
        return batches
    usable = [min(weight, num_batches) for weight in weights]
    surplus = sum(usable) - num_batches * size
    if surplus < 0:
        raise ValueError(
            f"copies of a row must meet in a batch: {len(weights)} rows, {num_batches} "
            f"batches of {size}; lower the batch size or the weights"
        )
    rng = np.random.default_rng((seed, epoch, num_batches))
    copies = [int(item) for item in rng.permutation(len(weights)) for _ in range(usable[item])]
    left_out = set(rng.choice(len(copies), surplus, replace=False).tolist())
    copies = [item for place, item in enumerate(copies) if place not in left_out]
    return [copies[int(number) :: num_batches] for number in rng.permutation(num_batches)]


def batch_items(weights: Sequence[int], batch_size: int, *, seed: int, step: int) -> list[int]:
    """The items of optimizer step `step` (0, 1, ..), all different. Epochs follow one another and
    no batch crosses from one into the next.

    The last, incomplete batch of an epoch is left out; with fewer items than `batch_size` an epoch
    is one batch of them all.
    """
    epoch, number = divmod(step, steps_per_epoch(weights, batch_size))
    return epoch_batches(weights, batch_size, seed=seed, epoch=epoch)[number]


def steps_per_epoch(weights: Sequence[int], batch_size: int) -> int:
    """Optimizer steps of one epoch, at least 1."""
    return max(1, sum(weights) // batch_size)
