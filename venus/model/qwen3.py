"""Qwen3 dense, from config.json to per-token losses. Parameter names are Hugging Face's, so weights
load without a mapping.

Shapes: B rows  S sequence  D hidden  H query heads  K kv heads  E head_dim  F mlp  V vocab
        N selected tokens.
"""

import contextlib
import dataclasses
import json
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from venus.model.attention import CachedLayout, Layout, attend, plan_attention
from venus.model.cache import KVCache


@dataclass(frozen=True)
class Qwen3Config:
    """The fields of a dense Qwen3 `config.json` that decide its arithmetic, under
    Hugging Face's names.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str = "bfloat16"

    @property
    def num_groups(self) -> int:
        """Query heads that share a kv head, H/K."""
        return self.num_attention_heads // self.num_key_value_heads

    @staticmethod
    def read(directory: str | Path) -> "Qwen3Config":
        """Read `directory/config.json` as transformers 4 or 5 writes it. ValueError names the file
        and the setting that is missing or unsupported.
        """
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise ValueError(
                f"{path}: no such file; --model takes a Hugging Face directory of a Qwen3 model"
            )
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not JSON ({error})") from None
        return Qwen3Config.from_dict(raw, str(path))

    @staticmethod
    def from_dict(raw: dict, where: str = "config.json") -> "Qwen3Config":
        """Check a parsed config. Anything that would change the arithmetic in a way this model does
        not implement is a ValueError.
        """
        if not isinstance(raw, dict):
            raise ValueError(f"{where}: {type(raw).__name__} instead of a JSON object")
        _check_supported(raw, where)
        rope = raw.get("rope_parameters") or {}
        values = {"rope_theta": rope.get("rope_theta"), **raw}
        values["dtype"] = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
        fields = dataclasses.fields(Qwen3Config)
        if missing := [field.name for field in fields if values.get(field.name) is None]:
            raise ValueError(f"{where}: missing {', '.join(missing)}")
        for field in fields:
            value, is_number = values[field.name], field.type in (int, float)
            kinds = (int, float) if field.type is float else (field.type,)
            if type(value) not in kinds or (is_number and value <= 0):
                kind = f"{field.type.__name__}{' > 0' * is_number}"
                raise ValueError(f"{where}: {field.name} = {value!r} is not a {kind}")
        if rope.get("rope_theta", values["rope_theta"]) != values["rope_theta"]:
            raise ValueError(
                f"{where}: rope_theta {raw['rope_theta']} and rope_parameters.rope_theta "
                f"{rope['rope_theta']} disagree"
            )
        config = Qwen3Config(**{field.name: values[field.name] for field in fields})
        if config.num_attention_heads % config.num_key_value_heads:
            raise ValueError(
                f"{where}: {config.num_attention_heads} query heads do not divide among "
                f"{config.num_key_value_heads} kv heads"
            )
        return config

    def to_dict(self) -> dict:
        """The config.json that transformers 4 and 5 both read: rope and dtype in
        either spelling.
        """
        rope = {"rope_theta": self.rope_theta, "rope_type": "default"}
        fixed = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": self.num_hidden_layers,
            "rope_scaling": None,
        }
        ours = dataclasses.asdict(self)
        return (
            fixed | ours | {"torch_dtype": self.dtype, "rope_parameters": rope, "use_cache": True}
        )


def _check_supported(raw: dict, where: str) -> None:
    """ValueError for a setting whose arithmetic this model does not have."""
    rope = raw.get("rope_parameters") or {}
    unsupported = {
        "model_type": raw.get("model_type") != "qwen3",
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "attention_bias": raw.get("attention_bias"),
        "attention_dropout": raw.get("attention_dropout"),
        "rope_scaling": raw.get("rope_scaling") is not None,
        "rope_parameters": set(rope) - {"rope_theta", "rope_type"}
        or rope.get("rope_type", "default") != "default",
        "use_sliding_window": raw.get("use_sliding_window"),
        "layer_types": any(kind != "full_attention" for kind in raw.get("layer_types") or []),
        "num_experts": raw.get("num_experts") is not None,
        "quantization_config": raw.get("quantization_config") is not None,
    }
    for key, is_unsupported in unsupported.items():
        if is_unsupported:
            raise ValueError(
                f"{where}: {key} = {raw.get(key)!r} is not supported; Venus implements "
                "dense Qwen3 with plain RoPE and full attention"
            )


# Qwen3-4B-Thinking-2507, the paper's model
QWEN3_4B = Qwen3Config(151_936, 2560, 9728, 36, 32, 8, 128, 1e-6, 5e6, 262_144, True)


def rope_cos_sin(
    positions_BS: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, S, 1, E] of the rotary angles, in transformers' arithmetic: inv_freq
    and angle in fp32, cast last.

    That is what the checkpoint was trained with; at position 262,143 and theta 5e6 it is up to
    1e-2 away from fp64.
    """
    exponents = (
        torch.arange(0, head_dim, 2, dtype=torch.int64, device=positions_BS.device).float()
        / head_dim
    )
    inv_freq = 1.0 / (theta**exponents)
    angles = positions_BS[..., None].float() * inv_freq
    angles_BS1E = torch.cat([angles, angles], dim=-1)[:, :, None]
    return angles_BS1E.cos().to(dtype), angles_BS1E.sin().to(dtype)


def apply_rope(x_BSHE: Tensor, cos_BS1E: Tensor, sin_BS1E: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i+E/2}) of every head by its token's angle."""
    first, second = x_BSHE.chunk(2, dim=-1)
    return x_BSHE * cos_BS1E + torch.cat([-second, first], dim=-1) * sin_BS1E


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) in fp32, cast back, then times the weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with an RMSNorm on every query and key head before RoPE."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.head_dim = config.head_dim

    def forward(
        self,
        x_BSD: Tensor,
        rope: tuple[Tensor, Tensor],
        layout: Layout | CachedLayout | None,
        cache: KVCache | None,
        layer: int,
        wanted_N: Tensor | None,
    ) -> Tensor:
        per_head = (-1, self.head_dim)
        k_BSKE = apply_rope(self.k_norm(self.k_proj(x_BSD).unflatten(-1, per_head)), *rope)
        v_BSKE = self.v_proj(x_BSD).unflatten(-1, per_head)
        if wanted_N is not None:
            x_BSD = x_BSD[:, wanted_N]
            rope = [angles[:, wanted_N] for angles in rope]
            layout = layout.last
        q_BSHE = apply_rope(self.q_norm(self.q_proj(x_BSD).unflatten(-1, per_head)), *rope)
        return self.o_proj(attend(q_BSHE, k_BSKE, v_BSKE, layout, cache, layer).flatten(2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual."""

    def __init__(self, config: Qwen3Config, layer: int):
        super().__init__()
        self.layer = layer
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x_BSD: Tensor,
        rope: tuple[Tensor, Tensor],
        layout: Layout | CachedLayout | None,
        cache: KVCache | None,
        wanted_N: Tensor | None = None,
    ) -> Tensor:
        """wanted_N: the tokens to return, where the others matter for their keys
        and values only.
        """
        attended_BSD = self.self_attn(
            self.input_layernorm(x_BSD), rope, layout, cache, self.layer, wanted_N
        )
        x_BSD = (x_BSD if wanted_N is None else x_BSD[:, wanted_N]) + attended_BSD
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class Backbone(nn.Module):
    """Embedding, blocks and final norm: the part Hugging Face calls `model`."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


@dataclass(frozen=True)
class WeightedNLL:
    """sum_k weights_k * -log p_k. SFT (Eq. 1): weights are 1 / (number of loss tokens of the whole
    optimizer step) on loss tokens, 0 elsewhere.
    """

    weights_BS: Tensor

    def value(self, log_probs: Tensor, rows: Tensor) -> Tensor:
        """Per-token losses [N] of the selected tokens; `rows` [N] are their flat
        indices into B*S.
        """
        return -log_probs * self.weights_BS.flatten()[rows]

    def slope(self, log_probs: Tensor, rows: Tensor) -> Tensor:
        """d value / d log p [N] = -weights."""
        return -self.weights_BS.flatten()[rows]


@dataclass(frozen=True)
class ClippedPolicy:
    """The clipped policy objective with a k3 KL penalty (Eq. 10), as a loss: sum_k weights_k *
    (-surrogate_k + beta * k3_k).

    ratio = exp(log p - old), or exp(log p - log p.detach()) when old_BS is None (one update per
    batch: value 1, gradient that of REINFORCE). surrogate = min(ratio A, clip(ratio, 1 - clip, 1 +
    clip) A), and for A < 0 at least dual_clip * A. k3 = exp(ref - log p) - (ref - log p) - 1, so d
    k3 / d log p = 1 - exp(ref - log p).
    """

    advantages_BS: Tensor
    weights_BS: Tensor
    old_BS: Tensor | None = None
    ref_BS: Tensor | None = None
    _: KW_ONLY
    clip: float
    dual_clip: float
    beta: float

    def value(self, log_probs: Tensor, rows: Tensor) -> Tensor:
        """Per-token losses [N] of the selected tokens; `rows` [N] are their flat
        indices into B*S.
        """
        advantages = self.advantages_BS.flatten()[rows]
        old = log_probs.detach() if self.old_BS is None else self.old_BS.flatten()[rows]
        losses = -clipped_surrogate(log_probs - old, advantages, self.clip, self.dual_clip)
        if self.ref_BS is not None and self.beta:
            losses = losses + self.beta * k3_divergence(log_probs, self.ref_BS.flatten()[rows])
        return losses * self.weights_BS.flatten()[rows]

    def slope(self, log_probs: Tensor, rows: Tensor) -> Tensor:
        """d value / d log p [N]: weights * (-ratio A where neither clip holds, else 0, + beta (1
        - exp(ref - log p))).
        """
        advantages = self.advantages_BS.flatten()[rows]
        old = log_probs if self.old_BS is None else self.old_BS.flatten()[rows]
        slopes = -surrogate_slope(log_probs - old, advantages, self.clip, self.dual_clip)
        if self.ref_BS is not None and self.beta:
            slopes = slopes - self.beta * torch.expm1(self.ref_BS.flatten()[rows] - log_probs)
        return slopes * self.weights_BS.flatten()[rows]


def clipped_surrogate(
    log_ratios: Tensor, advantages: Tensor, clip: float, dual_clip: float
) -> Tensor:
    """min(r A, clip(r, 1 - clip, 1 + clip) A), and for A < 0 max(that, dual_clip A); r =
    exp(log_ratios). Elementwise (Eq. 10; dual clip 3 as released).
    """
    ratios = log_ratios.exp()
    surrogate = torch.minimum(ratios * advantages, ratios.clamp(1 - clip, 1 + clip) * advantages)
    return torch.where(advantages < 0, torch.maximum(surrogate, dual_clip * advantages), surrogate)


def surrogate_slope(
    log_ratios: Tensor, advantages: Tensor, clip: float, dual_clip: float
) -> Tensor:
    """d clipped_surrogate / d log_ratios: r A while r A is the smaller term and, for A < 0, above
    dual_clip A; else 0.
    """
    ratios = log_ratios.exp()
    unclipped = ratios * advantages
    is_free = (unclipped <= ratios.clamp(1 - clip, 1 + clip) * advantages) & (
        (advantages >= 0) | (unclipped > dual_clip * advantages)
    )
    return unclipped * is_free


def k3_divergence(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = ref - log p: a non-negative estimate of KL(p || ref) in nats whose
    gradient flows through log p.
    """
    difference = ref_log_probs - log_probs
    return torch.expm1(difference) - difference


class TokenLoss(NamedTuple):
    """A scalar loss and what the metrics need of the same pass, without gradient: both fp32 nats, 0
    where no loss is taken.
    """

    loss: Tensor
    log_probs_BS: Tensor
    entropies_BS: Tensor


class Qwen3(nn.Module):
    """Qwen3ForCausalLM. All doors that need lm_head are methods here: under FSDP its weight is a
    shard anywhere else.
    """

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.config, self.recompute = config, "off"
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        ids_BS: Tensor,
        positions_BS: Tensor | None = None,
        layout: Layout | CachedLayout | None = None,
        cache: KVCache | None = None,
        kernel: str = "auto",
    ) -> Tensor:
        """Final hidden states [B, S, D] of int64 ids. positions default to 0..S-1 in every row;
        layout and cache as in `attention.attend`. Of a CachedLayout with `wanted_N`, those of these
        tokens alone.

        kernel: "triton", "torch", or "auto", Triton on CUDA; `attention.plan_attention`
        says where it matters.
        """
        if positions_BS is None:
            positions_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device).expand_as(ids_BS)
        x_BSD = self.model.embed_tokens(ids_BS)
        rope = rope_cos_sin(positions_BS, self.config.head_dim, self.config.rope_theta, x_BSD.dtype)
        layout = plan_attention(layout, x_BSD, self.config.num_groups, kernel, cache)
        for block in self.model.layers:
            if self.recompute == "off" or not torch.is_grad_enabled():
                narrows = isinstance(layout, CachedLayout) and block is self.model.layers[-1]
                wanted_N = layout.wanted_N if narrows else None
                x_BSD = block(x_BSD, rope, layout, cache, wanted_N)
            else:
                x_BSD = _recomputed(block, x_BSD, rope, layout, offload=self.recompute == "offload")
        return self.model.norm(x_BSD)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """fp32 logits [N, V] of selected hidden rows."""
        from kernels.cross_entropy import fp32_logits  # slow to import, with Triton

        return fp32_logits(hidden_ND, self.lm_head.weight)

    def token_stats(
        self,
        ids_BS: Tensor,
        targets_BS: Tensor,
        mask_BS: Tensor,
        *,
        positions_BS: Tensor | None = None,
        layout: Layout | None = None,
        cache: KVCache | None = None,
        temperature: float = 1.0,
        kernel: str = "auto",
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of targets and entropies, each fp32 [B, S] in nats and 0
        where `mask_BS` is 0.

        targets_BS[b, s] is predicted from ids_BS[b, :s+1] (already shifted). Rows are selected
        before the lm_head. kernel: "triton", "torch", or "auto", Triton on CUDA.
        """
        from kernels.cross_entropy import linear_log_probs

        rows, hidden_ND, targets_N = self._selected(
            ids_BS, targets_BS, mask_BS, positions_BS, layout, cache, kernel
        )
        log_probs_N, entropies_N = linear_log_probs(
            hidden_ND, self.lm_head.weight, targets_N, temperature=temperature, kernel=kernel
        )
        return _scatter(log_probs_N, rows, ids_BS.shape), _scatter(entropies_N, rows, ids_BS.shape)

    def token_log_probs(
        self, ids_BS: Tensor, targets_BS: Tensor, mask_BS: Tensor, **kwargs
    ) -> Tensor:
        """The first result of `token_stats`, with the same keywords."""
        return self.token_stats(ids_BS, targets_BS, mask_BS, **kwargs)[0]

    def token_loss(
        self,
        ids_BS: Tensor,
        targets_BS: Tensor,
        *,
        loss: WeightedNLL | ClippedPolicy,
        positions_BS: Tensor | None = None,
        layout: Layout | None = None,
        temperature: float = 1.0,
        kernel: str = "auto",
    ) -> TokenLoss:
        """Sum of the loss over the tokens whose weight is not 0. All weights 0 gives a zero loss
        with zero gradients.

        The gradient is computed in the same pass, from the loss's slope: backward may run once.
        """
        from kernels.cross_entropy import linear_token_loss

        rows, hidden_ND, targets_N = self._selected(
            ids_BS, targets_BS, loss.weights_BS != 0, positions_BS, layout, None, kernel
        )
        total, log_probs_N, entropies_N = linear_token_loss(
            hidden_ND,
            self.lm_head.weight,
            targets_N,
            lambda log_probs, part: (
                loss.value(log_probs, rows[part]),
                loss.slope(log_probs, rows[part]),
            ),
            temperature=temperature,
            kernel=kernel,
        )
        return TokenLoss(
            total,
            _scatter(log_probs_N, rows, ids_BS.shape),
            _scatter(entropies_N, rows, ids_BS.shape),
        )

    def _selected(
        self, ids_BS, targets_BS, mask_BS, positions_BS, layout, cache, kernel
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Flat indices of the tokens where the mask is not 0, their hidden rows and
        their targets.
        """
        # not self(..): its FSDP hook would reshard the head before it is used
        hidden_BSD = self.forward(ids_BS, positions_BS, layout, cache, kernel)
        rows = mask_BS.flatten().nonzero()[:, 0]
        return rows, hidden_BSD.flatten(0, 1)[rows], targets_BS.flatten()[rows]

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Random start, in place: linears N(0, 1/fan_in), the two projections that write to the
        residual 0.05 of that, embeddings N(0, .02), norms 1.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
                continue
            std = 0.02 if "embed" in name else parameter.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= 0.05
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


RECOMPUTE = ("off", "on", "offload")


def set_recompute(model: Qwen3, recompute: str) -> None:
    """Choose, in place, what a pass with gradients keeps: every activation (off), or the blocks'
    inputs, from which backward runs a block again (on).

    offload: those inputs wait in host memory. Nothing changes where no gradient is wanted.
    """
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute {recompute!r}: choose one of {', '.join(RECOMPUTE)}")
    model.recompute = recompute


def _recomputed(
    block: Block,
    x_BSD: Tensor,
    rope: tuple[Tensor, Tensor],
    layout: Layout | None,
    *,
    offload: bool,
) -> Tensor:
    """Run a block and keep its input alone. The angles hide in a tuple: as arguments of their own
    they would be offloaded once a layer.
    """
    with save_on_cpu(pin_memory=x_BSD.is_cuda) if offload else contextlib.nullcontext():
        # nothing in a block is random
        return checkpoint(
            block, x_BSD, rope, layout, None, use_reentrant=False, preserve_rng_state=False
        )


def _scatter(values_N: Tensor, rows_N: Tensor, shape: torch.Size) -> Tensor:
    return values_N.new_zeros(shape.numel()).index_put((rows_N,), values_N).view(shape)
