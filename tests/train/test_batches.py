"""Documents -> packed micro-batches, and the order of an epoch, by hand and as properties."""

from collections import Counter

import pytest
import torch
from chat_samples import expected, needs_data
from hypothesis import given
from hypothesis import strategies as st

from venus.model.attention import Layout
from venus.train.batches import (
    Document,
    batch_items,
    dummy_document,
    epoch_batches,
    epoch_plan,
    micro_batches,
    pack,
    steps_per_epoch,
)

# Packing


def test_documents_are_shifted_inside_themselves_and_never_predict_across():
    """Of [1 2 3][7 8 9 5] the pairs are 1>2 2>3 and 7>8 8>9 9>5; 3>7 would train a
    document on its neighbour.
    """
    packed = pack(
        [Document([1, 2, 3], {"mask": [0, 1, 1]}), Document([7, 8, 9, 5], {"mask": [0, 0, 1, 0]})]
    )
    assert packed.ids_1N.tolist() == [[1, 2, 7, 8, 9]]
    assert packed.targets_1N.tolist() == [[2, 3, 8, 9, 5]]
    assert packed.positions_1N.tolist() == [[0, 1, 0, 1, 2]]
    assert packed.layout == Layout.documents([2, 3])
    assert packed.fields["mask"].tolist() == [[1, 1, 0, 1, 0]]


def test_every_field_follows_its_targets_as_fp32():
    """Lists and tensors alike: the number of token k stands where token k is the target."""
    packed = pack(
        [
            Document([4, 5, 6], {"a": torch.tensor([0.5, 1.5, 2.5]), "b": [7, 8, 9]}),
            Document([1, 2], {"a": [3.5, 4.5], "b": [1, 2]}),
        ]
    )
    assert (
        packed.fields["a"].tolist() == [[1.5, 2.5, 4.5]]
        and packed.fields["a"].dtype == torch.float32
    )
    assert packed.fields["b"].tolist() == [[8.0, 9.0, 2.0]]


def test_per_token_numbers_of_another_length_are_refused():
    with pytest.raises(ValueError, match="2 mask for 3 ids"):
        Document([1, 2, 3], {"mask": [0, 1]})


def test_a_dummy_has_one_prediction_and_no_weight():
    packed = pack([dummy_document(["mask", "weights"])])
    assert packed.ids_1N.shape == (1, 1)
    assert {name: values.tolist() for name, values in packed.fields.items()} == {
        "mask": [[0.0]],
        "weights": [[0.0]],
    }


def test_packing_fills_up_to_a_multiple_with_a_document_of_its_own():
    """Three predictions to eight: what is padded sees no document, is seen by
    none, and weighs nothing.
    """
    packed = pack(
        [Document([1, 2, 3], {"mask": [0, 1, 1]}), Document([7, 8], {"mask": [0, 1]})],
        multiple_of=8,
    )
    assert packed.ids_1N.tolist() == [[1, 2, 7, 0, 0, 0, 0, 0]]
    assert packed.positions_1N.tolist() == [[0, 1, 0, 0, 1, 2, 3, 4]]
    assert packed.layout == Layout.documents([2, 1, 5])
    assert packed.fields["mask"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]]


def test_packing_that_fits_a_multiple_is_not_filled_up():
    documents = [Document([1, 2, 3], {"mask": [0, 1, 1]})]
    assert pack(documents, multiple_of=2).layout == pack(documents).layout == Layout.documents([2])


# Micro-batches

LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=25)


@given(LENGTHS, st.integers(1, 100), st.integers(1, 4))
def test_every_document_is_in_one_micro_batch_within_the_budget_and_ranks_have_equally_many(
    lengths, max_tokens, num_ranks
):
    dealt = micro_batches(lengths, max_tokens, num_ranks)
    assert sorted(index for rank in dealt for batch in rank for index in batch) == list(
        range(len(lengths))
    )
    assert len(dealt) == num_ranks and len({len(rank) for rank in dealt}) == 1
    assert all(
        sum(lengths[i] for i in batch) <= max_tokens or len(batch) == 1
        for rank in dealt
        for batch in rank
    )


@given(LENGTHS, st.integers(1, 100), st.integers(1, 4), st.randoms())
def test_the_order_of_the_documents_changes_no_micro_batch(lengths, max_tokens, num_ranks, random):
    """Compared by length, since equal lengths may swap."""
    shuffled = random.sample(lengths, len(lengths))

    def contents(lengths):
        return [
            [sorted(lengths[i] for i in batch) for batch in rank]
            for rank in micro_batches(lengths, max_tokens, num_ranks)
        ]

    assert contents(shuffled) == contents(lengths)


def test_documents_are_spread_evenly_over_the_ranks():
    """Longest first into the emptiest: 10 + 2 + 2 + 1 and 9 + 8, not the order of
    the file, 13 and 19.
    """
    lengths = [2, 10, 1, 8, 9, 2]
    dealt = micro_batches(lengths, 100, 2)
    assert [[sum(lengths[i] for i in batch) for batch in rank] for rank in dealt] == [[15], [17]]


def test_a_document_longer_than_the_budget_adds_no_empty_rounds():
    """One of 100 in a budget of 10 made ten rounds, nine of them dummies: each is a forward and
    backward of all ranks for nothing.
    """
    assert micro_batches([100], 10, 1) == [[[0]]]
    assert micro_batches([100, 4, 5], 10, 1) == [[[0], [2, 1]]]
    assert micro_batches([100, 90, 80], 10, 2) == [[[0], [2]], [[1], []]]


def test_a_rank_may_be_left_with_an_empty_micro_batch():
    assert micro_batches([5], 10, 2) == [[[0]], [[]]]


@needs_data
@pytest.mark.parametrize(("num_ranks", "sp"), [(1, 1), (2, 1), (1, 2), (8, 1), (1, 8)])
def test_real_rows_are_packed_with_hardly_any_padding(num_ranks, sp):
    """The ten SFT files, 19,929 to 47,189 tokens, at 65,536 tokens a GPU: at most sp - 1 tokens a
    micro-batch, and no dummy. 0.002 % seen; 5 % allowed.
    """
    lengths = [expected()[f"sft/{number:04d}.json"]["tokens"] for number in range(10)]
    dealt = micro_batches(lengths, 65_536 * sp, num_ranks)
    documents = [
        [dummy_document(["mask"], lengths[i] - 1) for i in batch] or [dummy_document(["mask"])]
        for rank in dealt
        for batch in rank
    ]
    ran = sum(pack(batch, multiple_of=sp).ids_1N.numel() for batch in documents)
    assert 1 - (sum(lengths) - len(lengths)) / ran < 1e-4


# Epochs


def test_an_epoch_holds_every_item_as_often_as_its_weight():
    assert Counter(epoch_plan([1, 3, 0, 2], seed=0, epoch=0)) == {0: 1, 1: 3, 3: 2}


def test_the_copies_of_an_item_stand_apart():
    """w copies in an epoch of n: each gap is n/w, up to the scatter of the others (100 single
    items, so 5 sigma is 25 places).
    """
    plan = epoch_plan([4, *[1] * 100], seed=3, epoch=0)
    places = [place for place, item in enumerate(plan) if item == 0]
    assert all(abs(b - a - 26) < 25 for a, b in zip(places, places[1:], strict=False))


def test_an_epochs_order_depends_on_seed_and_epoch_and_on_nothing_else():
    orders = {
        (seed, epoch): tuple(epoch_plan([1] * 50, seed=seed, epoch=epoch))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(set(orders.values())) == 9
    torch.manual_seed(5)
    assert tuple(epoch_plan([1] * 50, seed=1, epoch=2)) == orders[1, 2]


def test_every_place_is_reached_by_every_item():
    """A shuffle, not a rotation: over 400 epochs of 4 items each item comes first about 100
    times (5 sigma is 43).
    """
    firsts = Counter(epoch_plan([1] * 4, seed=0, epoch=epoch)[0] for epoch in range(400))
    assert all(abs(firsts[item] - 100) < 43 for item in range(4))


def test_batches_follow_the_epochs_and_no_batch_crosses_from_one_into_the_next():
    """Seven items in batches of three: two steps an epoch, the seventh is left out,
    another one each time.
    """
    steps = [batch_items([1] * 7, 3, seed=1, step=step) for step in range(6)]
    assert steps_per_epoch([1] * 7, 3) == 2
    for epoch in range(3):
        plan = epoch_plan([1] * 7, seed=1, epoch=epoch)
        assert [steps[2 * epoch], steps[2 * epoch + 1]] == [plan[:3], plan[3:6]]


def test_with_fewer_items_than_a_batch_an_epoch_is_one_batch_of_them_all():
    assert steps_per_epoch([1, 1], 8) == 1
    assert sorted(batch_items([1, 1], 8, seed=0, step=5)) == [0, 1]


# Copies


def fills(weights, batch_size):
    """Whether batches of different items can be filled at all: each item goes at most once into
    each (Gale and Ryser).
    """
    num_batches = steps_per_epoch(weights, batch_size)
    return sum(min(weight, num_batches) for weight in weights) >= num_batches * min(
        batch_size, sum(weights)
    )


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=12).filter(any),
    st.integers(1, 9),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_copies_never_share_a_batch_wherever_that_is_possible_at_all(
    weights, batch_size, seed, epoch
):
    """Five copies of one trajectory in one batch of 32 are a step on that trajectory: what the
    released trainer did without --shuffle.
    """
    if not fills(weights, batch_size):
        with pytest.raises(ValueError, match="copies of a row must meet in a batch"):
            epoch_batches(weights, batch_size, seed=seed, epoch=epoch)
        return
    batches = epoch_batches(weights, batch_size, seed=seed, epoch=epoch)
    assert batches == epoch_batches(weights, batch_size, seed=seed, epoch=epoch)
    assert len(batches) == steps_per_epoch(weights, batch_size)
    assert all(len(batch) == len(set(batch)) == min(batch_size, sum(weights)) for batch in batches)
    used = Counter(item for batch in batches for item in batch)
    assert all(used[item] <= weight for item, weight in enumerate(weights))


def test_copies_that_do_not_meet_leave_the_order_of_the_epoch_as_it_is():
    weights = [1] * 30 + [2, 5]
    plan = epoch_plan(weights, seed=0, epoch=0)
    assert epoch_batches(weights, 4, seed=0, epoch=0) == [plan[k : k + 4] for k in range(0, 36, 4)]


def test_the_papers_epoch_has_585_batches_of_32_different_trajectories():
    """3,720 once, 4,400 twice and 1,245 five times are 18,745."""
    weights = [1] * 3720 + [2] * 4400 + [5] * 1245
    batches = epoch_batches(weights, 32, seed=0, epoch=0)
    assert (
        sum(weights) == 18745
        and len(batches) == 585
        and all(len(set(batch)) == 32 for batch in batches)
    )
