"""Segments, normalisation, IG-Scale, discount and expansion against values worked out by hand or by
numpy outside this repository.

Tolerances: 1e-5 where the reference is printed with five digits or was made with another IG-Scale
epsilon (1e-6; ours, 1e-8, moves s by 6e-7); 2e-5 against textbook z-scores, because sigma =
sqrt(var + 1e-8) and z = x / (sigma + 1e-6) lie up to 1e-5 below; 1e-12 for fp64.
"""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from venus.rl.igpo import (
    AdvantageConfig,
    TurnRewards,
    batch_advantages,
    credit_segments,
    info_gains,
    scored_turns,
    token_advantages,
    z_scores,
)
from venus.trajectory import Outcome, Trajectory, Turn

PLAIN = {"ig_scale": "none", "gamma": 0.5}


def rollout(gains, outcome, group=0, key=None):
    """Visits with these gains (the string "bad" = a malformed turn), then an
    answer with this outcome.
    """
    actions = ["malformed" if gain == "bad" else "visit" for gain in gains]
    info_gains = [None if gain == "bad" else gain for gain in gains]
    return TurnRewards(
        [*actions, "answer"],
        [*info_gains, None],
        outcome,
        group,
        (tuple(gains), outcome) if key is None else key,
    )


def advantages(rollouts, **options):
    return batch_advantages(rollouts, AdvantageConfig(**options))[0]


def stats(rollouts, **options):
    return batch_advantages(rollouts, AdvantageConfig(**options))[1]


def flat(nested):
    return [x for row in nested for x in row]


TWO = [rollout([0.3, 0.1], 1.0), rollout([-0.1], 0.0)]  # rollouts A and B of the module docstring


# ---- normalise, then discount


def test_separate_pools_give_the_released_values():
    assert advantages(TWO, **PLAIN)[0] == pytest.approx([1.474737, 0.499999, 0.999999], abs=2e-6)
    assert advantages(TWO, **PLAIN)[1] == pytest.approx([-1.724736, -0.999999], abs=2e-6)


def test_separate_pools_are_within_2e5_of_textbook_z_scores():
    assert flat(advantages(TWO, **PLAIN)) == pytest.approx(
        [1.474745, 0.5, 1, -1.724745, -1], abs=2e-5
    )


def test_gamma_one_sums_the_rewards_to_come():
    expected = [2.224745, 1, 1, -2.224745, -1]
    assert flat(advantages(TWO, ig_scale="none", gamma=1.0)) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(
    ("gamma", "expected"),
    [
        (1.0, [1.577858, 1.476061, 1.883250, -1.577858, -0.661683]),
        (0.5, [0.369015, 0.534436, 1.883250, -1.247017, -0.661683]),
    ],
)
def test_joint_pool_normalises_gains_and_outcomes_together(gamma, expected):
    assert flat(advantages(TWO, norm="joint", ig_scale="none", gamma=gamma)) == pytest.approx(
        expected, abs=2e-5
    )


def test_discount_before_normalisation_would_be_caught():
    """IGPO's first release discounted the raw rewards and normalised the sums (its issue 5):
    another algorithm, with these values.
    """
    wrong = [0.437, 0.437, 1.408, -1.263, -1.020]
    assert (
        max(
            abs(a - b)
            for a, b in zip(flat(advantages(TWO, norm="joint", **PLAIN)), wrong, strict=True)
        )
        > 0.3
    )


def test_turn_whose_normalised_gain_is_zero_keeps_its_own_discount():
    """Released code finds turns by `reward != 0`. A's second turn has z = 0: it would get 1.0 from
    the answer instead of .5.
    """
    assert advantages(TWO, **PLAIN)[0][1] == pytest.approx(0.5, abs=2e-6)


def test_raw_gain_of_exactly_zero_keeps_its_segment():
    """With visits gaining [0, .4] and [-.4], the turn with raw gain 0 is a segment: z = 0,
    advantage .5 (z_2 + .5), z_2 = sqrt(3/2).
    """
    first, _ = advantages([rollout([0.0, 0.4], 1.0), rollout([-0.4], 0.0)], **PLAIN)
    assert first[0] == pytest.approx(0.5 * (math.sqrt(1.5) + 0.5), abs=2e-5)


GOLDEN = {
    ("joint", "none"): [
        [0.97103, 0.47871, 1.68956],
        [-1.04659, -0.65705],
        [-1.27193, 0.53368, 0],
        [1.24524, 0],
    ],
    ("separate", "none"): [
        [1.07687, -0.21247, 1.0],
        [-1.06625, -1.0],
        [-0.98523, 0.41338, 0],
        [0.96456, 0],
    ],
    ("separate", "batch"): [
        [1.00095, 0.29365, 1.0],
        [-1.01563, -1.0],
        [-0.55628, 0.23340, 0],
        [0.54461, 0],
    ],
}
GOLDEN_BATCH = [
    rollout([0.5, -0.2], 1.0, group=0, key="s0"),
    rollout([0.1], 0.0, group=0, key="s1"),
    # the penalty -1 is one more reward of the IG pool
    rollout(["bad", 0.3], 0.0, group=1, key="s2"),
    rollout([0.7], 0.0, group=1, key="s3"),
]


@pytest.mark.parametrize(("norm", "ig_scale"), GOLDEN)
def test_released_advantages_of_two_groups(norm, ig_scale):
    result = advantages(GOLDEN_BATCH, norm=norm, ig_scale=ig_scale)
    assert flat(result) == pytest.approx(flat(GOLDEN[norm, ig_scale]), abs=1e-5)


def test_released_statistics_of_ig_scale():
    result = stats(GOLDEN_BATCH)
    assert [result["ig_scale"], result["outcome_abs_z"], result["ig_abs_z"]] == pytest.approx(
        [0.564616, 0.5, 0.885554], abs=2e-6
    )


def test_statistics_count_what_the_batch_holds():
    result = stats(GOLDEN_BATCH)
    names = ("groups", "zero_variance_groups", "segments", "scored_turns")
    assert [result[name] for name in names] == [2, 1, 10, 5]
    assert result["info_gain_mean"] == pytest.approx((0.5 - 0.2 + 0.1 + 0.3 + 0.7) / 5, abs=1e-12)
    assert result["info_gain_positive_share"] == 0.8
    assert result["advantage_abs_mean"] == pytest.approx(
        sum(map(abs, flat(GOLDEN["separate", "batch"]))) / 10, abs=1e-5
    )


def test_batch_without_gains_has_no_gain_statistics():
    result = stats([rollout([None], 1.0, key=1), rollout([None], 0.0, key=2)])
    assert [
        result[name]
        for name in ("ig_scale", "ig_abs_z", "info_gain_mean", "info_gain_positive_share")
    ] == [None] * 4


# ---- groups


def shuffled(items, seed):
    return random.Random(seed).sample(range(len(items)), len(items))


# sevenths: their sums round, in an order
gain = st.none() | st.just("bad") | st.integers(-999, 999).map(lambda n: n / 7)
batches = st.lists(
    st.tuples(st.lists(gain, max_size=5), st.floats(0, 1), st.integers(0, 2)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(
    batches,
    st.integers(0, 99),
    st.sampled_from(["batch", "group", "none"]),
    st.sampled_from(["separate", "joint"]),
)
def test_shuffling_rollouts_changes_no_bit_of_any_advantage(batch, seed, ig_scale, norm):
    """Search-R1 (issue 88) lost the group on reordering. Equality is exact: sums are rounded once,
    so a rank's order cannot matter.
    """
    rollouts = [
        rollout(gains, outcome, group, key) for key, (gains, outcome, group) in enumerate(batch)
    ]
    order = shuffled(rollouts, seed)
    expected = advantages(rollouts, ig_scale=ig_scale, norm=norm)
    assert advantages([rollouts[i] for i in order], ig_scale=ig_scale, norm=norm) == [
        expected[i] for i in order
    ]


def test_two_equal_questions_stay_two_groups():
    """Grouping by question text merges them: outcomes [1, 0 | 0, 0] would then share one mean, and
    the second group would get -.577.
    """
    batch = [
        rollout([], o, group=g, key=("same question", n))
        for n, (o, g) in enumerate([(1.0, 0), (0.0, 0), (0.0, 1), (0.0, 1)])
    ]
    assert flat(advantages(batch)) == pytest.approx([1, -1, 0, 0], abs=2e-5)


def test_one_rollout_twice_is_our_own_fault():
    with pytest.raises(AssertionError, match="one of them twice"):
        batch_advantages([TWO[0], TWO[0]], AdvantageConfig())


def test_turn_without_gain_leaves_the_outcomes_of_others_alone():
    """A public re-implementation puts a 0 outcome on every turn into the outcome pool, which moves
    mean and std with the turn count.
    """
    shorter = advantages(TWO, **PLAIN)[1]
    longer = advantages([rollout([None, 0.3, None, 0.1], 1.0, key="longer"), TWO[1]], **PLAIN)[1]
    assert shorter == longer


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30))
def test_z_scores_sum_to_zero(pool):
    """1e-7: 30 roundings of at most 1e-13 (values up to 1e3) over a sigma of at
    least 1e-4 make 3e-8.
    """
    assert abs(math.fsum(z_scores(pool))) < 1e-7


def test_population_variance():
    """The sample variance would give +-.7071."""
    assert z_scores([1.0, 0.0]) == pytest.approx([1, -1], abs=2e-5)


def test_pool_of_one_is_zero():
    assert z_scores([0.7]) == [0.0]


def test_equal_rewards_are_exactly_zero():
    """.1 + .1 + .1 is not .3 in binary; a mean off by 1e-17 over sigma 1e-4 must not
    become an advantage.
    """
    assert z_scores([0.1] * 3) == [0.0] * 3


def test_equal_outcomes_leave_the_gains_signal():
    batch = [rollout([g], 1.0, key=g) for g in (0.4, 0.0, -0.4)]
    first, middle, last = advantages(batch, **PLAIN)
    assert [first[0], middle[0], last[0]] == pytest.approx(
        [math.sqrt(1.5), 0, -math.sqrt(1.5)], abs=2e-5
    )
    assert [first[1], middle[1], last[1]] == [0, 0, 0]


# ---- noise


def test_tiny_gains_are_blown_up_as_released():
    """sigma = sqrt(1e-8 + 1e-8): gains of one part in ten thousand get z = +-.70.
    Documented, not hidden.
    """
    assert z_scores([1e-4, -1e-4]) == pytest.approx([0.7021, -0.7021], abs=1e-4)


def test_std_floor_keeps_noise_small():
    batch = [rollout([1e-4], 1.0), rollout([-1e-4], 1.0)]
    first, second = advantages(batch, ig_std_floor=0.01, **PLAIN)
    assert 0.0099 < first[0] <= 0.01 and -0.01 <= second[0] < -0.0099


def test_std_floor_leaves_real_outcomes_alone():
    assert advantages(TWO, ig_std_floor=100.0, **PLAIN)[0][-1] == pytest.approx(1, abs=2e-5)


def test_ig_scale_stops_at_ten():
    """M_IG about .01 under the floor and M_O at least .3 ask for 30."""
    batch = [rollout([1e-4], 1.0), rollout([-1e-4], 1.0)]
    assert stats(batch, ig_std_floor=0.01)["ig_scale"] == 10.0


def test_ig_scale_takes_an_outcome_of_at_least_three_tenths():
    """All outcomes equal: M_O = 0 would silence the gains; .3 / M_IG with M_IG = 1 gives s = .3."""
    assert stats([rollout([0.3], 1.0), rollout([-0.3], 1.0)])["ig_scale"] == pytest.approx(
        0.3, abs=2e-5
    )


def test_ig_scale_per_group_uses_the_groups_own_means():
    """Then each group is as if it were alone in the batch. Group 1, for one: M_O = 0 -> .3, M_IG =
    2 / (3 sigma), s = .45 sigma.
    """
    grouped = advantages(GOLDEN_BATCH, ig_scale="group")
    alone = advantages(GOLDEN_BATCH[:2]) + advantages(GOLDEN_BATCH[2:])
    assert grouped == alone
    assert grouped[3][0] == pytest.approx(0.45 * 0.7, abs=2e-5)  # s z = .45 sigma * .7 / sigma


# ---- malformed turns


def test_malformed_turn_is_a_segment_of_its_own():
    assert credit_segments(
        ["search", "malformed", "visit", "answer"], [False, False, True, False]
    ) == [1, 0, 1, 2]


def test_malformed_turn_does_not_blame_the_searches_before_it():
    """Released code spreads a malformed turn's -1 over the searches since the last reward. Here
    they share the visit's advantage.
    """
    first = TurnRewards(
        ["search", "malformed", "visit", "answer"], [None, None, 0.3, None], 1.0, 0, "first"
    )
    search, malformed, visit, _ = advantages([first, TWO[1]], format_pool="none", **PLAIN)[0]
    assert search == visit > 0 > malformed


def test_malformed_turn_enters_the_gains_pool_as_released():
    """Pool [-1, .3, .7]: mean 0, sigma .725718, so s2 = [z_0 + .5 z_1, z_1, 0] with z_0 = -1 /
    sigma, z_1 = .3 / sigma.
    """
    third = advantages(GOLDEN_BATCH[2:], **PLAIN)[0]
    assert third == pytest.approx([-0.85 / 0.725718, 0.3 / 0.725718, 0], abs=2e-5)


def test_unpooled_penalty_is_added_after_normalisation_and_scaling():
    """-lambda stays -2 whatever IG-Scale and ig_weight are; then the discounted rest
    is added: -2 + .5 A_1.
    """
    first, _ = advantages(
        [rollout(["bad", 0.3], 1.0), TWO[1]],
        format_pool="none",
        format_penalty=2.0,
        gamma=0.5,
        ig_weight=7.0,
    )
    assert first[0] == pytest.approx(-2 + 0.5 * first[1], abs=1e-12)


def test_unpooled_penalty_moves_no_gain():
    with_penalty = advantages([rollout(["bad", 0.3, 0.1], 1.0), TWO[1]], format_pool="none")
    assert [with_penalty[0][1:], with_penalty[1]] == advantages(TWO)


def test_earlier_segments_see_the_penalty_discounted():
    clean, _ = advantages(TWO, format_pool="none", **PLAIN)
    spoilt, _ = advantages([rollout([0.3, "bad", 0.1], 1.0), TWO[1]], format_pool="none", **PLAIN)
    z = clean[0] - 0.5 * clean[1]
    assert spoilt[0] == pytest.approx(z + 0.5 * (-1 + 0.5 * clean[1]), abs=1e-12)


def test_malformed_last_turn_replaces_the_outcome_in_its_pool():
    """Outcomes [1, .5, 0, -2]: the penalty on the last turn squeezes the others to [.988, .549,
    .110], it does not leave the pool.
    """
    # the judge said correct; the format did not
    last = TurnRewards(["malformed"], [None], 1.0, 0, "malformed last")
    batch = [rollout([], 1.0), rollout([], 0.5), rollout([], 0.0), last]
    assert flat(advantages(batch, format_penalty=2.0)) == pytest.approx(
        [0.988, 0.549, 0.110, -1.646], abs=1e-3
    )


@pytest.mark.parametrize("format_pool", ["ig", "none"])
def test_malformed_last_turn_is_pooled_with_outcomes_for_either_format_pool(format_pool):
    last = TurnRewards(["malformed"], [None], 1.0, 0, "malformed last")
    assert flat(advantages([rollout([], 1.0), last], format_pool=format_pool)) == pytest.approx(
        [1, -1], abs=2e-5
    )


def test_open_turns_share_the_malformed_last_turn():
    """The last turn always closes the outcome's segment: there is no other reward those
    searches could have earned.
    """
    assert credit_segments(["visit", "search", "malformed"], [True, False, False]) == [0, 1, 1]


@pytest.mark.parametrize("format_pool", ["ig", "none"])
def test_penalty_of_zero_is_off(format_pool):
    """An off penalty must not enter the pool as a reward of 0: the mean of [.3,
    .1, -.1] would move.
    """
    last = TurnRewards(["malformed"], [None], 1.0, 1, "malformed last")
    batch = [rollout([0.3, "bad", 0.1], 1.0), TWO[1], last, rollout([], 0.0, group=1)]
    first, second, third, fourth = advantages(
        batch, format_pool=format_pool, format_penalty=0.0, **PLAIN
    )
    assert [[first[0], first[2], first[3]], second] == [
        [pytest.approx(1.2247 + 0.25 * 0.5, abs=1e-4), *advantages(TWO, **PLAIN)[0][1:]],
        advantages(TWO, **PLAIN)[1],
    ]
    assert first[1] == 0.5 * first[2] and third + fourth == pytest.approx([1, -1], abs=2e-5)


def test_ig_weight_multiplies_gains_and_not_penalties():
    """GOLDEN s2 = [penalty, gain, outcome 0], separate: weight 0 leaves the penalty's z alone."""
    weighted, plain = (
        advantages(GOLDEN_BATCH, ig_scale="none", ig_weight=w)[2] for w in (0.0, 1.0)
    )
    assert weighted[1] == 0.0
    assert weighted[0] == pytest.approx(plain[0] - 0.95 * plain[1], abs=1e-12)


# ---- segments


def test_searches_and_unanswered_visits_join_the_next_scored_visit():
    actions = ["search", "visit", "search", "visit", "search", "answer"]
    statuses = ["ok", "timeout", "ok", "ok", "ok", None]
    scored = scored_turns(actions, statuses, "visit")
    assert credit_segments(actions, scored) == [0, 0, 0, 0, 1, 1]


def test_all_turns_scored_makes_every_turn_a_segment():
    actions = ["search", "malformed", "visit", "answer"]
    assert credit_segments(actions, scored_turns(actions, ["ok", None, "error", None], "all")) == [
        0,
        1,
        2,
        3,
    ]


def test_nothing_scored_is_one_segment_apart_from_malformed_turns():
    assert credit_segments(["search", "malformed", "visit", "answer"], [False] * 4) == [1, 0, 1, 1]


def test_failed_visits_are_not_scored():
    """Released code scores a visit that timed out as if the page had been read."""
    statuses = ["ok", "empty", "error", "timeout", None, "ok"]
    assert scored_turns(["visit"] * 6, statuses, "visit") == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("ig_turns", ["visit", "all", "none"])
def test_last_turn_is_never_scored(ig_turns):
    assert scored_turns(["visit", "visit"], ["ok", "ok"], ig_turns)[-1] is False


def test_malformed_turns_are_never_scored():
    assert scored_turns(["malformed", "search", "answer"], [None, "ok", None], "all") == [
        False,
        True,
        False,
    ]


def test_lengths_that_differ_are_refused():
    with pytest.raises(ValueError):
        scored_turns(["visit", "answer"], ["ok"], "visit")


# ---- information gain


def test_gain_is_the_difference_to_the_previous_scored_value():
    assert info_gains([None, -2.0, None, -1.5, None], -3.0, "log_prob") == [
        None,
        1.0,
        None,
        0.5,
        None,
    ]


def test_probability_and_log_probability_gain_of_the_toy_model():
    """Bigram toy: the answer's two tokens have p = .2, .5 at the question and .4, .5
    after the first turn.
    """
    before, after = (math.log(a) / 2 + math.log(0.5) / 2 for a in (0.2, 0.4))
    assert info_gains([after], before, "prob") == pytest.approx([0.130986], abs=1e-6)
    assert info_gains([after], before, "log_prob") == pytest.approx([0.346574], abs=1e-6)


def test_no_gain_is_zero_and_not_absent():
    assert info_gains([-2.0, None], -2.0, "log_prob") == [0.0, None]


@pytest.mark.parametrize(
    ("values", "baseline"), [([math.nan], -1.0), ([-math.inf], -1.0), ([-1.0], math.nan)]
)
def test_value_that_is_not_finite_is_refused(values, baseline):
    """Released code turns it into a gain of 0 or drops the list's entry, which
    shifts all that follow.
    """
    with pytest.raises(ValueError, match="must be finite"):
        info_gains(values, baseline, "log_prob")


# ---- tokens


def test_advantages_lie_on_sampled_tokens_only():
    result = token_advantages([2.0, -1.0], [(1, 3), (4, 5)], 6)
    assert result.dtype == torch.float32 and result.tolist() == [0, 2, 2, 0, -1, 0]


def test_doubling_the_tokens_of_a_turn_changes_no_advantage():
    """A discount per token would shrink the first turn by .95 ** 100 = .0059; turns
    are what is discounted.
    """
    per_turn = advantages(TWO)[0]
    short = token_advantages(per_turn, [(5, 15), (20, 30), (35, 45)], 45)
    long = token_advantages(per_turn, [(5, 25), (30, 50), (55, 75)], 75)
    assert (
        short[[5, 20, 35]].tolist()
        == long[[24, 49, 74]].tolist()
        == torch.tensor(per_turn).tolist()
    )


@pytest.mark.parametrize("spans", [[(1, 3)], [(1, 3), (2, 5)], [(1, 3), (4, 4)], [(1, 3), (4, 7)]])
def test_spans_that_do_not_fit_are_refused(spans):
    with pytest.raises(ValueError):
        token_advantages([2.0, -1.0], spans, 6)


# ---- GRPO and configuration


def test_grpo_ignores_gains_and_gives_every_turn_the_discounted_outcome():
    """One segment a rollout: no discount inside it. The gains may still be there to be logged."""
    result = advantages(TWO, ig_turns="none", format_pool="none")
    assert flat(result) == pytest.approx([1, 1, 1, -1, -1], abs=2e-5)


def test_igpo_with_gains_weighted_zero_differs_from_grpo_by_the_discount_only():
    expected = [0.95**2, 0.95, 1, -0.95, -1]
    assert flat(advantages(TWO, ig_weight=0.0)) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ig_turns": "none"}, "set format_pool none"),
        ({"ig_turns": "search"}, "ig_turns search: must be one of visit, all, none"),
        ({"norm": "scaled_separate"}, "norm scaled_separate: must be one of separate, joint"),
        ({"gamma": 1.5}, "gamma 1.5: must be at least 0 and at most 1"),
        ({"ig_std_floor": -1.0}, "ig_std_floor -1.0: must be at least 0"),
        ({"format_penalty": math.nan}, "format_penalty nan: must be finite"),
    ],
)
def test_config_names_the_value_and_the_fix(options, message):
    with pytest.raises(ValueError, match=message) as error:
        AdvantageConfig(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("actions", "gains"),
    [
        (["visit", "answer"], [0.1]),
        (["visit", "answer"], [0.1, 0.2]),
        (["malformed", "answer"], [0.1, None]),
        (["visit", "answer"], [math.nan, None]),
        (["browse", "answer"], [0.1, None]),
        ([], []),
    ],
)
def test_rewards_that_contradict_their_turns_are_refused(actions, gains):
    with pytest.raises(ValueError, match="rollout 7"):
        TurnRewards(actions, gains, 1.0, 0, "rollout 7")


def test_gain_on_a_search_does_not_fit_visit_scoring():
    batch = [TurnRewards(["search", "answer"], [0.1, None], 1.0, 0, "rollout 7")]
    with pytest.raises(ValueError, match=r"rollout 7: turn 0 \(search\) has info gain 0.1"):
        batch_advantages(batch, AdvantageConfig())


def trajectory(status):
    turns = [
        Turn(2, 4, 5, "visit", "ok", {"url": ["u"], "goal": "g"}, info_gain=0.25),
        Turn(5, 6, 6, "answer", None, None),
    ]
    outcome = Outcome(1.0 if status == "ok" else None, status)
    return Trajectory(
        "run",
        "q1",
        3,
        0,
        "?",
        ("x",),
        2,
        [0] * 6,
        [],
        turns,
        "x",
        outcome,
        "answered",
        {"model": 0.0, "tool": 0.0},
        {},
    )


def test_trajectory_brings_its_gains_and_outcome():
    expected = TurnRewards(["visit", "answer"], [0.25, None], 1.0, 4, ("run", "q1", 3))
    assert TurnRewards.from_trajectory(trajectory("ok"), group=4) == expected


def test_excluded_trajectory_must_be_filtered_before():
    """A judge outage counted as outcome 0 would move its whole group."""
    with pytest.raises(AssertionError, match="judge_error"):
        TurnRewards.from_trajectory(trajectory("judge_error"), group=0)


def test_missing_outcome_must_be_filtered_before():
    with pytest.raises(AssertionError, match="excluded rollouts"):
        TurnRewards(["answer"], [None], None, 0, "rollout 7")
