"""How rollouts are decoded, as flags of the scripts: how many at once, where their keys and values
lie, and what a GPU would make of it.
"""

from dataclasses import dataclass

from venus.cli import option
from venus.model.costs import kv_bytes, kv_pool_tokens, readable_bytes, rollout_hours
from venus.model.qwen3 import Qwen3, Qwen3Config
from venus.rollout.sampler import DECODE_KERNELS, KV_CACHES, Sampler, SamplingParams


@dataclass(frozen=True)
class DecodingOptions:
    """Flags that decide how fast rollouts are made and how much memory they take and, but for
    rounding (see `sampler`), none of their ids.
    """

    slots: int = option(16, help="rollouts decoded at once", unit="rows")
    concurrent: int | None = option(
        None,
        help="rollouts open at once: one that waits for its tool costs no slot; empty is as many "
        "as slots",
        unit="rows",
    )
    kv_cache: str = option(
        "auto",
        help="pages of one pool, or a stretch for every row; auto is paged on CUDA or with a size "
        "given",
        choices=KV_CACHES,
    )
    kv_tokens: int | None = option(
        None,
        help="tokens of the KV pool, all rollouts together; empty: all full, on CUDA what fits",
        unit="tokens",
    )
    kv_memory: float | None = option(
        None, help="size of the KV pool, in place of --kv-tokens", unit="GB"
    )
    decode_kernel: str = option(
        "auto",
        help="attention of a decode step; auto is triton on CUDA, ragged on the CPU",
        choices=DECODE_KERNELS,
    )
    cuda_graph: bool = option(
        False, help="replay a CUDA graph in steps that only decode; needs the paged cache"
    )
    # for --dry-run
    gpu_memory: float | None = option(
        None, help="for --dry-run: plan for a GPU of this size", unit="GB"
    )
    bandwidth: float | None = option(
        None,
        help="for --dry-run: the memory bandwidth of a GPU, from which the hours follow",
        unit="TB/s",
    )
    expected_tokens: int = option(
        40_000, help="for --dry-run: tokens sampled in a trajectory", unit="tokens"
    )
    expected_context: int = option(
        60_000, help="for --dry-run: mean context while they are sampled", unit="tokens"
    )

    def validate(self) -> None:
        """ValueError for a value out of range."""
        for name in (
            "slots",
            "concurrent",
            "kv_tokens",
            "kv_memory",
            "gpu_memory",
            "bandwidth",
            "expected_tokens",
            "expected_context",
        ):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"{name} {getattr(self, name)}: must be positive")
        if self.concurrent is not None and self.concurrent < self.slots:
            raise ValueError(
                f"concurrent {self.concurrent}: fewer than the {self.slots} slots that decode"
            )
        if self.kv_tokens is not None and self.kv_memory is not None:
            raise ValueError(
                "kv_tokens and kv_memory both give the size of the KV pool: choose one"
            )

    def pool_tokens(self, config: Qwen3Config, bf16: bool) -> int | None:
        """Tokens of the KV pool, None where no flag says."""
        return (
            self.kv_tokens
            if self.kv_memory is None
            else int(self.kv_memory * 1e9) // kv_bytes(config, 1, bf16)
        )

    def sampler(self, model: Qwen3, params: SamplingParams, capacity: int) -> Sampler:
        """A sampler for rows of `capacity` tokens. ValueError for flags that the device or
        the pool cannot serve.
        """
        # where rollouts are in bf16, whatever the masters are
        is_cuda = model.lm_head.weight.is_cuda
        return Sampler(
            model,
            params,
            num_slots=self.slots,
            capacity=capacity,
            num_rows=self.concurrent,
            kv_cache=self.kv_cache,
            kv_tokens=self.pool_tokens(model.config, is_cuda),
            decode_kernel=self.decode_kernel,
            cuda_graph=self.cuda_graph,
        )

    def decoding_plan(
        self,
        config: Qwen3Config,
        num_rollouts: int,
        max_context: int,
        *,
        bf16: bool,
        world_size: int = 1,
        training: bool = False,
        reference: bool = False,
    ) -> list[tuple[str, str]]:
        """Rows for `print_plan`: the KV pool of a GPU, the trajectories it holds together, and the
        hours in which it makes its share of `num_rollouts`.

        training, reference: what else lies in its memory, as in `plan.kv_pool_tokens`.
        """
        share, context = -(-num_rollouts // world_size), min(self.expected_context, max_context)
        rows = min(self.concurrent or self.slots, share)
        tokens = self.pool_tokens(config, bf16)
        if tokens is None and self.gpu_memory:
            tokens = kv_pool_tokens(
                config,
                gpu_memory=self.gpu_memory,
                world_size=world_size,
                training=training,
                reference=reference,
                bf16=bf16,
            )
        if tokens is None:
            return [
                (
                    "KV cache, all rows full",
                    readable_bytes(kv_bytes(config, rows * max_context, bf16)),
                )
            ]
        plan = [
            (
                "KV pool per GPU",
                f"{tokens:,} tokens, {readable_bytes(kv_bytes(config, tokens, bf16))}",
            ),
            (
                f"trajectories of {context:,} tokens at once",
                f"{min(rows, tokens // context)} of {rows}",
            ),
        ]
        if self.bandwidth:
            hours = (
                share
                / rows
                * rollout_hours(
                    config,
                    rows=rows,
                    new_tokens=self.expected_tokens,
                    context=context,
                    pool_tokens=tokens,
                    bandwidth=self.bandwidth * 1e12,
                    bf16=bf16,
                )
            )
            plan.append(
                (
                    "rollout hours",
                    (
                        f"{hours:.2f} for {share:,} trajectories of {self.expected_tokens:,} "
                        "sampled tokens per GPU, tools free"
                    ),
                )
            )
        return plan
