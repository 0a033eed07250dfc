"""Hugging Face directories in and out. The goldens are tiny checkpoints that transformers wrote
(tests/make_golden.py).
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from venus.model.qwen3 import Qwen3, Qwen3Config
from venus.model.weights import copy_tokenizer_files, load_model, save_model, write_weights

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = ("tied_tf5", "untied_tf4")


@pytest.fixture
def copy(tmp_path):
    """A writable copy of the untied golden checkpoint, config.json and model.safetensors only."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "untied_tf4" / name, tmp_path / name)
    return tmp_path


def change_tensors(directory, change):
    """Rewrite model.safetensors through `change(tensors)`, which edits the dict in place."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
    )


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


def logits_of(model):
    ids = torch.arange(24).view(2, 12) * 5 % 64
    with torch.no_grad():
        return model.logits(model(ids).flatten(0, 1))


# Strictness


def test_every_kind_of_misfit_is_listed_at_once(copy):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(24, 32)

    change_tensors(copy, change)
    with pytest.raises(ValueError, match="do not fit config.json") as error:
        load_model(copy)
    text = one_line(error)
    assert "missing model.norm.weight" in text
    assert "unexpected model.layers.0.self_attn.q_proj.bias" in text
    assert "model.layers.1.mlp.up_proj.weight is [24, 32], not [32, 24]" in text


def test_a_long_list_of_misfits_is_cut_with_its_count(copy):
    config = json.loads((copy / "config.json").read_text()) | {"num_hidden_layers": 4}
    (copy / "config.json").write_text(json.dumps(config))
    # 2 layers of 11 tensors
    with pytest.raises(ValueError, match="missing model.layers.2.*and 14 more") as error:
        load_model(copy)
    one_line(error)


def test_an_untied_model_needs_its_head(copy):
    change_tensors(copy, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="missing lm_head.weight"):
        load_model(copy)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_a_truncated_file_is_one_line_that_names_it(copy, keep):
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[:keep])
    with pytest.raises(
        ValueError, match=r"model\.safetensors: truncated or not a safetensors file"
    ) as error:
        load_model(copy)
    one_line(error)


def test_a_quantised_tensor_is_named_and_not_loaded_as_numbers(copy):
    change_tensors(
        copy,
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(24, dtype=torch.int8)}),
    )
    with pytest.raises(ValueError, match="model.norm.weight is I8") as error:
        load_model(copy)
    one_line(error)


def test_missing_weights_are_named(copy):
    (copy / "model.safetensors").unlink()
    with pytest.raises(
        ValueError, match="no model.safetensors and no model.safetensors.index.json"
    ) as error:
        load_model(copy)
    one_line(error)


def test_a_missing_shard_is_named(tmp_path):
    save_model(load_model(GOLDEN / "untied_tf4"), tmp_path, shard_bytes=20_000)
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=gone.name) as error:
        load_model(tmp_path)
    one_line(error)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}'])
def test_a_broken_index_is_named(copy, content):
    (copy / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match="not a safetensors index") as error:
        load_model(copy)
    one_line(error)


# Reading and writing


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_a_saved_model_loads_bit_for_bit(tmp_path, case, shard_bytes):
    model = load_model(GOLDEN / case)
    save_model(model, tmp_path, shard_bytes=shard_bytes)
    again = load_model(tmp_path)
    assert again.config == model.config
    ours, theirs = model.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_no_shard_is_larger_than_asked_and_the_index_names_each_tensor_once(tmp_path):
    model = load_model(GOLDEN / "untied_tf4")
    save_model(model, tmp_path, shard_bytes=20_000)
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(weight_map) == {name for name, _ in model.named_parameters()}
    shards = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
    assert {name: file for file, tensors in shards.items() for name in tensors} == weight_map
    assert all(
        sum(t.numel() * 4 for t in tensors.values()) <= 20_000 for tensors in shards.values()
    )
    assert not list(tmp_path.glob(".*")) + list(tmp_path.glob("*.tmp"))


def test_a_tied_head_is_absent_in_the_file_and_shared_after_loading(tmp_path):
    """Trap 25: tied heads have been exported as an empty or a duplicate tensor."""
    save_model(load_model(GOLDEN / "tied_tf5"), tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    again = load_model(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_a_tied_head_that_a_writer_stored_as_well_is_accepted(tmp_path):
    shutil.copy(GOLDEN / "tied_tf5" / "config.json", tmp_path)
    tensors = load_file(GOLDEN / "tied_tf5" / "model.safetensors")
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        tmp_path / "model.safetensors",
    )
    again = load_model(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits_of(again), logits_of(load_model(GOLDEN / "tied_tf5")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_files_of_each_dtype_load_as_they_are_or_as_asked(tmp_path, dtype):
    model = load_model(GOLDEN / "untied_tf4")
    save_model(model, tmp_path, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["dtype"] == written["torch_dtype"] == name
    want = {key: value.to(dtype) for key, value in model.state_dict().items()}
    as_is, as_fp32 = load_model(tmp_path), load_model(tmp_path, dtype=torch.float32)
    assert all(
        torch.equal(value, want[key]) and value.dtype == dtype
        for key, value in as_is.state_dict().items()
    )
    assert all(
        torch.equal(value, want[key].float()) and value.dtype == torch.float32
        for key, value in as_fp32.state_dict().items()
    )


def test_no_parameter_stays_on_the_meta_device_and_all_require_gradients():
    for case in CASES:
        parameters = list(load_model(GOLDEN / case).parameters())
        assert all(p.device.type == "cpu" and p.requires_grad for p in parameters)


def test_training_a_loaded_model_does_not_touch_its_file(copy):
    """safetensors maps the file into memory; an optimizer step in place must stay private."""
    before = (copy / "model.safetensors").read_bytes()
    model = load_model(copy)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert (copy / "model.safetensors").read_bytes() == before


def test_the_tokenizer_travels_unchanged_and_what_is_absent_is_skipped(copy, tmp_path_factory):
    target = tmp_path_factory.mktemp("target")
    (copy / "tokenizer.json").write_bytes(b"{\r\n}")
    copy_tokenizer_files(copy, target)
    copy_tokenizer_files(copy, copy)  # saving in place
    assert [path.name for path in target.iterdir()] == ["tokenizer.json"]
    assert (
        (target / "tokenizer.json").read_bytes()
        == (copy / "tokenizer.json").read_bytes()
        == b"{\r\n}"
    )


def test_a_model_can_be_saved_over_the_directory_it_came_from(copy):
    model = load_model(copy)
    before = logits_of(model)
    save_model(model, copy)
    assert torch.equal(logits_of(load_model(copy)), before)


def test_stale_shards_of_an_earlier_save_are_gone(tmp_path):
    """A single file beside an old index would be read by nobody: the index wins."""
    model = load_model(GOLDEN / "untied_tf4")
    save_model(model, tmp_path, shard_bytes=20_000)
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    save_model(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(load_model(tmp_path).model.norm.weight, model.model.norm.weight)


def test_an_interrupted_save_leaves_the_old_model_readable(copy):
    def tensors():
        yield "model.embed_tokens.weight", torch.zeros(64, 24)
        yield "model.norm.weight", torch.zeros(24)
        raise KeyboardInterrupt

    before = logits_of(load_model(copy))
    with pytest.raises(KeyboardInterrupt):
        write_weights(
            Qwen3Config.read(copy), tensors(), copy, dtype=torch.float32, shard_bytes=1000
        )
    assert torch.equal(logits_of(load_model(copy)), before)


MEMORY_SCRIPT = """
import resource, sys, torch
from venus.model.weights import copy_tokenizer_files, load_model, save_model, write_weights
def peak_mb():
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(peak.split()[1]) / 1024
torch.set_num_threads(1)
load_model(sys.argv[1])
before = peak_mb()
model = load_model(sys.argv[2], dtype=torch.float32)
print(peak_mb() - before, float(sum(p.sum() for p in model.parameters()).detach()))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc"
)
def test_loading_peaks_at_the_model_and_one_shard(tmp_path):
    """167 MB in fp32 from four bf16 shards of up to 23 MB: the peak resident set grows by at most
    model + one shard + 15 MB of slack.

    Seen: 186 MB, where reading all shards first takes 250. A tiny model is loaded before, so that
    code and libraries do not count. Not ru_maxrss: a child of pytest starts with its parent's.
    """
    config = Qwen3Config(
        vocab_size=24_000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    model = Qwen3(config)
    num_bytes = 4 * sum(p.numel() for p in model.parameters())
    save_model(model, tmp_path, dtype=torch.bfloat16, shard_bytes=num_bytes // 8 + 10**6)
    largest = max(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    del model
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(GOLDEN / "untied_tf4"), str(tmp_path)]
    result = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    grown = float(result.stdout.split()[0])
    assert num_bytes > 150e6 and len(list(tmp_path.glob("*.safetensors"))) >= 3
    assert grown <= (num_bytes + largest) / 2**20 + 15


# Against transformers itself


def transformers_model(tied, rope_theta=5e6):
    """A random Qwen3 of the installed transformers, with weights large enough that its log-probs
    are far from uniform.
    """
    transformers = pytest.importorskip(
        "transformers", minversion="5.0", reason="the reference is transformers >= 5"
    )
    config = transformers.Qwen3Config(
        vocab_size=97,
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=12,
        tie_word_embeddings=tied,
        rope_parameters={"rope_theta": rope_theta, "rope_type": "default"},
        initializer_range=0.2,
    )
    torch.manual_seed(3)
    model = transformers.Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


IDS = torch.arange(60).view(2, 30) * 7 % 97


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_size", ["1GB", "40KB"])
def test_a_model_saved_by_transformers_loads_with_its_log_probs(tmp_path, tied, shard_size):
    theirs = transformers_model(tied)
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "40KB")
    with torch.no_grad():
        want = theirs(IDS).logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
        got = load_model(tmp_path).token_log_probs(IDS[:, :-1], IDS[:, 1:], torch.ones(2, 29))
    assert want.std() > 1  # not a uniform model
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [10**9, 40_000])
def test_our_export_loads_in_transformers_with_equal_logits(tmp_path, tied, shard_bytes):
    """transformers -> Venus -> transformers: the same weights and config, so the logits
    are equal bit for bit.
    """
    theirs = transformers_model(tied)
    theirs.save_pretrained(tmp_path / "theirs")
    save_model(load_model(tmp_path / "theirs"), tmp_path / "ours", shard_bytes=shard_bytes)
    again, info = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(again.eval()(IDS).logits, theirs(IDS).logits)
