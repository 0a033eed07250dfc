"""Checkpoints appear whole or not at all, bring back every bit of the training state, and say in one line why they cannot be read.

The scripts' interruptions, and resuming at another world size, are in tests/test_scripts_train.py.
"""

import json
import shutil
from pathlib import Path

import pytest
import tiny_runs
import torch
import torch.distributed.checkpoint as dcp

from venus.batches import Document
from venus.checkpoint import export_model, load_checkpoint, save_checkpoint
from venus.model import Qwen3, Qwen3Config, WeightedNLL
from venus.parallel import World, shard, unsharded
from venus.tokenizer import ChatTokenizer
from venus.updates import backward, with_weights
from venus.weights import load_model

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def world():
    world = World()
    yield world
    world.close()


class Run:
    """A model in training, as in train_sft.py."""

    def __init__(self, world, model="tied_tf5"):
        self.world, self.model = world, shard(load_model(GOLDEN / model) if isinstance(model, str) else model, bf16=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, number):
        """One optimizer step on the data of that number; returns the loss."""
        ids = torch.randint(64, (12,), generator=torch.Generator().manual_seed(number)).tolist()
        batch = with_weights([Document(ids, {"mask": [0.0] * 4 + [1.0] * 8})], "token")
        results = backward(self.model, batch, lambda fields: WeightedNLL(fields["weights"]), max_tokens=100, world=self.world)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return results[0][0].loss.item()

    def save(self, directory, step):
        save_checkpoint(directory, step, self.model, self.optimizer, self.world)

    def load(self, directory):
        return load_checkpoint(directory, self.model, self.optimizer)


@pytest.mark.parametrize("model", ["tied_tf5", "untied_tf4"])
def test_a_resumed_run_has_the_losses_of_the_uninterrupted_one_bit_for_bit(world, tmp_path, model):
    """Weights, both Adam moments and their step counts: a moment left out changes the second loss after the resume."""
    run = Run(world, model)
    losses = [run.step(number) for number in range(3)]
    run.save(tmp_path, 3)
    expected = [run.step(number) for number in range(3, 7)]
    resumed = Run(world, model)
    assert resumed.load(tmp_path) == 3
    assert [resumed.step(number) for number in range(3, 7)] == expected
    assert len({*losses, *expected}) == 7


def test_saving_changes_nothing_in_the_run(world, tmp_path):
    saved, untouched = Run(world), Run(world)
    for number in range(3):
        assert saved.step(number) == untouched.step(number)
        saved.save(tmp_path, number + 1)


def test_without_a_checkpoint_the_run_starts_at_step_0_with_its_own_weights(world, tmp_path):
    run = Run(world)
    assert run.load(tmp_path) == 0 and run.load(tmp_path / "absent") == 0
    assert run.step(0) == Run(world).step(0)


def test_only_the_latest_checkpoint_is_kept(world, tmp_path):
    run = Run(world)
    for step in (1, 2, 3):
        run.save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_3"]
    assert (tmp_path / "latest").read_text() == "step_3\n"


def test_a_half_written_checkpoint_is_ignored_and_later_removed(world, tmp_path):
    """A run killed while saving step 9 leaves step_9.tmp; `latest` still names step 3, which is whole."""
    run = Run(world)
    run.save(tmp_path, 3)
    (tmp_path / "step_9.tmp").mkdir()
    (tmp_path / "step_9.tmp" / "__0_0.distcp").write_bytes(b"half")
    resumed = Run(world)
    assert resumed.load(tmp_path) == 3
    assert resumed.step(0) == run.step(0)
    resumed.save(tmp_path, 9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_9"]


def test_a_crash_while_writing_leaves_the_checkpoint_before(world, tmp_path, monkeypatch):
    run = Run(world)
    run.save(tmp_path, 1)

    def killed(*_, checkpoint_id, **__):
        Path(checkpoint_id).mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(dcp, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        run.save(tmp_path, 2)
    assert Run(world).load(tmp_path) == 1


def test_a_checkpoint_that_is_not_there_is_a_one_line_error(world, tmp_path):
    """Absent, without its metadata, or a name that is none: the run must not start anew in silence over days of work."""
    run = Run(world)
    run.save(tmp_path, 3)
    (tmp_path / "step_3" / ".metadata").unlink()
    for name in ("step_3", "step_4", ""):
        (tmp_path / "latest").write_text(name)
        with pytest.raises(ValueError, match="latest: names .* not a whole checkpoint; remove") as error:
            run.load(tmp_path)
        assert "\n" not in str(error.value)


def test_a_damaged_checkpoint_and_one_of_another_model_are_one_line_errors(world, tmp_path):
    """torch's CheckpointException is no Exception: it went past every handler, with pages of traceback."""
    Run(world).save(tmp_path, 1)
    with pytest.raises(ValueError, match="another model .*(Size mismatch|Missing key).*another --output") as error:
        Run(world, "untied_tf4").load(tmp_path)
    assert "\n" not in str(error.value)
    (data,) = (tmp_path / "step_1").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged") as error:
        Run(world).load(tmp_path)
    assert "\n" not in str(error.value)


# Export


@pytest.mark.slow
def test_an_exported_model_loads_in_transformers_with_the_tokenizer_and_equal_log_probs(world, tmp_path, tmp_path_factory):
    """Trained a step, so that it is not the source's weights that are compared. fp32: 1e-5, two small layers."""
    transformers = pytest.importorskip("transformers")
    source = tiny_runs.tiny_world(tmp_path_factory) / "model"
    model = Qwen3(Qwen3Config.read(source))
    model.init_weights(0)
    run = Run(world, model)
    run.step(0)
    export_model(run.model, source, tmp_path, dtype=torch.float32, world=world)
    ids = torch.randint(Qwen3Config.read(source).vocab_size, (2, 30), generator=torch.Generator().manual_seed(1))
    with unsharded(run.model), torch.no_grad():
        ours = run.model.logits(run.model(ids).flatten(0, 1)).log_softmax(-1).view(2, 30, -1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert theirs.config.tie_word_embeddings
    with torch.no_grad():
        assert (theirs(ids).logits.log_softmax(-1) - ours).abs().max() <= 1e-5
    text = "<|im_start|>user\nWhat is the base of Zitnas?<|im_end|>\n"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == ChatTokenizer(tmp_path).encode(text)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (source / name).read_bytes()


def test_an_export_is_cast_and_says_so(world, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "tied_tf5", source)
    (source / "tokenizer.json").write_text("{}")
    run = Run(world)
    export_model(run.model, source, tmp_path / "out", dtype=torch.bfloat16, world=world)
    exported, original = load_model(tmp_path / "out"), load_model(GOLDEN / "tied_tf5")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    for ours, theirs in zip(exported.parameters(), original.parameters(), strict=True):
        assert torch.equal(ours, theirs.bfloat16())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
