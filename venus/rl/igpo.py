"""IGPO's credit: rewards per turn -> credit segments -> normalised, scaled, discounted advantages
-> one number per token.

    info gain   r_t = v_t - v_prev                            Eq. 2, 3
    penalty     r_t = -lambda on a malformed turn             Eq. 4
    normalise   z = (r - mean) / (sigma + 1e-6)               Eq. 5, 6
    IG-Scale    s = min(max(M_O, 0.3) / (M_IG + 1e-8), 10)    Eq. 7
    discount    A_k = z_k + gamma A_(k+1)                     Eq. 9

v_prev is the previous scored value, at first the question's. Normalisation is per group and pool,
sigma = sqrt(population variance + 1e-8). M_O and M_IG are the mean |z| of the outcome and of the IG
pools. The discount runs over a rollout's segments, after normalisation.

By hand: rollouts A [visit, visit, answer], gains .3, .1, outcome 1, and B [visit, answer], gain
-.1, outcome 0. z of the gains 1.2247, 0 and -1.2247, of the outcomes 1 and -1. Without IG-Scale,
gamma .5: A = [1.2247 + .5 * .5, .5, 1], B = [-1.2247 - .5, -1], eps aside.

Plain lists: a reward travels with its rollout, and a turn whose reward is 0 is still a turn. Sums
are `math.fsum`, which rounds once: neither the order of the rollouts nor the number of processes
changes a bit of an advantage.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, fsum, isfinite, sqrt

import torch
from torch import Tensor

from venus.cli import Options, option
from venus.trajectory import ACTIONS, Trajectory

VARIANCE_EPS, SIGMA_EPS = 1e-8, 1e-6
SCALE_FLOOR = 0.3
SCALE_EPS = 1e-8
SCALE_CAP = 10.0
Segment = tuple[int, str, float]  # group, kind (gain, penalty or outcome), reward


@dataclass(frozen=True)
class AdvantageConfig(Options):
    """How rewards become advantages; ValueError for a value out of range, or a combination that is
    not defined.

    GRPO is ig_turns none with format_pool none. The released joint mode is norm joint with ig_scale
    none.
    """

    ig_turns: str = option(
        "visit",
        group="credit (Eq. 2-9)",
        help="turns whose gain is rewarded: answered visits, all, or none (GRPO)",
        choices=("visit", "all", "none"),
    )
    ig_value: str = option(
        "log_prob",
        help="gain in mean log-probability (DR-Venus) or in its exp (IGPO)",
        choices=("log_prob", "prob"),
    )
    ig_weight: float = option(
        1.0, help="factor on information gain, not on the penalty", least=0, most=1_000_000
    )
    # at 0, gains of +-1e-4 become z = +-.7 (IG-Scale may undo 10x)
    ig_std_floor: float = option(
        0.0,
        help="least sigma of the information-gain pool; at 0, as released, tiny gains become "
        "full-size advantages",
        least=0,
        most=1_000_000,
    )
    ig_scale: str = option(
        "batch",
        help="IG-Scale over the batch (released), per group, or off",
        choices=("batch", "group", "none"),
    )
    norm: str = option(
        "separate",
        help="z-score outcomes and gains apart, or as one pool",
        choices=("separate", "joint"),
    )
    format_penalty: float = option(
        1.0, help="lambda: a malformed turn earns minus this; 0 is off", least=0, most=1_000_000
    )
    format_pool: str = option(
        "ig",
        help="penalties enter the information-gain pool (released), or are added afterwards",
        choices=("ig", "none"),
    )
    gamma: float = option(0.95, help="discount per credit segment", least=0, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ig_turns == "none" and self.format_pool == "ig":
            raise ValueError(
                "ig_turns none with format_pool ig: equal penalties alone in a pool have z = "
                "0; set format_pool none"
            )


@dataclass(frozen=True)
class TurnRewards:
    """What one kept rollout earned: info_gains[t] (None = not scored) and the outcome, which
    belongs to its last turn.

    group: the rollout group, not the question (two equal questions are two groups); key: names the
    rollout in its group.
    """

    actions: Sequence[str]
    info_gains: Sequence[float | None]
    outcome: float
    group: int
    key: Hashable

    def __post_init__(self) -> None:
        assert self.outcome is not None and isfinite(self.outcome), (
            f"{self.key}: outcome {self.outcome}; excluded rollouts stay out"
        )
        if not self.actions or len(self.actions) != len(self.info_gains):
            raise ValueError(
                f"{self.key}: {len(self.info_gains)} info gains for {len(self.actions)} turns"
            )
        for t, (action, gain) in enumerate(zip(self.actions, self.info_gains, strict=True)):
            never_scored = action == "malformed" or t == len(self.actions) - 1
            if action not in ACTIONS or (gain is not None and (never_scored or not isfinite(gain))):
                raise ValueError(
                    f"{self.key}: turn {t} of {len(self.actions)} is {action!r} with info "
                    f"gain {gain}"
                )

    @classmethod
    def from_trajectory(cls, trajectory: Trajectory, group: int) -> "TurnRewards":
        """Read a kept trajectory (outcome.status ok) whose turns carry their info gains."""
        assert trajectory.kept, (
            f"{trajectory.id}: outcome status {trajectory.outcome.status}; excluded rollouts "
            "stay out"
        )
        turns = trajectory.turns
        return cls(
            [turn.action for turn in turns],
            [turn.info_gain for turn in turns],
            trajectory.outcome.value,
            group,
            trajectory.key,
        )


def scored_turns(
    actions: Sequence[str], tool_statuses: Sequence[str | None], ig_turns: str
) -> list[bool]:
    """Choose the turns after which the ground truth is scored; never the last one,
    never a malformed one.

    "visit": visits with status ok or empty; an error or a timeout brought no evidence. "all": those
    too, since each turn is a segment.
    """
    answered = [
        action == "visit" and status in ("ok", "empty")
        for action, status in zip(actions, tool_statuses, strict=True)
    ]
    chosen = {
        "visit": answered,
        "all": [action != "malformed" for action in actions],
        "none": [False] * len(actions),
    }[ig_turns]
    return [choice and t < len(actions) - 1 for t, choice in enumerate(chosen)]


def info_gains(
    values: Sequence[float | None], baseline: float, ig_value: str
) -> list[float | None]:
    """Return each turn's gain in nats ("log_prob") or probability ("prob") over the previous scored
    value; None = not scored (Eq. 2, 3).

    values[t]: v_t, the ground truth's mean log-prob after turn t, or None; baseline: the same at
    the question. With baseline -3, [-2, None, -1.5] -> [1, None, .5]. ValueError for a value that
    is not finite.
    """
    gains, previous = [], baseline
    for t, value in enumerate(values):
        if value is None:
            gains.append(None)
            continue
        if not isfinite(value - previous):
            raise ValueError(
                f"turn {t}: the ground truth's mean log-prob is {value} after {previous}; "
                "both must be finite"
            )
        gains.append({"log_prob": value - previous, "prob": exp(value) - exp(previous)}[ig_value])
        previous = value
    return gains


def credit_segments(actions: Sequence[str], scored: Sequence[bool]) -> list[int]:
    """Return the credit segment of each turn; segments are numbered by their last turn and
    need not be contiguous.

    A scored turn closes a segment with all open turns before it; the last turn closes the
    outcome's. Any other malformed turn is a segment of its own and leaves the open turns open:
    [search, malformed, visit, answer] with the visit scored -> [1, 0, 1, 2].
    """
    segments, open_turns = [-1] * len(actions), []
    num_segments = 0
    for t, (action, is_scored) in enumerate(zip(actions, scored, strict=True)):
        closes = is_scored or t == len(actions) - 1
        if not closes and action != "malformed":
            open_turns.append(t)
            continue
        for turn in [*open_turns, t] if closes else [t]:
            segments[turn] = num_segments
        open_turns, num_segments = [] if closes else open_turns, num_segments + 1
    return segments


def segment_rewards(
    rollout: TurnRewards, segment_of_turn: Sequence[int], cfg: AdvantageConfig
) -> list[Segment]:
    """Return a rollout's segments with their raw rewards, each earned by the segment's
    last turn (Eq. 2-4).
    """
    segments = []
    for t in sorted({segment: t for t, segment in enumerate(segment_of_turn)}.values()):
        action, gain = rollout.actions[t], rollout.info_gains[t]
        if t == len(rollout.actions) - 1:
            penalised = action == "malformed" and cfg.format_penalty > 0
            kind, reward = "outcome", -cfg.format_penalty if penalised else rollout.outcome
        elif action == "malformed":
            kind, reward = "penalty", -cfg.format_penalty
        elif cfg.ig_turns == "visit" and action != "visit":
            raise ValueError(
                f"{rollout.key}: turn {t} ({action}) has info gain {gain}, but ig_turns is visit"
            )
        else:
            kind, reward = "gain", gain
        segments.append((rollout.group, kind, reward))
    return segments


def z_scores(rewards: Sequence[float], sigma_floor: float = 0.0) -> list[float]:
    """Normalise a pool: (x - mean) / (sigma + 1e-6), sigma = max(sqrt(population variance + 1e-8),
    sigma_floor) (Eq. 5, 6).
    """
    if not rewards or min(rewards) == max(rewards):
        # a pool of one too. Exactly 0: a mean rounded by 1e-17 over sigma 1e-4 would leave 1e-13
        return [0.0] * len(rewards)
    mean = fsum(rewards) / len(rewards)
    sigma = max(
        sqrt(fsum((x - mean) ** 2 for x in rewards) / len(rewards) + VARIANCE_EPS), sigma_floor
    )
    return [(x - mean) / (sigma + SIGMA_EPS) for x in rewards]


def segment_credits(
    segments: Sequence[Segment], cfg: AdvantageConfig
) -> tuple[list[float], dict[str, float | None]]:
    """Return each segment's reward normalised per group and pool and scaled (Eq. 5-7), and
    the pools' statistics.

    s multiplies the IG pool, penalties in it included; ig_weight multiplies gains only. Penalties
    outside the pools stay as they are.
    """
    credit, pools = [reward for _, _, reward in segments], {}
    # a penalty that is switched off (lambda 0) stays out of the pool: its zeros would move the mean
    pooled = ("gain", "penalty") if cfg.format_pool == "ig" and cfg.format_penalty else ("gain",)
    for n, (group, kind, _) in enumerate(segments):
        outcome, ig = pools.setdefault(group, ([], []))
        if kind == "outcome":
            outcome.append(n)
        elif kind in pooled:
            ig.append(n)
    for outcome, ig in pools.values():
        for pool, floor in (
            [(outcome + ig, cfg.ig_std_floor)]
            if cfg.norm == "joint"
            else [(outcome, 0.0), (ig, cfg.ig_std_floor)]
        ):
            for n, z in zip(pool, z_scores([segments[n][2] for n in pool], floor), strict=True):
                credit[n] = z
    batch = (
        [n for outcome, _ in pools.values() for n in outcome],
        [n for _, ig in pools.values() for n in ig],
    )
    abs_z = [_mean(abs(credit[n]) for n in pool) for pool in batch]
    scales = []
    for outcome, ig in pools.values() if cfg.ig_scale == "group" else [batch]:
        if ig:
            mean_outcome, mean_ig = (_mean(abs(credit[n]) for n in pool) for pool in (outcome, ig))
            scales.append(
                1.0
                if cfg.ig_scale == "none"
                else min(max(mean_outcome, SCALE_FLOOR) / (mean_ig + SCALE_EPS), SCALE_CAP)
            )
        for n in ig:
            credit[n] *= scales[-1] * (cfg.ig_weight if segments[n][1] == "gain" else 1.0)
    equal = sum(len({segments[n][2] for n in outcome}) == 1 for outcome, _ in pools.values())
    named = {"outcome_abs_z": abs_z[0], "ig_abs_z": abs_z[1], "ig_scale": _mean(scales)}
    return credit, {"groups": len(pools), "zero_variance_groups": equal, **named}


def batch_advantages(
    rollouts: Sequence[TurnRewards], cfg: AdvantageConfig
) -> tuple[list[list[float]], dict[str, float | None]]:
    """Return the advantage of each turn of each rollout, in the order given, and
    statistics by name (Eq. 4-9).

    `rollouts` is the whole batch of a step, gathered from all processes: neither groups nor
    IG-Scale stop at a rank. A statistic is None where there is nothing to average. ValueError when
    a gain does not fit cfg.ig_turns.
    """
    assert 0 < len({(r.group, r.key) for r in rollouts}) == len(rollouts), (
        f"{len(rollouts)} rollouts: none, or one of them twice"
    )
    indices = [
        credit_segments(
            r.actions, [gain is not None and cfg.ig_turns != "none" for gain in r.info_gains]
        )
        for r in rollouts
    ]
    segments = [
        x
        for rollout, index in zip(rollouts, indices, strict=True)
        for x in segment_rewards(rollout, index, cfg)
    ]
    credit, stats = segment_credits(segments, cfg)
    advantages, first = [], 0
    for index in indices:
        discounted = [*credit[first : first + max(index) + 1], 0.0]
        for k in reversed(range(max(index) + 1)):
            discounted[k] += cfg.gamma * discounted[k + 1]  # Eq. 9
        advantages.append([discounted[k] for k in index])
        first += max(index) + 1
    gains = [reward for _, kind, reward in segments if kind == "gain"]
    stats |= {
        "segments": len(segments),
        "scored_turns": len(gains),
        "info_gain_mean": _mean(gains),
        "info_gain_positive_share": _mean(gain > 0 for gain in gains),
    }
    return advantages, stats | {
        "advantage_abs_mean": _mean(abs(x) for turns in advantages for x in turns)
    }


def token_advantages(
    advantages: Sequence[float], spans: Sequence[tuple[int, int]], num_tokens: int
) -> Tensor:
    """Expand one rollout's advantages to its tokens: fp32 [num_tokens], advantages[t] on the
    sampled ids of turn t, exactly 0 elsewhere.

    spans: (start, end) per turn. Aligned with the ids, not the rows that predict them: [2, -1] on
    (1, 3), (4, 5) -> [0, 2, 2, 0, -1, ...].
    """
    advantages_S, previous_end = torch.zeros(num_tokens), 0
    for advantage, (start, end) in zip(advantages, spans, strict=True):
        if not previous_end <= start < end <= num_tokens:
            raise ValueError(
                f"turn [{start}, {end}) follows {previous_end} in {num_tokens} tokens: spans "
                "must be ordered and not empty"
            )
        advantages_S[start:end], previous_end = advantage, end
    return advantages_S


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return fsum(values) / len(values) if values else None
