"""Backward passes over a batch of documents, shared by SFT and IGPO: token weights with global
denominators, micro-batches, per-token statistics.

Shapes: N tokens of a packed sequence (batch dimension 1).
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from venus.model.qwen3 import (
    ClippedPolicy,
    Qwen3,
    TokenLoss,
    WeightedNLL,
    clipped_surrogate,
    k3_divergence,
)
from venus.rl.igpo import token_advantages
from venus.train.batches import Document, Packed, dummy_document, micro_batches, pack
from venus.train.parallel import World
from venus.train.ulysses import split_sequence
from venus.trajectory import Trajectory

Fields = dict[str, Tensor]


def with_weights(documents: Sequence[Document], loss_norm: str) -> list[Document]:
    """Add the field "weights", which sums to 1 over all documents and is 0 where "mask" is 0.

    loss_norm "token": every masked token of the batch counts the same. "sequence": every document
    does, its tokens sharing its part. The batch is that of all ranks, so the denominators are
    global before the first backward: token losses [4] and [1, 1, 2] give 2.0 and 2.6667.
    """
    masks = [
        torch.as_tensor(document.per_token["mask"], dtype=torch.float32) for document in documents
    ]
    counts = [float(mask.sum()) for mask in masks]
    if not all(counts):
        raise ValueError(f"document {counts.index(0)} of {len(counts)} has no token to train on")
    total = sum(counts)
    scales = [1 / total if loss_norm == "token" else 1 / (count * len(counts)) for count in counts]
    weights = [mask * scale for mask, scale in zip(masks, scales, strict=True)]
    return [
        Document(d.ids, {**d.per_token, "weights": values})
        for d, values in zip(documents, weights, strict=True)
    ]


def backward(
    model: Qwen3,
    documents: Sequence[Document],
    loss_of: Callable[[Fields], WeightedNLL | ClippedPolicy],
    *,
    max_tokens: int,
    world: World,
    temperature: float = 1.0,
    kernel: str = "auto",
) -> list[tuple[TokenLoss, Fields]]:
    """Add this rank's share of the gradient of the summed loss; return each
    micro-batch's result and fields.

    `documents` are those of all ranks, the same on every rank, with "weights" as `with_weights`
    makes them: then neither the micro-batch size, nor the packing, nor the number of ranks, nor how
    they share sequences changes the gradient. max_tokens: per rank and micro-batch. The fields are
    those of this rank's tokens.
    """
    results = []
    for _, packed in _my_micro_batches(documents, max_tokens, world):
        result = model.token_loss(
            packed.ids_1N,
            packed.targets_1N,
            loss=loss_of(packed.fields),
            positions_BS=packed.positions_1N,
            layout=packed.layout,
            temperature=temperature,
            kernel=kernel,
        )
        result.loss.backward()
        results.append((result._replace(loss=result.loss.detach()), packed.fields))
    return results


@torch.no_grad()
def log_probs_of(
    model: Qwen3,
    documents: Sequence[Document],
    *,
    max_tokens: int,
    world: World,
    temperature: float = 1.0,
    kernel: str = "auto",
) -> list[Tensor]:
    """log p (nats, fp32) of the masked tokens of every document, 0 elsewhere and as long as its
    ids. Each rank computes its share. A collective.
    """
    mine = []
    for indices, packed in _my_micro_batches(documents, max_tokens, world):
        log_probs_1N = model.token_log_probs(
            packed.ids_1N,
            packed.targets_1N,
            packed.fields["mask"],
            positions_BS=packed.positions_1N,
            layout=packed.layout,
            temperature=temperature,
            kernel=kernel,
        )
        if indices:
            mine.append((indices, log_probs_1N[0].cpu()))
    parts: dict[tuple[int, ...], list[Tensor]] = {}
    # the parts of a sequence come in order, from neighbouring ranks
    for indices, part in world.gather(mine):
        parts.setdefault(indices, []).append(part)
    rows = {}
    for indices, together in parts.items():
        lengths = [len(documents[i].ids) - 1 for i in indices]
        for i, values in zip(
            indices, torch.cat(together)[: sum(lengths)].split(lengths), strict=True
        ):
            rows[i] = torch.cat([torch.zeros(1), values])
    return [rows[i] for i in range(len(documents))]


def _my_micro_batches(
    documents: Sequence[Document], max_tokens: int, world: World
) -> Iterator[tuple[tuple[int, ...], Packed]]:
    """Which documents, and this rank's part of them packed, for each of its micro-batches; () and a
    dummy where there is nothing left to do.
    """
    for indices in micro_batches(
        [len(document.ids) for document in documents], max_tokens * world.sp, world.dp_size
    )[world.dp_rank]:
        chosen = [documents[i] for i in indices] or [dummy_document(documents[0].per_token)]
        yield (
            tuple(indices),
            split_sequence(pack(chosen, world.device, multiple_of=world.sp), world),
        )


def padding_share(
    documents: Sequence[Document], results: Sequence[tuple[TokenLoss, Fields]], world: World
) -> float:
    """Of the tokens that `backward` ran for these results, the share that was padding or dummies,
    over all ranks. A collective.
    """
    ran = world.sum(sum(fields["weights"].numel() for _, fields in results))
    return 1 - sum(len(document.ids) - 1 for document in documents) / ran


def policy_document(trajectory: Trajectory) -> Document:
    """Ids of a trajectory with, per token: mask (1 = sampled), advantages of its turn and the
    sampler's log-probs.

    ValueError for a trajectory without the sampler's log-probs or without advantages: it
    cannot be trained on.
    """
    if not trajectory.log_probs or any(turn.advantage is None for turn in trajectory.turns):
        raise ValueError(
            f"trajectory {trajectory.id}: no log-probs or no advantages; only rollouts of "
            "this run's policy can be trained on"
        )
    mask = torch.tensor(trajectory.sampled_mask(), dtype=torch.float32)
    sampler = torch.zeros_like(mask)
    sampler[mask.bool()] = torch.tensor(trajectory.log_probs)
    spans = [(turn.start, turn.end) for turn in trajectory.turns]
    advantages = token_advantages([turn.advantage for turn in trajectory.turns], spans, len(mask))
    return Document(
        trajectory.token_ids, {"mask": mask, "advantages": advantages, "sampler": sampler}
    )


def policy_metrics(
    results: Sequence[tuple[TokenLoss, Fields]], *, clip: float, dual_clip: float, world: World
) -> dict[str, float | None]:
    """Means over the trained tokens of all ranks, and the loss, its mean over
    mini-batches. A collective.

    kl: k3 against the reference (None without one). clip_share: tokens whose gradient the clip
    removes or the dual clip does. sampler_gap:
    |log p of the trainer - log p of the sampler|, the trainer's from before the update.
    """
    sums = dict.fromkeys(("loss", "weights", "tokens", "entropy", "gap", "kl", "clipped"), 0.0)
    gap_max, has_reference = 0.0, bool(results) and "ref" in results[0][1]
    for result, fields in results:
        trained = fields["weights"] != 0
        log_probs = result.log_probs_BS[trained]
        old = fields.get("old", result.log_probs_BS)[trained]
        gap = (old - fields["sampler"][trained]).abs()
        advantages, log_ratios = fields["advantages"][trained], log_probs - old
        clipped = (
            clipped_surrogate(log_ratios, advantages, clip, dual_clip)
            != log_ratios.exp() * advantages
        )
        kl = k3_divergence(log_probs, fields["ref"][trained]) if has_reference else torch.zeros(1)
        values = (result.loss, fields["weights"], trained, result.entropies_BS, gap, kl, clipped)
        for name, value in zip(sums, values, strict=True):
            sums[name] += value.sum().item()
        gap_max = max(gap_max, gap.max().item() if gap.numel() else 0.0)
    sums = {name: world.sum(value) for name, value in sums.items()}
    tokens = max(1.0, sums["tokens"])
    return {
        "loss": sums["loss"] / (sums["weights"] or 1.0),
        "trained_tokens": sums["tokens"],
        "entropy": sums["entropy"] / tokens,
        "kl": sums["kl"] / tokens if has_reference else None,
        "clip_share": sums["clipped"] / tokens,
        "sampler_gap_mean": sums["gap"] / tokens,
        "sampler_gap_max": max(world.gather([gap_max])),
    }
