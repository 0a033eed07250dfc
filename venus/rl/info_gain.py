"""How much each turn raised the log-probability of the ground truth: all turns of a trajectory
in one forward pass.

v_t is the mean log-probability (nats, fp32, temperature 1) of the ground-truth tokens g after the
history up to turn t, written as the protocol itself would answer: after the generation prompt that
ends the observation comes ANSWER_PREFIX, then g. Only g is averaged; ANSWER_SUFFIX follows it and
so cannot change it. v_-1 is the value at the question alone. The gain of a turn is a difference of
two such values (Eq. 2, 3): `igpo.info_gains`.

One pass: the trajectory is the trunk; behind it stands one branch per cut, which sees trunk[:cut]
and itself, at positions that go on from the cut. Row i predicts row i+1, so the branch holds prefix
+ g without its last token, and with an empty prefix g_0 is predicted by the trunk row cut-1.

Shapes: N packed tokens  T turns  L answer tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from kernels.launch import KERNELS
from venus.cli import Options, option
from venus.model.attention import Layout, Span
from venus.model.cache import KVCache
from venus.model.decode import CachedLayout
from venus.model.qwen3 import Qwen3
from venus.model.weights import load_for_inference
from venus.rl.igpo import info_gains, scored_turns
from venus.tokenizer import ChatTokenizer
from venus.trajectory import Trajectory, Turn, read_trajectories

MAX_TOKENS = 65_536  # of one packed forward pass


@dataclass(frozen=True)
class Cuts:
    """One trajectory to score: its ids, the cuts (a cut c scores after trunk[:c]; 1 <= c <=
    len(ids)), the answer prefix and the answer tokens.
    """

    ids: Sequence[int]
    cuts: Sequence[int]
    prefix: Sequence[int]
    answer: Sequence[int]

    def __post_init__(self):
        if not self.answer:
            raise ValueError("the ground truth has no tokens")
        if any(not 1 <= cut <= len(self.ids) for cut in self.cuts):
            raise ValueError(f"cuts {list(self.cuts)} outside 1..{len(self.ids)}")

    @property
    def num_tokens(self) -> int:
        return max(self.cuts, default=0) + len(self.cuts) * (
            len(self.prefix) + len(self.answer) - 1
        )


def cuts_of(
    trajectory: Trajectory,
    scored: Sequence[bool],
    tokenizer: ChatTokenizer,
    answer: str | None = None,
) -> Cuts:
    """Cut at the question alone (v_-1), then after the observation of every turn t with scored[t];
    `answer` defaults to the first alias.
    """
    if answer is None and not trajectory.ground_truth:
        raise ValueError(f"trajectory {trajectory.id}: no ground truth to score")
    ends = [
        turn.obs_end for turn, is_scored in zip(trajectory.turns, scored, strict=True) if is_scored
    ]
    answer_ids = tokenizer.ground_truth_ids(
        answer if answer is not None else trajectory.ground_truth[0]
    )
    return Cuts(
        trajectory.token_ids,
        [trajectory.prompt_len, *ends],
        tokenizer.answer_prefix_ids,
        answer_ids,
    )


@torch.no_grad()
def score_ground_truth(
    model: Qwen3, items: Sequence[Cuts], *, max_tokens: int = MAX_TOKENS, kernel: str = "auto"
) -> list[list[float]]:
    """v at every cut of every item (nats), packed into forwards of at most `max_tokens` tokens; a
    longer item runs alone, in chunks over a cache.

    Memory is linear in tokens: activations of one chunk, and with a longer item the keys and values
    of all its rows. kernel "triton" attends through the branch kernel and scores through the fused
    cross-entropy, "torch" through SDPA and chunks, "auto" is Triton on CUDA.
    """
    values: list[list[float]] = []
    for pack in _packs(items, max_tokens):
        values += _score_pack(model, pack, max_tokens, kernel)
    return values


def _packs(items: Sequence[Cuts], max_tokens: int):
    pack, size = [], 0
    for item in items:
        if pack and size + item.num_tokens > max_tokens:
            yield pack
            pack, size = [], 0
        pack.append(item)
        size += item.num_tokens
    if pack:
        yield pack


def _score_pack(
    model: Qwen3, items: Sequence[Cuts], max_tokens: int, kernel: str
) -> list[list[float]]:
    ids, positions = [], []
    spans, answer_rows = [], []
    targets = {}
    for item in items:
        doc, trunk = len(ids), max(item.cuts, default=0)
        ids += item.ids[:trunk]
        positions += range(trunk)
        if trunk:
            spans.append(Span(doc, len(ids), doc, doc))
        branch = [*item.prefix, *item.answer[:-1]]
        for cut in item.cuts:
            start = len(ids)
            # row r predicts what follows it
            rows = [doc + cut - 1, *range(start, start + len(branch))][-len(item.answer) :]
            targets.update(zip(rows, item.answer, strict=True))
            answer_rows.append(rows)
            ids += branch
            positions += range(cut, cut + len(branch))
            if branch:
                spans.append(Span(start, len(ids), doc, doc + cut))
    if not answer_rows:
        return [[] for _ in items]
    device = model.lm_head.weight.device
    targets_1N = torch.tensor([[targets.get(row, -1) for row in range(len(ids))]], device=device)
    ids_1N = torch.tensor([ids], device=device)
    positions_1N = torch.tensor([positions], device=device)
    cache = _new_cache(model, len(ids)) if len(ids) > max_tokens else None
    chunks = []
    for first in range(0, len(ids), max_tokens):
        part = slice(first, first + max_tokens)
        chunks.append(
            model.token_log_probs(
                ids_1N[:, part],
                targets_1N[:, part],
                targets_1N[:, part] >= 0,
                positions_BS=positions_1N[:, part],
                layout=Layout(tuple(spans), first),
                cache=cache,
                kernel=kernel,
            )[0]
        )
    log_probs_N = torch.cat(chunks).double().cpu()
    means = iter([log_probs_N[rows].mean().item() for rows in answer_rows])
    return [[next(means) for _ in item.cuts] for item in items]


def _new_cache(model: Qwen3, capacity: int) -> KVCache:
    """A cache of one row with room for `capacity` tokens, all of it at once: growing would copy."""
    config, weight = model.config, model.lm_head.weight
    cache = KVCache(
        num_layers=config.num_hidden_layers,
        num_rows=1,
        capacity=capacity,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=weight.dtype,
        device=weight.device,
    )
    cache.reserve(0, capacity)
    return cache


@dataclass(frozen=True)
class GainRule:
    """Which turns are scored against which ground truths: ig_turns and ig_value as in
    `igpo.AdvantageConfig`.

    ig_alias "first": v of the first alias of the ground truth. "max": at every cut the
    largest v over all aliases.
    """

    ig_turns: str
    ig_value: str
    ig_alias: str

    def aliases(self, ground_truth: Sequence[str]) -> Sequence[str]:
        """The ground truths to score."""
        return ground_truth if self.ig_alias == "max" else ground_truth[:1]

    def chosen(self, trajectory: Trajectory) -> list[bool]:
        """For each turn, whether the ground truth is scored after it."""
        return scored_turns(
            [turn.action for turn in trajectory.turns],
            [turn.tool_status for turn in trajectory.turns],
            self.ig_turns,
        )

    def scores(self, turn: Turn) -> bool:
        """Whether the ground truth is scored after a turn that another one follows."""
        return scored_turns([turn.action, "answer"], [turn.tool_status, None], self.ig_turns)[0]

    def write(
        self,
        trajectory: Trajectory,
        baseline: Sequence[float],
        values: Mapping[int, Sequence[float]],
    ) -> None:
        """Write the information gain of every chosen turn into the trajectory, in place; the
        other turns get None.

        baseline: v of each alias at the question; values: v of each alias after turn t. Both may be
        empty where no turn is chosen.
        """
        chosen = self.chosen(trajectory)
        gains = [None] * len(chosen)
        if any(chosen):
            gains = info_gains(
                [max(values[t]) if is_scored else None for t, is_scored in enumerate(chosen)],
                max(baseline),
                self.ig_value,
            )
        for turn, gain in zip(trajectory.turns, gains, strict=True):
            # None, too: a gain of an earlier scoring must not survive under other rules
            turn.info_gain = gain


def score_turns(
    model: Qwen3,
    tokenizer: ChatTokenizer,
    trajectories: Sequence[Trajectory],
    rule: GainRule,
    *,
    max_tokens: int = MAX_TOKENS,
    kernel: str = "auto",
) -> None:
    """Write the information gain of every turn that the rule chooses into the trajectories, in
    place; the other turns get None.
    """
    chosen = [rule.chosen(trajectory) for trajectory in trajectories]
    aliases = [
        rule.aliases(t.ground_truth) if any(mask) else ()
        for t, mask in zip(trajectories, chosen, strict=True)
    ]
    items = [
        cuts_of(t, mask, tokenizer, alias)
        for t, mask, names in zip(trajectories, chosen, aliases, strict=True)
        for alias in names
    ]
    scored = iter(score_ground_truth(model, items, max_tokens=max_tokens, kernel=kernel))
    for trajectory, mask, names in zip(trajectories, chosen, aliases, strict=True):
        baseline, *after = list(zip(*(next(scored) for _ in names), strict=True)) or [()]
        rule.write(
            trajectory,
            baseline,
            dict(zip((t for t, is_scored in enumerate(mask) if is_scored), after, strict=True)),
        )


@torch.no_grad()
def score_uncached(model: Qwen3, item: Cuts) -> list[float]:
    """The reference: every cut is a forward pass of its own over the whole prefix."""
    values = []
    for cut in item.cuts:
        ids = [*item.ids[:cut], *item.prefix, *item.answer]
        ids_1S = torch.tensor([ids], device=model.lm_head.weight.device)
        mask_1S = torch.arange(len(ids) - 1, device=ids_1S.device)[None] >= len(ids) - 1 - len(
            item.answer
        )
        values.append(
            model.token_log_probs(ids_1S[:, :-1], ids_1S[:, 1:], mask_1S)[mask_1S]
            .double()
            .mean()
            .item()
        )
    return values


@torch.no_grad()
def score_cached(model: Qwen3, item: Cuts) -> list[float]:
    """The released trainer's loop: one cache for the trunk; at every cut its last token is run
    again, with the branch, which is then forgotten.
    """
    branch, num_answer = [*item.prefix, *item.answer[:-1]], len(item.answer)
    cache = _new_cache(model, max(item.cuts, default=0) + len(branch))
    values = []
    for cut in item.cuts:
        cache.truncate(0, min(cut - 1, cache.lengths[0]))
        if cut - 1 > cache.lengths[0]:
            _extend(model, cache, item.ids[cache.lengths[0] : cut - 1])
            cache.advance(0, cut - 1 - cache.lengths[0])
        # not advanced: the branch never becomes visible
        hidden_SD = _extend(model, cache, [item.ids[cut - 1], *branch])
        log_softmax_LV = torch.log_softmax(model.logits(hidden_SD[-num_answer:]), dim=-1)
        answer_L1 = torch.tensor(list(item.answer), device=hidden_SD.device)[:, None]
        values.append(log_softmax_LV.gather(-1, answer_L1).double().mean().item())
    return values


def _extend(model: Qwen3, cache: KVCache, ids: Sequence[int]) -> torch.Tensor:
    layout = CachedLayout.of(
        cache, [0], [len(ids)], model.config.num_groups, model.lm_head.weight.device
    )
    return model(
        torch.tensor([list(ids)], device=model.lm_head.weight.device),
        layout.positions_N[None],
        layout,
        cache,
    )[0]


@dataclass(frozen=True)
class ScoreConfig(Options):
    """Print the value of the ground truth before and after every turn."""

    trajectories: str = option(help="trajectories.jsonl with ground truth", positional=True)
    model: str = option(help="Hugging Face directory: config.json, safetensors, tokenizer.json")
    max_tokens: int = option(
        MAX_TOKENS,
        group="memory and speed",
        help="tokens of one packed forward pass",
        unit="tokens",
        least=1,
    )
    kernel: str = option("auto", help="auto is Triton on CUDA and torch elsewhere", choices=KERNELS)


def score_command(cfg: ScoreConfig) -> None:
    """v_-1, then a line a turn: action, tool status, v_t and v_t - v_(t-1). Every turn
    but the last is scored.
    """
    model, tokenizer = load_for_inference(cfg.model), ChatTokenizer(cfg.model)
    tokenizer.check_fits(model.config.vocab_size)
    for trajectory in tqdm(
        read_trajectories(cfg.trajectories), desc="score", unit="trajectory", disable=None
    ):
        scored = [k + 1 < len(trajectory.turns) for k in range(len(trajectory.turns))]
        values = score_ground_truth(
            model,
            [cuts_of(trajectory, scored, tokenizer)],
            max_tokens=cfg.max_tokens,
            kernel=cfg.kernel,
        )[0]
        print(
            f"{trajectory.id}  {trajectory.question[:100]!r}  ground truth "
            f"{trajectory.ground_truth[0]!r}"
        )
        print(f"  {'question':<10} {'':<8} v {values[0]:9.4f}")
        for k, turn in enumerate(trajectory.turns[:-1]):
            print(
                f"  turn {k:<5} {turn.action:<8} v {values[k + 1]:9.4f}  gain "
                f"{values[k + 1] - values[k]:+9.4f}  {turn.tool_status or ''}"
            )
