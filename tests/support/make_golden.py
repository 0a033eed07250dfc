"""Make `tests/golden/`: two tiny random Qwen3 checkpoints with the numbers transformers computes
from them. Run by hand:

    python tests/make_golden.py

Needs transformers >= 5. `tied_tf5` keeps config.json as transformers 5 writes it; `untied_tf4` has
it as transformers 4 did (and as the published Qwen3-4B-Thinking-2507 does). Each directory holds
config.json, model.safetensors, expected.safetensors (inputs, every hidden state, logits) and
greedy.json (prompts with their greedy continuations by `generate`, and the versions that made it
all).
"""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

GOLDEN = Path(__file__).parents[1] / "golden"
VOCAB, LENGTH, NEW_TOKENS = 64, 20, 24
# the last row ends at the last position of Qwen3-4B-Thinking-2507
FIRST_POSITIONS = (0, 32_767 - LENGTH // 2, 262_144 - LENGTH)
PROMPTS = ([5, 17, 33], [60, 2, 41, 8, 8, 19, 27], [1, 50, 12, 37, 63, 0, 22, 9, 44, 31, 6, 55])
# the best token leads the second by this much in logits at every step, so rounding cannot
# change a continuation
MIN_MARGIN = 0.02
MIN_DISTINCT = 10  # a continuation that repeats one token tests little


def random_model(seed, *, tied, rope_theta):
    """Return a model whose layers matter: weights of order 1/sqrt(fan_in), norm weights away from
    1: a forgotten norm or rotation shows.
    """
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=tied,
        rope_parameters={"rope_theta": rope_theta, "rope_type": "default"},
        max_position_embeddings=262_144,
    )
    config._attn_implementation = "eager"  # plain matmul and softmax, not the SDPA that Venus calls
    model = Qwen3ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif "embed" in name or "lm_head" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(1.5 * parameter.shape[1] ** -0.5 * noise)
    return model


def greedy_continuations(model):
    """[(continuation, smallest lead of the chosen token over the second)] of PROMPTS."""
    results = []
    for prompt in PROMPTS:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
        top = torch.cat(out.logits).topk(2).values
        results.append(
            (out.sequences[0, len(prompt) :].tolist(), float((top[:, 0] - top[:, 1]).min()))
        )
    return results


def write_case(name, *, tied, rope_theta, spelling):
    """Search the first seed with clear greedy continuations and write one directory."""
    for seed in range(1000):
        model = random_model(seed, tied=tied, rope_theta=rope_theta)
        greedy = greedy_continuations(model)
        if all(margin >= MIN_MARGIN and len(set(ids)) >= MIN_DISTINCT for ids, margin in greedy):
            break
    else:
        raise SystemExit(f"{name}: no seed below 1000 has margins >= {MIN_MARGIN}")
    directory = GOLDEN / name
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink()
    if spelling == 4:
        write_config_of_transformers_4(directory / "config.json")
    ids = torch.randint(
        VOCAB, (len(FIRST_POSITIONS), LENGTH), generator=torch.Generator().manual_seed(seed)
    )
    positions = torch.tensor(FIRST_POSITIONS)[:, None] + torch.arange(LENGTH)
    with torch.no_grad():
        out = model(ids, position_ids=positions, output_hidden_states=True)
    expected = {
        "ids": ids,
        "positions": positions,
        "logits": out.logits,
        "hidden_states": torch.stack(out.hidden_states),
    }
    save_file(
        {key: value.contiguous() for key, value in expected.items()},
        directory / "expected.safetensors",
    )
    record = {
        "seed": seed,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": "python tests/make_golden.py",
        "greedy": [
            {"prompt": prompt, "continuation": c, "margin": round(m, 4)}
            for prompt, (c, m) in zip(PROMPTS, greedy, strict=True)
        ],
    }
    (directory / "greedy.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(
        f"{name}: seed {seed}, margins {[round(m, 3) for _, m in greedy]}, "
        f"{sum(f.stat().st_size for f in directory.iterdir()):,} bytes"
    )


def write_config_of_transformers_4(path):
    """Respell a config.json of transformers 5 in place, with the keys and the order of the
    published Qwen3 checkpoints.
    """
    new = json.loads(path.read_text(encoding="utf-8"))
    del new["layer_types"], new["pad_token_id"]
    new |= {
        "rope_scaling": None,
        "rope_theta": int(new.pop("rope_parameters")["rope_theta"]),
        "torch_dtype": new.pop("dtype"),
    }
    new["transformers_version"] = "4.51.0"
    path.write_text(json.dumps(dict(sorted(new.items())), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_case("tied_tf5", tied=True, rope_theta=1e6, spelling=5)
    write_case("untied_tf4", tied=False, rope_theta=5e6, spelling=4)
