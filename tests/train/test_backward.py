"""The gradient of a batch does not depend on how it is cut, ordered or spread over ranks, and lands
on the sampled tokens alone.

Several ranks are played here by one process: gradients are summed over ranks, which is what calling
`backward` for each rank does.
test_parallel.py has real processes. Shapes: N tokens of a packed sequence (batch dimension 1)
    V vocab.
"""

from math import exp, log
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from venus.model.qwen3 import ClippedPolicy, TokenLoss, WeightedNLL
from venus.model.weights import load_model
from venus.train.backward import (
    backward,
    log_probs_of,
    padding_share,
    policy_document,
    policy_metrics,
    with_weights,
)
from venus.train.batches import Document
from venus.trajectory import Outcome, Trajectory, Turn

GOLDEN = Path(__file__).parents[1] / "golden"
FP32 = 1e-6  # relative to the largest entry of the gradient: fp32 sums in another order, 4e-7 seen
ALONE = SimpleNamespace(
    sp=1, dp_rank=0, dp_size=1, device="cpu", sum=lambda value: value, gather=lambda items: items
)


@pytest.fixture(scope="module")
def model():
    return load_model(GOLDEN / "untied_tf4")


def true_log_probs(model, ids):
    """log p of every token but the first, from a forward pass of the document alone."""
    return model.logits(model(torch.tensor([ids[:-1]]))[0]).log_softmax(-1)[
        range(len(ids) - 1), ids[1:]
    ]


def random_documents(model, lengths=(9, 30, 2, 17, 5, 24)):
    """Documents of random ids, so that the targets are random, with all the fields of a policy
    update; ratios reach over the clips.
    """
    generator, documents = torch.Generator().manual_seed(0), []
    for length in lengths:
        ids = torch.randint(64, (length,), generator=generator).tolist()
        mask = (torch.rand(length, generator=generator) < 0.5).float()
        mask[0], mask[-1] = 0, 1
        with torch.no_grad():
            near = torch.cat([torch.zeros(1), true_log_probs(model, ids)])
        fields = {
            name: near + 0.3 * torch.randn(length, generator=generator)
            for name in ("sampler", "old", "ref")
        }
        documents.append(
            Document(
                ids,
                {"mask": mask, "advantages": torch.randn(length, generator=generator), **fields},
            )
        )
    return documents


def nll(fields):
    return WeightedNLL(fields["weights"])


def clipped(fields):
    return ClippedPolicy(
        fields["advantages"],
        fields["weights"],
        old_BS=fields.get("old"),
        ref_BS=fields.get("ref"),
        clip=0.2,
        dual_clip=3.0,
        beta=0.1,
    )


def gradient(model, documents, loss_of, *, max_tokens=10_000, num_ranks=1):
    """All parameters' gradients as one vector, summed over the ranks, and the summed loss."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for rank in range(num_ranks):
        world = SimpleNamespace(sp=1, dp_rank=rank, dp_size=num_ranks, device="cpu")
        total += sum(
            result.loss.item()
            for result, _ in backward(model, documents, loss_of, max_tokens=max_tokens, world=world)
        )
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), total


# Trap 16: the two means


class TokenLosses(torch.nn.Module):
    """A stand-in whose loss on target k is scale * losses[k]: loss and d loss / d scale are the
    mean of the losses, at scale 1.
    """

    def __init__(self, losses):
        super().__init__()
        self.scale, self.losses = torch.nn.Parameter(torch.ones(())), torch.tensor(losses)

    def token_loss(self, ids_BS, targets_BS, *, loss, positions_BS, layout, temperature, kernel):
        rows = loss.weights_BS.flatten().nonzero()[:, 0]
        log_probs_N = -self.scale * self.losses[targets_BS.flatten()[rows]]
        return TokenLoss(loss.value(log_probs_N, rows).sum(), targets_BS, targets_BS)


@pytest.mark.parametrize(("loss_norm", "mean"), [("token", 2.0), ("sequence", 8 / 3)])
@pytest.mark.parametrize("max_tokens", [1, 4, 5, 100])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_token_mean_is_2_and_sequence_mean_is_2_6667_however_the_batch_is_cut(
    loss_norm, mean, max_tokens, num_ranks, order
):
    """Trap 16. Token losses [4] and [1, 1, 2]: the mean of the micro-batches' means is 2.6667 for
    "token", and no mean at all for ranks.
    """
    documents = [
        Document([0, 4], {"mask": [0, 1]}),
        Document([0, 1, 9, 1, 2], {"mask": [0, 1, 0, 1, 1]}),
    ]
    batch = with_weights([documents[i] for i in order], loss_norm)
    grad, loss = gradient(
        TokenLosses([0.0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        batch,
        nll,
        max_tokens=max_tokens,
        num_ranks=num_ranks,
    )
    assert loss == pytest.approx(mean, abs=1e-6) and grad.item() == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize("loss_norm", ["token", "sequence"])
def test_weights_sum_to_one_and_are_zero_where_the_mask_is(model, loss_norm):
    given = random_documents(model)
    documents = with_weights(given, loss_norm)
    assert sum(
        float(document.per_token["weights"].sum()) for document in documents
    ) == pytest.approx(1, abs=1e-6)
    assert all(
        torch.equal(d.per_token["weights"] != 0, d.per_token["mask"] != 0) for d in documents
    )
    assert not any("weights" in document.per_token for document in given)


def test_a_document_without_a_token_to_train_on_is_named():
    with pytest.raises(ValueError, match="document 1 of 2 has no token"):
        with_weights(
            [Document([1, 2], {"mask": [0, 1]}), Document([1, 2], {"mask": [0, 0]})], "token"
        )


# The gradient, compared as a gradient: clipping and Adam would hide a wrong scale (trap 17)


@pytest.fixture(scope="module")
def whole(model):
    """The gradients of the whole batch in one forward, by (loss, loss_norm)."""
    return {
        (f, norm): gradient(model, with_weights(random_documents(model), norm), f)[0]
        for f in (nll, clipped)
        for norm in ("token", "sequence")
    }


@pytest.mark.parametrize("loss_norm", ["token", "sequence"])
@pytest.mark.parametrize("loss_of", [nll, clipped])
@pytest.mark.parametrize(
    ("max_tokens", "num_ranks", "order"),
    [
        (1, 1, [0, 1, 2, 3, 4, 5]),
        (32, 1, [5, 3, 1, 4, 0, 2]),
        (10_000, 2, [0, 1, 2, 3, 4, 5]),
        (32, 3, [2, 4, 0, 5, 1, 3]),
        (10_000, 8, [3, 1, 2, 0, 5, 4]),
    ],
)
def test_micro_batches_order_and_ranks_do_not_change_the_gradient(
    model, whole, loss_norm, loss_of, max_tokens, num_ranks, order
):
    """Up to eight ranks for six documents, so that some have nothing to do."""
    documents = random_documents(model)
    batch = with_weights([documents[i] for i in order], loss_norm)
    grad, _ = gradient(model, batch, loss_of, max_tokens=max_tokens, num_ranks=num_ranks)
    expected = whole[loss_of, loss_norm]
    assert (grad - expected).abs().max() <= FP32 * expected.abs().max()


def test_whatever_stands_on_masked_tokens_changes_not_a_bit(model, whole):
    """Advantages of 1e6, log-probs of -1e6: a masked token is not multiplied by 0,
    it is not looked at.
    """
    documents = []
    for document in random_documents(model):
        fields = dict(document.per_token)
        masked = fields["mask"] == 0
        for name, value in (
            ("advantages", 1e6),
            ("old", -1e6),
            ("ref", 1e6),
            ("sampler", float("nan")),
        ):
            fields[name] = torch.where(masked, torch.tensor(value), fields[name])
        documents.append(Document(document.ids, fields))
    grad, _ = gradient(model, with_weights(documents, "sequence"), clipped)
    assert torch.equal(grad, whole[clipped, "sequence"])


def test_with_one_update_the_gradient_is_that_of_reinforce(model):
    """old = None: d/dtheta of -sum w A log p, from a forward pass of each document alone. The loss
    itself is -sum w A, ratio 1.
    """
    documents = with_weights(random_documents(model), "sequence")
    grad, loss = gradient(
        model,
        documents,
        lambda fields: ClippedPolicy(
            fields["advantages"], fields["weights"], clip=0.2, dual_clip=3.0, beta=0.0
        ),
        max_tokens=32,
    )
    reinforce, mean_advantage = 0, 0
    for document in documents:
        weights = document.per_token["weights"][1:]
        advantages = document.per_token["advantages"][1:]
        reinforce = reinforce - (weights * advantages * true_log_probs(model, document.ids)).sum()
        mean_advantage += (weights * advantages).sum().item()
    expected = torch.cat(
        [g.flatten() for g in torch.autograd.grad(reinforce, list(model.parameters()))]
    )
    assert (grad - expected).abs().max() <= FP32 * expected.abs().max()
    assert loss == pytest.approx(-mean_advantage, abs=1e-6)


def test_log_probs_come_back_in_the_order_of_the_documents_however_they_are_cut(model):
    """Longest first is how they are packed. test_parallel.py deals them over
    processes too.
    """
    documents = random_documents(model)
    for document, log_probs in zip(
        documents, log_probs_of(model, documents, max_tokens=32, world=ALONE), strict=True
    ):
        expected = (
            torch.cat([torch.zeros(1), true_log_probs(model, document.ids)])
            * document.per_token["mask"]
        )
        assert (log_probs - expected).abs().max() <= 1e-5


def test_the_padding_share_counts_dummies_and_padding_among_all_tokens(model):
    """Two pairs of ranks: 11 predictions are padded to 12, 6 on each of a pair, and a dummy's one
    to 2: of 14 tokens, 3 are not of the document.
    """
    documents = with_weights(random_documents(model, lengths=(12,)), "token")
    of_all_ranks = [(None, {"weights": torch.zeros(1, tokens)}) for tokens in (6, 6, 1, 1)]
    assert padding_share(documents, of_all_ranks, ALONE) == pytest.approx(3 / 14)
    assert (
        padding_share(documents, backward(model, documents, nll, max_tokens=4, world=ALONE), ALONE)
        == 0
    )


# Trajectories


def trajectory(log_probs=None, advantages=(2.0, -1.0)):
    """Prompt of 3, turn 0 samples tokens 3 and 4, glue and observation 5 to 8, turn 1
    samples token 9 and 10.
    """
    turns = [
        Turn(3, 5, 9, "search", "ok", {"query": ["x"]}, advantage=advantages[0]),
        Turn(9, 11, 11, "answer", None, None, advantage=advantages[1]),
    ]
    return Trajectory(
        run="r",
        question_id="q",
        sample=1,
        seed=0,
        question="?",
        ground_truth=("a",),
        prompt_len=3,
        token_ids=list(range(20, 31)),
        log_probs=[-0.1, -0.2, -0.3, -0.4] if log_probs is None else log_probs,
        turns=turns,
        prediction="a",
        outcome=Outcome(1.0, "ok"),
        stop_reason="answered",
        seconds={"model": 0.0, "tool": 0.0},
        manifest={},
    )


def test_a_trajectorys_numbers_stand_on_its_sampled_tokens():
    document = policy_document(trajectory())
    assert document.ids == list(range(20, 31))
    assert document.per_token["mask"].tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]
    assert document.per_token["advantages"].tolist() == [0, 0, 0, 2, 2, 0, 0, 0, 0, -1, -1]
    assert document.per_token["sampler"].tolist() == pytest.approx(
        [0, 0, 0, -0.1, -0.2, 0, 0, 0, 0, -0.3, -0.4]
    )


class FreeLogits(torch.nn.Module):
    """A stand-in whose logits are parameters, one row per input token: a row's gradient says
    whether the loss sees it.
    """

    def __init__(self):
        super().__init__()
        self.logits_NV = torch.nn.Parameter(
            torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
        )

    def token_loss(self, ids_BS, targets_BS, *, loss, positions_BS, layout, temperature, kernel):
        rows = loss.weights_BS.flatten().nonzero()[:, 0]
        log_probs_N = (self.logits_NV / temperature).log_softmax(-1)[
            rows, targets_BS.flatten()[rows]
        ]
        return TokenLoss(loss.value(log_probs_N, rows).sum(), targets_BS, targets_BS)


def test_the_rows_before_sampled_tokens_are_trained_and_no_others():
    """Mask and targets are aligned: row 2 predicts the first sampled token, row 4 the glue after
    the turn, row 8 the next turn's first.

    A mask that was not shifted trains row 3 to 4 and 9 on the wrong tokens, among them
    the first tool token.
    """
    model, documents = FreeLogits(), with_weights([policy_document(trajectory())], "sequence")
    backward(model, documents, clipped, max_tokens=100, world=ALONE)
    seen = model.logits_NV.grad.abs().sum(-1) > 0
    assert seen.nonzero()[:, 0].tolist() == [2, 3, 8, 9]
    up = model.logits_NV.grad[[2, 3, 8, 9], [23, 24, 29, 30]]
    # descent raises the tokens of advantage 2 and lowers those of -1
    assert (up[:2] < 0).all() and (up[2:] > 0).all()


def test_a_trajectory_without_log_probs_or_advantages_is_refused():
    """One made of messages, or one that was never credited, is not of this policy: training on it
    would be silent nonsense.
    """
    for bad in (trajectory(log_probs=[]), trajectory(advantages=(2.0, None))):
        with pytest.raises(ValueError, match="trajectory q/1: no log-probs or no advantages"):
            policy_document(bad)


# Metrics


def fields_of(weights, advantages, sampler, **more):
    return {
        name: torch.tensor([values])
        for name, values in {
            "weights": weights,
            "advantages": advantages,
            "sampler": sampler,
            **more,
        }.items()
    }


def result_of(loss, log_probs, entropies):
    return TokenLoss(torch.tensor(loss), torch.tensor([log_probs]), torch.tensor([entropies]))


def test_metrics_are_means_over_the_trained_tokens_by_hand():
    """Two micro-batches, three trained tokens; what stands on the untrained one (1e6)
    is nowhere to be seen.

    k3 at p = .5 and ref = .25 is .193147 (trap 19), at p = ref 0. Ratio 1.5 at A = 1 is clipped,
    ratio 1 is not, ratio .5 at A = -1 is.
    """
    first = (
        result_of(0.5, [log(0.5), 0.0, log(0.5)], [1.0, 0.0, 2.0]),
        fields_of(
            [0.25, 0.0, 0.25],
            [1.0, 1e6, 1.0],
            [log(0.5) - log(1.5) + 0.25, 1e6, log(0.5)],
            ref=[log(0.25), 1e6, log(0.5)],
            old=[log(0.5) - log(1.5), 1e6, log(0.5)],
        ),
    )
    second = (
        result_of(-0.25, [log(0.4)], [0.3]),
        fields_of([0.5], [-1.0], [log(0.8) - 0.5], ref=[log(0.4)], old=[log(0.8)]),
    )
    metrics = policy_metrics([first, second], clip=0.2, dual_clip=3.0, world=ALONE)
    expected = {
        "loss": 0.25,
        "trained_tokens": 3.0,
        "entropy": 3.3 / 3,
        "kl": 0.193147 / 3,
        "clip_share": 2 / 3,
        "sampler_gap_mean": 0.75 / 3,
        "sampler_gap_max": 0.5,
    }
    assert metrics == pytest.approx(expected, abs=1e-6)


def test_without_reference_there_is_no_kl_and_without_old_log_probs_nothing_is_clipped():
    """The gap is then between the sampler and the forward pass of the update itself."""
    batch = (
        result_of(0.1, [-1.0, -2.0], [1.0, 1.0]),
        fields_of([0.5, 0.5], [1.0, -1.0], [-1.5, -2.0]),
    )
    metrics = policy_metrics([batch], clip=0.2, dual_clip=3.0, world=ALONE)
    assert metrics["kl"] is None and metrics["clip_share"] == 0.0
    assert metrics["sampler_gap_mean"] == pytest.approx(0.25) and metrics[
        "sampler_gap_max"
    ] == pytest.approx(0.5)


def test_the_loss_of_several_updates_is_their_mean():
    """Each mini-batch's weights sum to 1: with two updates per batch the metric is
    not twice that of one.
    """
    batch = result_of(0.3, [-1.0], [1.0]), fields_of([1.0], [1.0], [-1.0])
    assert policy_metrics([batch, batch], clip=0.2, dual_clip=3.0, world=ALONE)[
        "loss"
    ] == pytest.approx(0.3)


def test_the_dual_clip_counts_as_clipped():
    batch = (
        result_of(0.0, [log(0.5)], [1.0]),
        fields_of([1.0], [-1.0], [0.0], old=[log(0.5) - log(5)]),
    )
    assert exp(log(5)) == pytest.approx(5)
    assert policy_metrics([batch], clip=0.2, dual_clip=3.0, world=ALONE)["clip_share"] == 1.0
