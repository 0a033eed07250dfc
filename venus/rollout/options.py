"""How rollouts are made, as flags of the scripts: who samples and how, and how many are decoded at
once, where their keys and values lie, and what a GPU would make of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from venus import protocol
from venus.cli import option
from venus.model.costs import (
    kv_bytes,
    kv_pool_tokens,
    num_parameters,
    readable_bytes,
    rollout_hours,
)
from venus.model.qwen3 import Qwen3, Qwen3Config
from venus.model.weights import fingerprint, load_for_inference
from venus.protocol import ProtocolOptions
from venus.rl.info_gain import GainRule
from venus.rollout.agent import Agent, Limits
from venus.rollout.collect import check_corpora
from venus.rollout.noise import SamplingOptions, SamplingParams
from venus.rollout.remote import RemoteSampler
from venus.rollout.sampler import DECODE_KERNELS, KV_CACHES, Sampler
from venus.runlog import RunOptions
from venus.services.chat import ChatClient, parse_endpoint
from venus.tokenizer import ChatTokenizer
from venus.tools.base import Tool
from venus.tools.options import Keys, ToolOptions
from venus.trajectory import Question


@dataclass(frozen=True)
class DecodingOptions(RunOptions):
    """Flags that decide how fast rollouts are made and how much memory they take and, but for
    rounding (see `sampler`), none of their ids.
    """

    slots: int = option(16, group="decoding", help="rollouts decoded at once", unit="rows", least=1)
    concurrent: int | None = option(
        None,
        help="rollouts open at once: one that waits for its tool costs no slot; empty is as many "
        "as slots",
        unit="rows",
        least=1,
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
        least=1,
    )
    kv_memory: float | None = option(
        None,
        help="size of the KV pool, in place of --kv-tokens",
        unit="GB",
        above=0,
        most=10_000,
    )
    decode_kernel: str = option(
        "auto",
        help="attention of a decode step; auto is triton on CUDA, ragged on the CPU",
        choices=DECODE_KERNELS,
    )
    cuda_graph: bool = option(
        False, help="replay a CUDA graph in steps that only decode; needs the paged cache"
    )
    bandwidth: float | None = option(
        None,
        group="plan of the decoding, for --dry-run",
        help="the memory bandwidth of a GPU, from which the hours follow",
        unit="TB/s",
        above=0,
        most=1000,
    )
    expected_tokens: int = option(
        40_000, help="tokens sampled in a trajectory", unit="tokens", least=1
    )
    expected_context: int = option(
        60_000, help="mean context while they are sampled", unit="tokens", least=1
    )

    def validate(self) -> None:
        """ValueError for flags that contradict each other."""
        super().validate()
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
        if self.kv_memory is None:
            return self.kv_tokens
        return int(self.kv_memory * 1e9) // kv_bytes(config, 1, bf16)

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

        training, reference: what else lies in its memory, as in `costs.kv_pool_tokens`.
        """
        share = -(-num_rollouts // world_size)
        rows = min(self.concurrent or self.slots, share)
        pool = self.pool_tokens(config, bf16)
        if pool is None and self.gpu_memory:
            pool = kv_pool_tokens(
                config,
                gpu_memory=self.gpu_memory,
                world_size=world_size,
                training=training,
                reference=reference,
                bf16=bf16,
            )
        if pool is None:
            size = readable_bytes(kv_bytes(config, rows * max_context, bf16))
            return [("KV cache, all rows full", size)]
        context = min(self.expected_context, max_context)
        size = readable_bytes(kv_bytes(config, pool, bf16))
        plan = [
            ("KV pool per GPU", f"{pool:,} tokens, {size}"),
            (
                f"trajectories of {context:,} tokens at once",
                f"{min(rows, pool // context)} of {rows}",
            ),
        ]
        if self.bandwidth:
            hours = share / rows * self._hours_of_rows(config, rows, context, pool, bf16)
            amount = f"{share:,} trajectories of {self.expected_tokens:,} sampled tokens per GPU"
            plan.append(("rollout hours", f"{hours:.2f} for {amount}, tools free"))
        return plan

    def _hours_of_rows(
        self, config: Qwen3Config, rows: int, context: int, pool: int, bf16: bool
    ) -> float:
        return rollout_hours(
            config,
            rows=rows,
            new_tokens=self.expected_tokens,
            context=context,
            pool_tokens=pool,
            bandwidth=self.bandwidth * 1e12,
            bf16=bf16,
        )


@dataclass(frozen=True)
class RolloutOptions(ProtocolOptions, SamplingOptions, Limits, ToolOptions, DecodingOptions):
    """How trajectories are made; the configs of rollout.py, eval.py and train_igpo.py
    start with these fields.
    """

    policy: str | None = option(
        None,
        group="policy",
        help="openai:BASE_URL:MODEL (key: POLICY_API_KEY or OPENAI_API_KEY) samples, and --model "
        "names the tokenizer only",
    )
    policy_seconds: float = option(
        600.0,
        help="longest wait for one turn of --policy",
        unit="s",
        above=0,
        most=1_000_000,
    )

    def validate(self) -> None:
        """ValueError for flags that contradict each other, or an endpoint that is none."""
        super().validate()
        if self.policy is not None:
            parse_endpoint(self.policy, "--policy")

    def plan(self, directory: str, num_rollouts: int) -> list[tuple[str, str]]:
        """Rows for `print_plan`: rollouts, an upper bound of what they sample, the model in
        `directory` and how it decodes, unless --policy samples.
        """
        most = num_rollouts * self.max_turns * self.max_turn_tokens
        rows = [("rollouts", f"{num_rollouts:,}"), ("sampled tokens, at most", f"{most:,}")]
        if self.policy is None:
            config = Qwen3Config.read(directory)
            decoding = self.decoding_plan(
                config, num_rollouts, self.max_context, bf16=config.dtype != "float32"
            )
            rows = [("parameters", f"{num_parameters(config):,}"), *rows, *decoding]
        return [*rows, *self.web_plan(num_rollouts, self.max_turns)]

    def manifest(self) -> dict:
        """What decides a trajectory besides seed and weights; recorded in each one."""
        bases = (SamplingOptions, Limits, ProtocolOptions)
        own = {field.name: getattr(self, field.name) for base in bases for field in fields(base)}
        return own | self.tools_manifest()

    def policy_client(self, keys: Keys) -> ChatClient | None:
        """The client of --policy, if there is one."""
        if self.policy is None:
            return None
        return ChatClient(
            *parse_endpoint(self.policy, "--policy"), keys.policy, self.policy_seconds
        )

    def load_agent(
        self, directory: str, keys: Keys, questions: Sequence[Question], *, run: str, seed: int
    ) -> Agent:
        """The agent over the model in `directory`, or over --policy, and over the tools of the run.
        ValueError for a model or a corpus that is missing or broken.
        """
        if self.policy is None:
            model, name = load_for_inference(directory), fingerprint(directory)
        else:
            model, name = self.policy_client(keys), self.policy
        tokenizer = ChatTokenizer(directory)
        corpora = check_corpora(questions) if self.tools == "offline" else None
        tools, manifest = self.make_tools(keys, corpora), {"model": name}
        return self.agent(model, tokenizer, run=run, seed=seed, manifest=manifest, tools=tools)

    def agent(
        self,
        model: Qwen3 | ChatClient,
        tokenizer: ChatTokenizer,
        *,
        run: str,
        seed: int,
        manifest: dict,
        tools: dict[str, Tool] | None = None,
        gain: GainRule | None = None,
    ) -> Agent:
        """An agent over a fresh KV cache on the model's device, or over an endpoint. tools: of
        `make_tools`, once a run; None makes some without keys.

        gain: information gain to be scored along the way, never over an endpoint.
        """
        return Agent(
            self._sampler(model, tokenizer),
            tokenizer,
            tools or self.make_tools(Keys()),
            self,
            run=run,
            seed=seed,
            gain=gain,
            system=protocol.system_prompt(self.system_prompt, self.date),
            manifest=self.manifest() | manifest,
        )

    def _sampler(
        self, model: Qwen3 | ChatClient, tokenizer: ChatTokenizer
    ) -> Sampler | RemoteSampler:
        params = SamplingParams(
            (tokenizer.im_end_id, tokenizer.endoftext_id),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )
        if isinstance(model, ChatClient):
            return RemoteSampler(
                model,
                tokenizer,
                params,
                num_slots=self.concurrent or self.slots,
                capacity=self.max_context,
            )
        if self.max_context > model.config.max_position_embeddings:
            raise ValueError(
                f"max_context {self.max_context} exceeds the model's max_position_embeddings "
                f"{model.config.max_position_embeddings}"
            )
        tokenizer.check_fits(model.config.vocab_size)
        return self.sampler(model, params, self.max_context)


@dataclass(frozen=True)
class QuestionOptions(RolloutOptions):
    """Flags of the scripts that roll questions out and do not train: rollout.py and eval.py."""

    num_questions: int | None = option(
        None, group="what is made", help="the first so many questions; empty is all", least=1
    )
    samples: int = option(1, help="rollouts per question", least=1)
    seed: int = option(0, help="seed of the sampling noise, and of eval.py's bootstrap", least=0)
    doctor: bool = option(
        False,
        help="try everything that is configured with one cheap call each, and exit with 0 if all "
        "of it works, else 1",
    )
