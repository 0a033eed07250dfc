"""Information gain and decoding, each timed against its references on random weights and ids.

Shapes: B rows  S prompt  L new tokens.
"""

import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from statistics import median

import torch
from torch import Tensor

from venus.bench.share import print_share
from venus.cli import Options, option
from venus.curation.formats import from_messages, load_rows
from venus.model.qwen3 import Qwen3, Qwen3Config
from venus.model.weights import save_model
from venus.rl.info_gain import Cuts, score_cached, score_ground_truth, score_uncached
from venus.rollout.sampler import Sampler, SamplingParams
from venus.runlog import machine
from venus.tokenizer import ChatTokenizer
from venus.world.tiny_model import CONFIG

SHAPES = {
    # the model of the synthetic world
    "tiny": Qwen3Config.from_dict({**CONFIG, "vocab_size": 656}),
    # Qwen3-0.6B, but for its vocabulary
    "0.6b": Qwen3Config(8192, 1024, 3072, 28, 16, 8, 128, 1e-6, 1e6, 40_960, True, "float32"),
}
DECODE_SIZES = {"tiny": (1024, 64, 5), "0.6b": (512, 256, 1)}  # context, new tokens, repeats
# Two layers and one head group are the least that can go wrong, and the forward passes per cut see
# a million tokens: a minute on two cores.
IG_SHAPE = replace(
    SHAPES["tiny"],
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    rope_theta=5e6,
)
IG_TOLERANCE = 1e-5  # nats; fp32 rounding of log-probs near -6.5 stays ten times below
# Row 0004 of the released SFT trajectories under Qwen3's tokenizer: tokens of the prompt, (turn,
# observation) of each of its 49 turns, answer prefix, ground truth; 43,503 before the newline that
# ends the conversation.
RELEASED = (
    554,
    (
        (756, 894),
        (162, 857),
        (106, 881),
        (144, 968),
        (132, 969),
        (676, 866),
        (61, 140),
        (32, 961),
        (262, 757),
        (91, 156),
        (92, 920),
        (335, 717),
        (205, 1266),
        (177, 871),
        (220, 1107),
        (553, 1000),
        (66, 200),
        (65, 123),
        (79, 1054),
        (179, 869),
        (82, 104),
        (73, 1014),
        (78, 158),
        (136, 757),
        (130, 46),
        (462, 800),
        (107, 1004),
        (375, 828),
        (204, 1177),
        (304, 809),
        (70, 974),
        (135, 384),
        (373, 1011),
        (82, 822),
        (679, 105),
        (86, 121),
        (180, 1047),
        (214, 222),
        (181, 905),
        (87, 912),
        (60, 140),
        (260, 336),
        (91, 78),
        (81, 867),
        (116, 884),
        (115, 158),
        (179, 886),
        (136, 818),
        (537, 0),
    ),
    13,
    9,
)


@dataclass(frozen=True)
class IgConfig(Options):
    """Whose lengths are scored."""

    trajectory: str | None = option(
        None,
        group="lengths",
        help="SFT row file whose first row gives the lengths; default: a released row of 49 turns",
    )
    tokenizer: str = option(
        "tokenizer.json", help="tokenizer file or a directory with it; read for --trajectory only"
    )
    share_rows: int = option(
        4,
        group="share of a step",
        help="trajectories of the step of which information gain's share is taken",
        least=1,
    )
    share_turns: int = option(
        8,
        help="turns of each of them, the first ones of the trajectory",
        unit="turns",
        least=1,
    )
    seed: int = option(0, group="run", help="seed of weights and ids", least=0)


@dataclass(frozen=True)
class DecodeConfig(Options):
    """What each side decodes."""

    shape: str = option("tiny", group="sizes", help="model shape", choices=tuple(SHAPES))
    context: int | None = option(
        None,
        help="tokens of every prompt; default by shape: 1,024 for tiny, 512 for 0.6b",
        unit="tokens",
        least=2,
    )
    batch: int = option(16, help="rows decoded together", unit="rows", least=1)
    new_tokens: int | None = option(
        None,
        help="tokens each row decodes; nothing stops it earlier; default by shape: 64, 256",
        unit="tokens",
        least=2,
    )
    repeats: int | None = option(
        None,
        group="run",
        help="timings of every side; default by shape: 5, 1",
        unit="runs",
        least=1,
    )
    seed: int = option(0, help="seed of weights and prompts", least=0)


def ig(cfg: IgConfig) -> None:
    """Score every cut of one trajectory on three sides; print agreement, seconds and tokens."""
    lengths = lengths_of(cfg.trajectory, cfg.tokenizer) if cfg.trajectory else RELEASED
    prompt, turns, *others = lengths
    cuts = list(accumulate([prompt, *map(sum, turns[:-1])]))
    generator = torch.Generator().manual_seed(cfg.seed)
    trunk, prefix, answer = (
        torch.randint(IG_SHAPE.vocab_size, (length,), generator=generator).tolist()
        for length in (cuts[-1], *others)
    )
    model = random_model(IG_SHAPE, cfg.seed)
    print(
        f"{len(turns)} turns, {len(cuts)} cuts (after the question and every turn but the "
        f"last), {cuts[-1]:,} tokens before the last cut"
    )
    values, seconds, counts = score_sides(model, Cuts(trunk, cuts, prefix, answer))
    wanted = values["uncached"]
    errors = {name: (found - wanted).abs().max().item() for name, found in values.items()}
    for name, error in errors.items():
        spent = median(seconds[name])
        print(
            f"{name:<12}{spent:8.2f} s {spent / median(seconds['packed']):6.1f} x packed "
            f"{counts[name]:11,} tokens   max |difference| from uncached {error:.1e} nats"
        )
    print_speedup(
        f"values of {wanted.min():.4f} to {wanted.max():.4f} nats; packed over uncached",
        seconds["packed"],
        seconds["uncached"] * 3,
        goal=6,
    )
    if not all(error <= IG_TOLERANCE for error in errors.values()):  # a NaN disagrees, too
        sys.exit(
            f"error: the values differ from uncached ones by {errors} nats, more than "
            f"{IG_TOLERANCE}"
        )
    tiny = random_model(SHAPES["tiny"], cfg.seed)
    lengths = prompt, turns[: cfg.share_turns], *others
    print_share(tiny, *lengths, rows=cfg.share_rows, seed=cfg.seed, tolerance=IG_TOLERANCE)


def score_sides(
    model: Qwen3, item: Cuts
) -> tuple[dict[str, Tensor], dict[str, list[float]], dict[str, int]]:
    """Score on every side, packed before, between and after the others. Returns the values in
    float64, the seconds of every run and the tokens of one, by side.
    """
    sides = {
        "packed": lambda: score_ground_truth(model, [item])[0],
        "cache reuse": lambda: score_cached(model, item),
        "uncached": lambda: score_uncached(model, item),
    }
    values, counts = {}, {}
    seconds = {name: [] for name in sides}
    processed = []
    model.model.embed_tokens.register_forward_hook(
        lambda _module, args, _output: processed.append(args[0].numel())
    )
    for name in ("packed", "cache reuse", "packed", "uncached", "packed"):
        start = time.perf_counter()
        found = sides[name]()
        seconds[name].append(time.perf_counter() - start)
        values[name] = torch.tensor(found, dtype=torch.float64)
        counts[name] = sum(processed)
        processed.clear()
    return values, seconds, counts


def lengths_of(trajectory: str, tokenizer: str) -> tuple:
    """Count the tokens of the first row of an SFT file, in the form of RELEASED. ValueError when
    there is none or it has no ground truth.
    """
    encoder, rows = ChatTokenizer(tokenizer), load_rows(trajectory)
    if not rows or not rows[0]["gt"]:
        raise ValueError(
            f"{trajectory}: no row, or the first one has no gt, whose length is needed"
        )
    row = from_messages(rows[0], encoder)
    turns = tuple((turn.end - turn.start, turn.obs_end - turn.end) for turn in row.turns)
    return (
        row.prompt_len,
        turns,
        len(encoder.answer_prefix_ids),
        len(encoder.ground_truth_ids(row.ground_truth[0])),
    )


def random_model(config: Qwen3Config, seed: int) -> Qwen3:
    """Random weights under which every earlier token matters: full residual writers, sharper
    attention. Prints all that the figures depend on.
    """
    model = Qwen3(config).requires_grad_(False)
    model.init_weights(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.mul_(20)  # they start at 0.05
        elif name.endswith("q_norm.weight"):
            parameter.fill_(3)
    print(f"{machine()}; {torch.get_num_threads()} threads")
    print(
        f"random Qwen3, {sum(parameter.numel() for parameter in model.parameters()):,} "
        f"parameters, fp32, seed {seed}"
    )
    return model


@dataclass
class Times:
    """Seconds of every run of a side: until the first token, until the last, of the CPU."""

    first: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def after_first(self) -> list[float]:
        return [total - first for total, first in zip(self.total, self.first, strict=True)]


def decode(cfg: DecodeConfig) -> None:
    """Decode the same rows greedily on every side; print tokens/s, ratios and
    whether the ids agree.
    """
    given = (cfg.context, cfg.new_tokens, cfg.repeats)
    context, num_new, repeats = (
        default if value is None else value
        for value, default in zip(given, DECODE_SIZES[cfg.shape], strict=True)
    )
    model = random_model(SHAPES[cfg.shape], cfg.seed)
    generator = torch.Generator().manual_seed(cfg.seed)
    size = (cfg.batch, context)
    prompts_BS = torch.randint(model.config.vocab_size, size, generator=generator)
    num_common = context - max(1, context // 64)
    prompts_BS[:, :num_common] = prompts_BS[0, :num_common]  # as in the rollouts of one question
    print(
        f"{cfg.batch} prompts of {context:,} tokens, the first {num_common:,} in common (run "
        f"once when forked); greedy; medians of {repeats} runs"
    )
    sides = {
        "sampler, forked": partial(sampled_ids, model, prompts_BS, num_new, num_common),
        "sampler": partial(sampled_ids, model, prompts_BS, num_new, 0),
    }
    if cfg.shape == "tiny":  # one forward pass a token: of a larger model, minutes for one
        sides["uncached"] = lambda: (
            model.logits(model(prompts_BS)[:, -1]).argmax(-1, keepdim=True),
            time.perf_counter(),
        )
    if importlib.util.find_spec("transformers"):
        sides["transformers"] = transformers_side(model, prompts_BS, num_new)
    ids, times = time_decoding(sides, repeats)
    for name, spent in times.items():
        count, total = ids[name].shape[1], median(spent.total)
        print(
            f"{name:<16}{count:4} tokens a row in {total:7.3f} s, the first after "
            f"{median(spent.first):.3f} s {cfg.batch * count / total:9,.0f} tokens/s"
        )
    print_ratios(times, num_new)
    check_ids(model, prompts_BS, ids)


def time_decoding(
    sides: Mapping[str, Callable[[], tuple[Tensor, float]]], repeats: int
) -> tuple[dict[str, Tensor], dict[str, Times]]:
    """Run the sides in turn; return the ids and the times of each."""
    ids, times = {}, {name: Times() for name in sides}
    for name, side in list(sides.items()) * repeats:
        started, cpu_started = time.perf_counter(), time.process_time()
        ids[name], at_first = side()
        times[name].first.append(at_first - started)
        times[name].total.append(time.perf_counter() - started)
        times[name].cpu.append(time.process_time() - cpu_started)
    return ids, times


def print_ratios(times: Mapping[str, Times], num_new: int) -> None:
    """Print how much faster the sampler is than the sides that are there."""
    plain, forked = times["sampler"], times["sampler, forked"]
    if "uncached" in times:
        per_token = [seconds / num_new for seconds in plain.total]
        name = "sampler over uncached, per token"
        print_speedup(name, per_token, times["uncached"].total, goal=10)
    if "transformers" not in times:
        print("transformers is not installed: no comparison with its generate")
        return
    theirs = times["transformers"]
    name = "sampler, forked over transformers generate"
    print_speedup(name, forked.total, theirs.total, goal=2)
    name = "the same in CPU seconds, which a busy machine stretches less"
    print_speedup(name, forked.cpu, theirs.cpu)
    # not forked, rows start apart
    name = "sampler, forked, after the first token"
    print_speedup(name, forked.after_first, theirs.after_first)
    print_speedup("sampler over transformers generate", plain.total, theirs.total)


def check_ids(model: Qwen3, prompts_BS: Tensor, ids: dict[str, Tensor]) -> None:
    """Compare the ids of every side, and the best ones of a forward pass over all, with those of
    'sampler'; exit 1 when they differ.
    """
    ids_BL = ids["sampler"]
    hidden_BSD = model(torch.cat([prompts_BS, ids_BL], dim=1))
    best = model.logits(hidden_BSD[:, prompts_BS.shape[1] - 1 : -1].flatten(0, 1)).topk(2)
    ids = ids | {"one forward over all": best.indices[:, 0].view_as(ids_BL)}
    gap = (
        f"the two best logits are {-best.values.diff(dim=1).max():.1e} apart at the closest of "
        f"{ids_BL.numel()} calls"
    )
    wrong = [name for name, found in ids.items() if not found.equal(ids_BL[:, : found.shape[1]])]
    if wrong:
        sys.exit(f"error: greedy ids of 'sampler' are not those of {wrong}; {gap}")
    print(f"greedy ids are equal: {'; '.join(ids)}; {gap}")


def sampled_ids(
    model: Qwen3, prompts_BS: Tensor, num_new: int, num_common: int
) -> tuple[Tensor, float]:
    """Decode [B, L] with the sampler; the first `num_common` tokens, equal in all rows, run once
    and are forked. Also: when the first tokens came.
    """
    sampler = Sampler(
        model,
        SamplingParams((), temperature=0),
        num_slots=len(prompts_BS),
        capacity=prompts_BS.shape[1] + num_new,
    )
    slots = [sampler.open()]
    sampler.prefill(slots[0], prompts_BS[0, :num_common].tolist())
    slots += [sampler.fork(slots[0], num_common) for _ in prompts_BS[1:]]
    for slot, prompt in zip(slots, prompts_BS.tolist(), strict=True):
        sampler.feed(slot, prompt[num_common:], budget=num_new, key=slot)
    done, at_first = {}, None
    while sampler.rows:
        done |= {generation.slot: generation.ids for generation in sampler.step()}
        at_first = at_first or time.perf_counter()
    return torch.tensor([done[slot] for slot in slots]), at_first


def transformers_side(model: Qwen3, prompts_BS: Tensor, num_new: int):
    """Load the same weights into transformers, fp32; return what gives the [B, L] greedy ids of
    `generate` with its default cache, as `sampled_ids`.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        save_model(model, directory)
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32
        )
    print(
        f"transformers {transformers.__version__}: generate with its default cache, the same "
        "weights"
    )
    reference.generation_config.eos_token_id = None  # nothing stops a row
    options = {
        "attention_mask": torch.ones_like(prompts_BS),
        "do_sample": False,
        "pad_token_id": 0,
        "max_new_tokens": num_new,
    }

    @torch.inference_mode()
    def generated():
        times = []

        def note_time(ids_BS, _scores):  # asked after every token whether its row stops
            times.append(time.perf_counter())
            return torch.zeros(len(ids_BS), dtype=torch.bool)

        ids_BS = reference.generate(
            prompts_BS, stopping_criteria=transformers.StoppingCriteriaList([note_time]), **options
        )
        return ids_BS[:, prompts_BS.shape[1] :], times[0]

    return generated


def print_speedup(
    name: str, ours: list[float], theirs: list[float], goal: float | None = None
) -> None:
    """Print the median of theirs / ours over the runs (neighbours in time share the machine's mood)
    and whether it is large enough.
    """
    speedup = median(b / a for a, b in zip(ours, theirs, strict=True))
    reached = f" (goal {goal}x: {'met' if speedup >= goal else 'missed'})" if goal else ""
    print(f"{name}: {speedup:.2f}x{reached}")
