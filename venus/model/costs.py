"""Arithmetic behind --dry-run and the metrics: what a run holds in memory, how much it computes,
how long it decodes. Numbers in, numbers out.

`config` is a model's config. Assumed until a GPU confirms them: BACKWARD_FACTOR,
WORK_BYTES, DECODE_EFFICIENCY.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

# of a GPU's memory: the rest is the driver's, the allocator's rounding and its fragments
USABLE = 0.92
# a block under backward holds what it saved and the gradients of about half of it
BACKWARD_FACTOR = 1.5
# of a rollout besides weights and cache: logits, prefill chunks, CUDA's own buffers
WORK_BYTES = 3 * 10**9
DECODE_EFFICIENCY = 0.7  # share of the memory's bandwidth that decoding reaches
# data sheets, dense bf16
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
# data sheets, bytes/s
BANDWIDTH = {"A100": 2.04e12, "H100": 3.35e12, "H200": 4.8e12, "B200": 8.0e12}


@dataclass(frozen=True)
class Training:
    """How a training run is spread. `max_tokens`: packed tokens of a micro-batch on each GPU; a
    longer document runs alone, 1/sp of it on each.
    """

    world_size: int
    sp: int
    max_tokens: int
    longest: int
    recompute: str  # off; on: only block inputs are kept; offload: those in host memory
    reference: bool
    bf16: bool

    @property
    def tokens(self) -> int:
        """Tokens of the largest micro-batch on one GPU."""
        return max(self.max_tokens, -(-self.longest // self.sp))


# ---- training memory


def block_products(config) -> int:
    """Parameters of one layer that multiply: the projections of attention and MLP."""
    heads = config.num_attention_heads + config.num_key_value_heads
    return (
        2 * config.hidden_size * heads * config.head_dim
        + 3 * config.hidden_size * config.intermediate_size
    )


def block_parameters(config) -> int:
    """Parameters of one layer: 100,930,816 in Qwen3-4B."""
    return block_products(config) + 2 * config.hidden_size + 2 * config.head_dim


def num_parameters(config) -> int:
    """Parameters of the model, a tied head counted once: 4,022,468,096 in Qwen3-4B."""
    tables = 1 if config.tie_word_embeddings else 2
    return (
        config.num_hidden_layers * block_parameters(config)
        + (tables * config.vocab_size + 1) * config.hidden_size
    )


def check_heads(config, sp: int) -> None:
    """ValueError when sp does not divide the query heads, of which each rank of a sequence
    takes an equal part.
    """
    heads = config.num_attention_heads
    if heads % sp:
        raise ValueError(
            f"sp {sp}: does not divide the model's {heads} query heads; choose one of "
            f"{[n for n in range(1, heads + 1) if heads % n == 0]}"
        )


def layer_bytes(config, bf16: bool) -> int:
    """Bytes a token that one block keeps for its backward, attention by a flash kernel: 166 KiB
    in Qwen3-4B in bf16.

    Norms keep their input in fp32 and the quotient, projections their input, attention q, k, v,
    output and log-sum-exp, SwiGLU four tensors of F.
    """
    width = 2 if bf16 else 4
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    norms = 2 * ((4 + 2 * width) * config.hidden_size + 4) + 4 * (config.head_dim + 1) * (
        heads + kv_heads
    )
    return (
        norms
        + 3 * width * config.head_dim * (heads + kv_heads)
        + 4 * heads
        + 4 * width * config.intermediate_size
    )


def loss_bytes(config, tokens: int, bf16: bool) -> int:
    """Bytes of the one-pass loss: a chunk of fp32 logits, in bf16 dz beside it, the head's gradient
    in fp32 (and as handed on), hidden rows, final norm.
    """
    from kernels.cross_entropy import CHUNK_BYTES_CPU, CHUNK_BYTES_CUDA  # with Triton: slow

    width, row = 2 if bf16 else 4, 4 * config.vocab_size
    most = max(1, (CHUNK_BYTES_CUDA if bf16 else CHUNK_BYTES_CPU) // row)
    most -= most % 128 if most > 128 else 0
    chunk = math.ceil(tokens / math.ceil(tokens / most)) * (row + (row // 2 if bf16 else 0))
    return (
        chunk
        + config.vocab_size * config.hidden_size * (4 + (width if bf16 else 0))
        + tokens * config.hidden_size * (4 + 4 * width)
    )


def training_memory(config, setting: Training) -> dict[str, int]:
    """Bytes by item that one GPU holds at the worst moment of a step, a little pessimistic: the
    loss and a layer's backward do not quite meet.
    """
    parameters = num_parameters(config)
    block = block_parameters(config)
    ranks = setting.world_size
    tokens = setting.tokens
    width = 2 if setting.bf16 else 4
    layers = config.num_hidden_layers
    live = tokens * layer_bytes(config, setting.bf16)
    inputs, is_kept = tokens * config.hidden_size * width, setting.recompute == "off"
    return {
        "parameters": 4 * parameters // ranks,
        "gradients": 4 * parameters // ranks,
        "AdamW": 8 * parameters // ranks,
        "reference model": width * parameters // ranks if setting.reference else 0,
        # the next layer's weights are fetched while one runs; embedding and head stay
        # until the loss is taken
        "gathered weights": width * (2 * block + parameters - layers * block),
        "a layer's unreduced gradients": (width + 4 if setting.bf16 else 4) * block,
        "activations" if is_kept else "layer checkpoints": {
            "off": live * layers,
            "on": inputs * layers,
            "offload": 2 * inputs,
        }[setting.recompute],
        "live layer": round((BACKWARD_FACTOR - is_kept) * live),
        "loss": loss_bytes(config, tokens, setting.bf16),
    }


def memory_rows(config, setting: Training, gpu_memory: float | None) -> list[tuple[str, str]]:
    """Rows for `print_plan`: the items of a GPU and their sum; given `gpu_memory` in GB (10^9
    bytes) whether that fits, and if not, which flags help.

    ValueError: as `check_heads`.
    """
    check_heads(config, setting.sp)
    items = training_memory(config, setting)
    total = sum(items.values())
    rows = [
        (f"memory per GPU, {name}", readable_bytes(count))
        for name, count in [*items.items(), ("total", total)]
    ]
    if setting.recompute == "offload":
        kept = training_memory(config, replace(setting, recompute="on"))["layer checkpoints"]
        rows.append(("host memory per GPU, layer checkpoints", readable_bytes(kept)))
    if gpu_memory:
        rows.append(("verdict", _verdict(config, setting, total, USABLE * 1e9 * gpu_memory)))
    return rows


def _verdict(config, setting: Training, total: int, limit: float) -> str:
    line = f"{readable_bytes(total)} of {readable_bytes(limit)} usable"
    if total <= limit:
        return f"fits: {line}"
    flags = {}
    for flag, value, changed in knobs(config, setting):
        flags[flag] = f"{flag} {value}"
        if sum(training_memory(config, changed).values()) <= limit:
            return f"does not fit: {line}; it does with {' '.join(flags.values())}"
    return f"does not fit: {line}, whatever the flags; use more GPUs or a smaller --max-length"


def knobs(config, setting: Training) -> Iterator[tuple[str, object, Training]]:
    """(flag, value, setting) that need less and less memory, each on top of those before, in the
    order in which to turn them.
    """
    while (
        setting.world_size % (2 * setting.sp) == config.num_attention_heads % (2 * setting.sp) == 0
    ):
        setting = replace(setting, sp=2 * setting.sp)
        yield "--sp", setting.sp, setting
    for recompute in {"off": ("on", "offload"), "on": ("offload",)}.get(setting.recompute, ()):
        setting = replace(setting, recompute=recompute)
        yield "--recompute", recompute, setting
    shortest = -(-setting.longest // setting.sp)
    if setting.max_tokens > shortest:
        yield "--max-tokens-per-gpu", shortest, replace(setting, max_tokens=shortest)


# ---- rollouts


def kv_bytes(config, tokens: int, bf16: bool) -> int:
    """Bytes of keys and values of `tokens` cached tokens: 147,456 a token in Qwen3-4B in bf16."""
    return (
        2
        * config.num_hidden_layers
        * config.num_key_value_heads
        * config.head_dim
        * tokens
        * (2 if bf16 else 4)
    )


def kv_pool_tokens(
    config, *, gpu_memory: float, world_size: int, training: bool, reference: bool, bf16: bool
) -> int:
    """Tokens that fit beside all weights into a GPU of `gpu_memory` GB; training: beside masters
    and AdamW too, whose gradients are dropped by then.
    """
    gathered = num_parameters(config) * (2 if bf16 else 4)
    held = gathered + WORK_BYTES
    if reference:
        held += gathered // world_size
    if training:
        held += 12 * num_parameters(config) // world_size
    return max(0, int(USABLE * gpu_memory * 1e9 - held) // kv_bytes(config, 1, bf16))


def rollout_hours(
    config,
    *,
    rows: int,
    new_tokens: int,
    context: int,
    pool_tokens: int,
    bandwidth: float,
    bf16: bool,
) -> float:
    """Hours in which one GPU decodes `rows` trajectories of `new_tokens` tokens at a mean context
    of `context`, tools costing nothing.

    A step reads the weights once and the cache of the rows that fit into the pool together, at
    DECODE_EFFICIENCY of `bandwidth` (bytes/s). ValueError when the pool does not hold one row.
    """
    together = min(rows, pool_tokens // context)
    if not together:
        raise ValueError(
            f"a KV pool of {pool_tokens:,} tokens does not hold one trajectory of {context:,}"
        )
    step = num_parameters(config) * (2 if bf16 else 4) + together * kv_bytes(config, context, bf16)
    return new_tokens * rows / together * step / (DECODE_EFFICIENCY * bandwidth) / 3600


# ---- compute


def training_flops(config, lengths: Sequence[int], loss_tokens: int) -> float:
    """FLOPs of forward and backward: 6 per multiplying parameter and token, the head's on
    `loss_tokens` only, and 3 forwards of attention.

    Attention's forward takes 4 per layer, head dimension and visible pair, len^2 / 2 pairs a
    document. Nothing done twice is counted.
    """
    layers = config.num_hidden_layers * block_products(config) * sum(lengths)
    head = config.vocab_size * config.hidden_size * loss_tokens
    return 6.0 * (layers + head) + 3 * _attention_flops(config, lengths)


def recompute_flops(config, lengths: Sequence[int], recompute: str) -> float:
    """FLOPs done twice: attention's scores in its own backward and, unless recompute is "off", the
    forward of all layers.
    """
    attention = _attention_flops(config, lengths)
    if recompute == "off":
        return attention / 2
    layers = 2.0 * config.num_hidden_layers * block_products(config) * sum(lengths)
    return layers + attention + attention / 2


def _attention_flops(config, lengths: Sequence[int]) -> float:
    return (
        4.0
        * config.num_hidden_layers
        * config.num_attention_heads
        * config.head_dim
        * sum(length**2 for length in lengths)
        / 2
    )


def mfu(flops: float, seconds: float, *, world_size: int, device_name: str) -> float | None:
    """Model FLOPs utilisation, `training_flops` over what the GPUs could have done; None for a
    device that is not in PEAK_FLOPS.
    """
    peaks = [peak for name, peak in PEAK_FLOPS.items() if name in device_name]
    return flops / (seconds * world_size * peaks[0]) if peaks else None


def readable_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
