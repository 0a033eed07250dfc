"""Arithmetic behind --dry-run: what a run will hold in memory and how much it will compute. Plain numbers in, bytes and FLOPs out."""


def training_bytes(*, parameters: int, world_size: int, layers: int, hidden: int, tokens: int, reference: bool, bf16: bool) -> dict[str, int]:
    """Bytes per process by item, for fp32 masters sharded over `world_size` and micro-batches of `tokens` tokens.

    masters, gradients and two AdamW moments: 16 bytes a parameter, sharded. reference: a second copy of the weights. activations: measured on
    plain eager blocks at 167 KiB a token and layer for hidden size 2560 in bf16, scaled by hidden size and dtype; no activation checkpointing.
    """
    width = 2 if bf16 else 4
    return {
        "weights, gradients, AdamW": 16 * parameters // world_size,
        "reference model": width * parameters // world_size if reference else 0,
        "activations": 167 * 1024 * tokens * layers * hidden // 2560 * width // 2,
    }


def kv_bytes(*, layers: int, kv_heads: int, head_dim: int, tokens: int, bf16: bool) -> int:
    """Bytes of keys and values of `tokens` cached tokens."""
    return 2 * layers * kv_heads * head_dim * tokens * (2 if bf16 else 4)


def training_flops(*, parameters: int, tokens: int) -> float:
    """6 FLOPs a parameter and token (forward 2, backward 4), attention's quadratic part left out."""
    return 6.0 * parameters * tokens


def readable_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
