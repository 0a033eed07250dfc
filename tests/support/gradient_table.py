"""The gradient table: one batch, its gradient from a plain model in one forward pass, and from a
sharded one however it is cut.

`measure_table` runs in every process of a world and returns numbers; the tests of test_gradients.py
and test_parallel.py read them. Gradients are compared, not parameters: clipping and Adam hide a
wrong scale (trap 17). Targets are random: on its own input a tied model has hardly any loss.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor

from venus.model.qwen3 import RECOMPUTE, ClippedPolicy, WeightedNLL, set_recompute
from venus.model.weights import load_model
from venus.train.backward import backward, log_probs_of, padding_share, policy_metrics, with_weights
from venus.train.batches import Document, micro_batches
from venus.train.parallel import shard

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = ("tied_tf5", "untied_tf4")  # 4 query heads and 2 kv heads
# relative to the largest entry of the gradient: the same sums in another order, 4e-7 seen
FP32 = 1e-6
ALONE = SimpleNamespace(
    sp=1, dp_rank=0, dp_size=1, device="cpu", sum=lambda value: value, gather=lambda items: items
)
LOSSES = ("sft token", "sft sequence", "igpo token", "igpo sequence")
NUM_MICRO_BATCHES = (1, 2, 4)
CASES = [
    f"{loss}, {number}, {recompute}"
    for loss in LOSSES
    for number in NUM_MICRO_BATCHES
    for recompute in RECOMPUTE
]


def random_documents(lengths, seed=0):
    generator, documents = torch.Generator().manual_seed(seed), []
    for length in lengths:
        mask = (torch.rand(length, generator=generator) < 0.5).float()
        mask[0], mask[-1] = 0, 1
        fields = {
            "mask": mask,
            "advantages": torch.randn(length, generator=generator),
            "sampler": torch.zeros(length),
        }
        documents.append(
            Document(torch.randint(64, (length,), generator=generator).tolist(), fields)
        )
    return documents


# 7 documents, 95 predictions: no even split by 2 or 4, of either
UNEVEN = random_documents([40, 3, 17, 2, 9, 26, 5])
ONE = random_documents([12], seed=1)  # with several dp ranks, some have nothing to do


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradient(model):
    return torch.cat([full(parameter.grad).flatten() for parameter in model.parameters()])


def relative(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def load(name):
    """A golden model with all matrices halved: their large ones amplify roundings until they
    come near the tolerance.
    """
    model = load_model(GOLDEN / name)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(0.5)
    return model


def nudged(model, seed):
    """The model with every weight moved by about 3 %, in place: old policy and reference must
    differ from it and from each other.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.03 * torch.randn(parameter.shape, generator=generator))
    return model


def nll(fields):
    return WeightedNLL(fields["weights"])


def clipped(fields):
    return ClippedPolicy(
        fields["advantages"],
        fields["weights"],
        old_BS=fields["old"],
        ref_BS=fields["ref"],
        clip=0.1,
        dual_clip=3.0,
        beta=0.1,
    )


class Side:
    """A model with its reference and old policy, sharded over `world`; or plain, in one forward
    pass, which is what is right.
    """

    def __init__(self, name, documents, world=None):
        models = [load(name), *(nudged(load(name), seed) for seed in (1, 2))]
        self.world = world or ALONE
        self.model, *others = (
            [shard(model, world, bf16=False) for model in models] if world else models
        )
        rows = [
            log_probs_of(model.requires_grad_(False), documents, max_tokens=30, world=self.world)
            for model in others
        ]
        self.log_probs = torch.cat([row for some in rows for row in some])
        self.documents = [
            Document(d.ids, {**d.per_token, "ref": ref, "old": old})
            for d, ref, old in zip(documents, *rows, strict=True)
        ]

    def run(self, loss, max_tokens=1000):
        """For one of LOSSES: the gradient, the number of micro-batches, the share of
        padding and the metrics.
        """
        kind, norm = loss.split()
        documents = with_weights(self.documents, norm)
        self.model.zero_grad(set_to_none=True)
        results = backward(
            self.model,
            documents,
            {"sft": nll, "igpo": clipped}[kind],
            max_tokens=max_tokens,
            world=self.world,
        )
        metrics = policy_metrics(results, clip=0.1, dual_clip=3.0, world=self.world)
        return (
            gradient(self.model),
            len(results),
            padding_share(documents, results, self.world),
            metrics,
        )


def budget(number, documents, world):
    """The largest number of tokens per rank that cuts the batch into so many micro-batches."""
    lengths = [len(document.ids) for document in documents]
    return next(
        tokens
        for tokens in range(200, 0, -1)
        if len(micro_batches(lengths, tokens * world.sp, world.dp_size)[0]) == number
    )


def measure_table(
    world, name="tied_tf5", documents=UNEVEN, numbers=NUM_MICRO_BATCHES, recomputes=RECOMPUTE
):
    """{case: error of the gradient, number of micro-batches, share of padding, metrics, expected
    metrics}, and the error of the log-probs.
    """
    plain, sharded = Side(name, documents), Side(name, documents, world)
    seen = {"log-probs": (sharded.log_probs - plain.log_probs).abs().max().item()}
    for loss in LOSSES:
        expected, _, _, expected_metrics = plain.run(loss)
        for number in numbers:
            for recompute in recomputes:
                set_recompute(sharded.model, recompute)
                got, *others = sharded.run(loss, budget(number, documents, world))
                seen[f"{loss}, {number}, {recompute}"] = [
                    relative(got, expected),
                    *others,
                    expected_metrics,
                ]
    return seen


def check_case(table, case):
    """The gradient and the metrics of one forward pass of one process, in as many
    micro-batches as the case says.
    """
    error, count, padding, metrics, expected = table[case]
    assert error <= FP32 and count == int(case.split(", ")[1]) and 0 <= padding < 0.1
    assert metrics == pytest.approx(expected, abs=1e-6, rel=1e-5)
