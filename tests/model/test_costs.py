"""The formulas of --dry-run: at Qwen3-4B's size against figures worked out by hand, at a small one
against bytes and FLOPs that a run really took.
"""

from dataclasses import replace

import pytest
import torch
from torch.utils import flop_counter

from venus.model import costs
from venus.model.attention import Layout, plan_attention
from venus.model.costs import Training, memory_rows, training_memory
from venus.model.qwen3 import Block, Qwen3, Qwen3Config, WeightedNLL, rope_cos_sin, set_recompute
from venus.train.batches import Document, pack

QWEN3_4B = Qwen3Config(151936, 2560, 9728, 36, 32, 8, 128, 1e-6, 5e6, 262144, True)
SMALL = Qwen3Config(3000, 64, 160, 3, 6, 2, 16, 1e-6, 1e4, 4096, True)
PAPER = Training(
    world_size=8, sp=8, max_tokens=1, longest=200_000, recompute="on", reference=True, bf16=True
)


# Qwen3-4B


def test_parameters_of_qwen3_4b():
    assert (costs.num_parameters(QWEN3_4B), costs.block_parameters(QWEN3_4B)) == (
        4_022_468_096,
        100_930_816,
    )
    assert (
        costs.num_parameters(replace(QWEN3_4B, tie_word_embeddings=False))
        == 4_022_468_096 + 388_956_160
    )


@pytest.mark.parametrize(
    ("world_size", "state", "reference"),
    [(1, 64.4, 8.0), (2, 32.2, 4.0), (4, 16.1, 2.0), (8, 8.0, 1.0)],
)
def test_state_and_reference_are_spread_over_the_ranks(world_size, state, reference):
    items = training_memory(QWEN3_4B, replace(PAPER, world_size=world_size, sp=1))
    assert (items["parameters"] + items["gradients"] + items["AdamW"]) / 1e9 == pytest.approx(
        state, abs=0.05
    )
    assert items["reference model"] / 1e9 == pytest.approx(reference, abs=0.05)
    assert training_memory(QWEN3_4B, replace(PAPER, reference=False))["reference model"] == 0


@pytest.mark.parametrize(
    ("longest", "sp", "checkpoints", "live"),
    [
        (32_768, 1, 6.0, 5.6),
        (32_768, 8, 0.8, 0.7),
        (131_072, 2, 12.1, 11.2),
        (200_000, 1, 36.9, 34.3),
        (200_000, 4, 9.2, 8.6),
        (262_144, 8, 6.0, 5.6),
    ],
)
def test_sequence_parallelism_divides_checkpoints_and_the_live_layer(
    longest, sp, checkpoints, live
):
    """`live` was worked out at 167 KiB a token, as measured on a block with an implementation of
    its own: within 1 % and the last digit.
    """
    items = training_memory(QWEN3_4B, replace(PAPER, sp=sp, longest=longest))
    assert items["layer checkpoints"] / 1e9 == pytest.approx(checkpoints, abs=0.06)
    assert items["live layer"] / 1.5 / 1e9 == pytest.approx(live, abs=0.05 + 0.01 * live)


def test_the_papers_run_takes_26_gb_of_each_of_eight_gpus():
    assert sum(training_memory(QWEN3_4B, PAPER).values()) / 1e9 == pytest.approx(26, abs=1)
    assert dict(memory_rows(QWEN3_4B, PAPER, 80))["verdict"] == "fits: 24.5 GiB of 68.5 GiB usable"


@pytest.mark.parametrize(
    ("change", "gpu_memory", "help_by"),
    [
        ({"sp": 1, "recompute": "off"}, 80, "it does with --sp 8 --recompute on"),
        ({"world_size": 2, "sp": 2}, 80, "it does with --recompute offload"),
        (
            {"longest": 100_000, "max_tokens": 100_000, "recompute": "offload"},
            48,
            "it does with --max-tokens-per-gpu 12500",
        ),
        (
            {"world_size": 1, "sp": 1},
            80,
            "whatever the flags; use more GPUs or a smaller --max-length",
        ),
        # 64 would leave half a head to a rank
        (
            {"world_size": 64, "sp": 16, "longest": 1_000_000},
            21,
            "it does with --sp 32 --recompute offload",
        ),
    ],
)
def test_the_verdict_names_the_flags_to_turn(change, gpu_memory, help_by):
    verdict = dict(memory_rows(QWEN3_4B, replace(PAPER, **change), gpu_memory))["verdict"]
    assert verdict.startswith("does not fit: ") and verdict.endswith(help_by)


def test_a_plan_that_no_run_could_follow_is_refused():
    """It said that sp 64 fits, and the run then stopped: 32 heads have no 64 equal parts."""
    with pytest.raises(ValueError, match="sp 64: does not divide the model's 32 query heads"):
        memory_rows(QWEN3_4B, replace(PAPER, world_size=64, sp=64), 80)


def test_offloaded_checkpoints_are_counted_on_the_host():
    """200,000 tokens of 2,560 bf16 numbers for 36 layers: 36.9 GB, of which two layers'
    worth is on the GPU.
    """
    rows = dict(memory_rows(QWEN3_4B, replace(PAPER, sp=1, recompute="offload"), None))
    assert (
        rows["host memory per GPU, layer checkpoints"]
        == costs.readable_bytes(200_000 * 2560 * 2 * 36)
        and "verdict" not in rows
    )
    assert rows["memory per GPU, layer checkpoints"] == costs.readable_bytes(200_000 * 2560 * 2 * 2)


def test_a_cached_token_of_qwen3_4b_takes_147456_bytes():
    assert costs.kv_bytes(QWEN3_4B, 1, True) == 147_456
    assert costs.kv_bytes(QWEN3_4B, 3, False) == 6 * 147_456


@pytest.mark.parametrize(("gpu_memory", "tokens"), [(80, 363_000), (141, 743_000)])
def test_the_kv_pool_takes_what_training_leaves(gpu_memory, tokens):
    """The figures by hand still hold the gradients, 2.0 GB of 8.0; they are
    dropped before a rollout.
    """
    pool = costs.kv_pool_tokens(
        QWEN3_4B, gpu_memory=gpu_memory, world_size=8, training=True, reference=True, bf16=True
    )
    assert pool - 4 * costs.num_parameters(QWEN3_4B) / 8 / 147_456 == pytest.approx(
        tokens, rel=2e-3
    )
    assert (
        costs.kv_pool_tokens(
            QWEN3_4B, gpu_memory=12, world_size=8, training=True, reference=True, bf16=True
        )
        == 0
    )


def test_a_decode_step_reads_the_weights_once_and_every_cached_token():
    """16 rows of 60,000 tokens in a pool of 480,000: 8 at a time, 80,000 steps of 8.04 + 70.8 GB at
    70 % of 4.8 TB/s, 0.52 h.
    """
    h200 = {"rows": 16, "new_tokens": 40_000, "context": 60_000, "bandwidth": 4.8e12, "bf16": True}
    assert costs.rollout_hours(QWEN3_4B, **h200, pool_tokens=480_000) == pytest.approx(
        80_000 * (8.0449 + 70.779) / (0.7 * 4800) / 3600, rel=1e-4
    )
    assert costs.rollout_hours(QWEN3_4B, **h200, pool_tokens=10**9) == pytest.approx(
        40_000 * (8.0449 + 141.558) / (0.7 * 4800) / 3600, rel=1e-4
    )
    with pytest.raises(
        ValueError, match="pool of 59,999 tokens does not hold one trajectory of 60,000"
    ):
        costs.rollout_hours(QWEN3_4B, **h200, pool_tokens=59_999)


def test_one_sequence_of_200k_tokens_takes_59_pflop():
    """By hand, with recomputation: 8 FLOPs a parameter and token, and 4.5 forwards of attention (1
    + 1 again + 2.5 backward): 16 and 59 PFLOP.
    """
    for length, pflop in ((100_000, 16), (200_000, 59)):
        total = costs.training_flops(QWEN3_4B, [length], length) + costs.recompute_flops(
            QWEN3_4B, [length], "on"
        )
        assert total / 1e15 == pytest.approx(pflop, abs=0.5)
    assert costs.mfu(
        989e12 * 8 * 10 * 0.4, 10, world_size=8, device_name="NVIDIA H100 80GB HBM3"
    ) == pytest.approx(0.4)
    assert costs.mfu(1e15, 1, world_size=1, device_name="cpu") is None


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0.0 B"),
        (1023, "1023.0 B"),
        (1536, "1.5 KiB"),
        (3 * 2**20, "3.0 MiB"),
        (5 * 2**42, "20480.0 GiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_unit_that_fits(count, text):
    assert costs.readable_bytes(count) == text


# a small model, measured


def train_step(model, lengths, is_trained=lambda k: True):
    """One backward over documents of these lengths, the loss on the tokens that
    `is_trained` picks.
    """
    generator = torch.Generator().manual_seed(0)
    documents = [
        Document(
            torch.randint(SMALL.vocab_size, (length,), generator=generator).tolist(),
            {"weights": [float(is_trained(k)) for k in range(length)]},
        )
        for length in lengths
    ]
    packed = pack(documents)
    loss = model.token_loss(
        packed.ids_1N,
        packed.targets_1N,
        loss=WeightedNLL(packed.fields["weights"]),
        positions_BS=packed.positions_1N,
        layout=packed.layout,
        kernel="torch",
    ).loss
    loss.backward()


@pytest.fixture(scope="module")
def small():
    model = Qwen3(SMALL)
    model.init_weights(0)
    return model


def test_parameters_gradients_and_moments_are_those_of_a_real_step(small):
    """To the byte, but for AdamW's step counters (4 bytes a tensor)."""
    optimizer = torch.optim.AdamW(small.parameters())
    train_step(small, [20, 30])
    optimizer.step()
    items = training_memory(SMALL, replace(PAPER, world_size=1, sp=1, bf16=False))
    assert items["parameters"] == sum(p.nbytes for p in small.parameters())
    assert items["gradients"] == sum(p.grad.nbytes for p in small.parameters())
    moments = [
        tensor
        for state in optimizer.state.values()
        for name, tensor in state.items()
        if name != "step"
    ]
    assert items["AdamW"] == sum(tensor.nbytes for tensor in moments)
    optimizer.zero_grad(set_to_none=True)


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes of the different storages that autograd saves, those of `known` tensors apart."""

    def __init__(self, known):
        self.known, self.storages = {tensor.untyped_storage().data_ptr() for tensor in known}, {}
        super().__init__(self.pack, lambda tensor: tensor)

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.storages[storage.data_ptr()] = storage  # kept, so that no other takes its place
        return tensor

    @property
    def total(self):
        return sum(storage.nbytes() for storage in self.storages.values())


@pytest.mark.parametrize("config", [SMALL, replace(QWEN3_4B, vocab_size=16)], ids=["small", "4b"])
@pytest.mark.parametrize("bf16", [True, False])
def test_a_layer_saves_what_the_formula_says(config, bf16):
    """To the byte, once SDPA on a CPU is granted its transposed output: one more copy of width * H
    * E a token than a flash kernel needs.
    """
    dtype, tokens = torch.bfloat16 if bf16 else torch.float32, 48
    block = Block(config, 0).to(dtype)
    x = torch.randn(1, tokens, config.hidden_size, dtype=dtype, requires_grad=True)
    rope = rope_cos_sin(torch.arange(tokens)[None], config.head_dim, config.rope_theta, dtype)
    layout = plan_attention(
        Layout.documents([tokens]),
        x,
        config.num_attention_heads // config.num_key_value_heads,
        "torch",
    )
    saved = SavedBytes([*block.parameters(), *rope])
    with saved:
        block(x, rope, layout, None)
    copy = x.element_size() * config.num_attention_heads * config.head_dim
    assert saved.total == tokens * (costs.layer_bytes(config, bf16) + copy)


def test_activations_of_a_step_are_within_5_percent(small):
    """All that the forward saves without recomputation: layers by the formula, and of the loss what
    outlives it (dW and the rows' gradient).
    """
    tokens = 256
    ids = torch.randint(SMALL.vocab_size, (1, tokens))
    saved = SavedBytes(small.parameters())
    with saved:
        small(ids)
    planned = training_memory(
        SMALL, replace(PAPER, world_size=1, sp=1, longest=tokens, recompute="off", bf16=False)
    )["activations"]
    assert saved.total == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize(("recompute", "on_the_host"), [("on", False), ("offload", True)])
def test_with_recomputation_a_layer_keeps_its_input_alone(recompute, on_the_host):
    """To the byte: what two more layers add. Offloaded, the same bytes are copies that the hooks of
    the step do not see.
    """
    tokens, totals = 32, []
    for layers in (1, 3):
        model = Qwen3(replace(SMALL, num_hidden_layers=layers))
        model.init_weights(0)
        set_recompute(model, recompute)
        saved = SavedBytes(model.parameters())
        with saved:
            model(torch.randint(SMALL.vocab_size, (1, tokens)))
        totals.append(saved.total)
    setting = replace(PAPER, world_size=1, sp=1, longest=tokens, bf16=False)
    planned = 2 * training_memory(SMALL, setting)["layer checkpoints"] // SMALL.num_hidden_layers
    assert totals[1] - totals[0] == (0 if on_the_host else planned)


def test_the_loss_holds_no_more_than_planned(small, monkeypatch):
    """Every tensor that the one-pass loss makes, added up, from a chunk's logits to dW; 20 % for
    rows of scalars and the one block in the cache.
    """
    made = []
    for name in ("new_empty", "zeros_like", "empty_like"):
        owner = torch.Tensor if name == "new_empty" else torch
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, real=real, **how: made.append(real(*args, **how)) or made[-1]
        )
    tokens = 100
    train_step(small, [tokens + 1])
    largest = sum(tensor.nbytes for tensor in made)
    # the final norm's and the hidden rows are not made by the loss
    planned = costs.loss_bytes(SMALL, tokens, False) - tokens * SMALL.hidden_size * 4 * 4
    assert largest == pytest.approx(planned, rel=0.2)
    small.zero_grad()


def test_flops_are_those_that_torch_counts():
    """torch counts every pair of a causal document, twice what the formula has, and in attention's
    backward the scores again.

    It does not know the CPU's attention, nor a product added in place, but has their formulas under
    other names; those for attention want equally many heads for queries and keys.
    """
    config, lengths = replace(SMALL, num_key_value_heads=SMALL.num_attention_heads), [50, 70]
    model = Qwen3(config)
    model.init_weights(0)
    aten = torch.ops.aten
    formulas = {
        "_scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *_, **__: (
            flop_counter.sdpa_flop_count(q, k, v)
        ),
        "_scaled_dot_product_flash_attention_for_cpu_backward": lambda grad, q, k, v, *_, **__: (
            flop_counter.sdpa_backward_flop_count(grad, q, k, v)
        ),
        "addmm_": lambda _sum, a, b, **_: flop_counter.mm_flop(a, b),
    }
    with flop_counter.FlopCounterMode(
        display=False,
        custom_mapping={getattr(aten, name): formula for name, formula in formulas.items()},
    ) as counter:
        train_step(model, [length + 1 for length in lengths], lambda k: k % 4 == 1)
    loss_tokens = sum(len(range(1, length + 1, 4)) for length in lengths)
    unseen = (
        3.5
        * 4
        * config.num_hidden_layers
        * config.num_attention_heads
        * config.head_dim
        * sum(length**2 for length in lengths)
        / 2
    )
    formula = costs.training_flops(config, lengths, loss_tokens) + costs.recompute_flops(
        config, lengths, "off"
    )
    assert counter.get_total_flops() == pytest.approx(formula + unseen, rel=1e-9)
