"""Checkpoints appear whole or not at all, bring back every bit of the training state, and say in
one line why they cannot be read.

Other world sizes are in test_sharded_io.py, the scripts' interruptions in
tests/test_scripts_train.py and test_kill.py.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_runs
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from venus.cli import RunFailed
from venus.model.qwen3 import Qwen3, Qwen3Config, WeightedNLL
from venus.model.weights import load_model, write_weights
from venus.tokenizer import ChatTokenizer
from venus.train import checkpoint
from venus.train.backward import backward, with_weights
from venus.train.batches import Document
from venus.train.checkpoint import (
    check_shared,
    export_model,
    load_checkpoint,
    load_sharded,
    save_checkpoint,
)
from venus.train.parallel import World, shard, unsharded

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def world():
    world = World()
    yield world
    world.close()


class Run:
    """A model in training, as in train_sft.py."""

    def __init__(self, world, model="tied_tf5"):
        self.world = world
        self.model = shard(
            load_model(GOLDEN / model) if isinstance(model, str) else model, world, bf16=False
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, number):
        """One optimizer step on the data of that number; returns the loss."""
        ids = torch.randint(64, (12,), generator=torch.Generator().manual_seed(number)).tolist()
        batch = with_weights([Document(ids, {"mask": [0.0] * 4 + [1.0] * 8})], "token")
        results = backward(
            self.model,
            batch,
            lambda fields: WeightedNLL(fields["weights"]),
            max_tokens=100,
            world=self.world,
        )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return results[0][0].loss.item()

    def save(self, directory, step, keep=1, **extra):
        save_checkpoint(
            directory, step, self.model, self.optimizer, self.world, keep=keep, extra=extra
        )

    def load(self, directory, **settings):
        return load_checkpoint(
            directory, self.model, self.optimizer, self.world, settings=settings or None
        )[0]


@pytest.mark.parametrize("model", ["tied_tf5", "untied_tf4"])
def test_a_resumed_run_has_the_losses_of_the_uninterrupted_one_bit_for_bit(world, tmp_path, model):
    """Weights, both Adam moments and their step counts: a moment left out changes the second
    loss after the resume.
    """
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


def steps_in(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    ("keep", "kept"),
    [(1, ["step_12"]), (2, ["step_12", "step_3"]), (9, ["step_1", "step_12", "step_2", "step_3"])],
)
def test_the_last_checkpoints_are_kept(world, tmp_path, keep, kept):
    """By number, not by name: step_12 is newer than step_3."""
    run = Run(world)
    run.step(0)
    for step in (1, 2, 3, 12):
        run.save(tmp_path, step, keep=keep)
    assert steps_in(tmp_path) == ["latest", *kept]
    assert (tmp_path / "latest").read_text() == "step_12\n"


def test_going_back_to_an_older_checkpoint_leaves_nothing_of_the_later_ones(world, tmp_path):
    """`latest` set to step_2 by hand, since what came after went wrong: those must not be found
    newest when `latest` is lost one day.
    """
    run = Run(world)
    run.step(0)
    for step in (2, 4):
        run.save(tmp_path, step, keep=9)
    (tmp_path / "latest").write_text("step_2\n")
    assert run.load(tmp_path) == 2
    run.save(tmp_path, 3, keep=9)
    assert steps_in(tmp_path) == ["latest", "step_2", "step_3"]


def test_a_kill_between_the_two_renames_costs_nothing(world, tmp_path):
    """step_N is there and `latest` is not yet: at the first save, there is no `latest` at all."""
    run = Run(world)
    run.step(0)
    for step in (3, 12):
        run.save(tmp_path, step, keep=2)
    (tmp_path / "latest").unlink()
    (tmp_path / "step_20.tmp").mkdir()
    assert run.load(tmp_path) == 12


def test_what_was_saved_besides_comes_back(world, tmp_path):
    run, extra = Run(world), {"skipped": 2, "lengths": {"q1": 10.5}}
    run.step(0)
    run.save(tmp_path, 3, **extra)
    assert load_checkpoint(tmp_path, Run(world).model, None, world) == (3, extra)


def test_the_weights_alone_can_be_restored(world, tmp_path):
    run = Run(world)
    run.step(0)
    run.save(tmp_path, 1)
    other = Run(world)
    load_checkpoint(tmp_path, other.model, None, world)
    for ours, theirs in zip(other.model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())
    assert not other.optimizer.state


@pytest.mark.parametrize("model", ["tied_tf5", "untied_tf4"])
def test_a_tied_head_is_saved_once_and_stays_tied(world, tmp_path, model):
    """FSDP lists both names of a tied embedding: in fp32 a second 1.6 GB for a 4B model."""
    run = Run(world, model)
    run.step(0)
    run.save(tmp_path, 1)
    saved = dcp.FileSystemReader(tmp_path / "step_1").read_metadata().state_dict_metadata
    assert ("model.lm_head.weight" in saved) == (model == "untied_tf4")
    other = Run(world, model)
    other.load(tmp_path)
    assert (other.model.lm_head.weight is other.model.model.embed_tokens.weight) == (
        model == "tied_tf5"
    )


def test_random_numbers_go_on_after_a_resume(world, tmp_path):
    run = Run(world)
    run.step(0)
    torch.manual_seed(7)
    run.save(tmp_path, 1)
    expected = torch.rand(3)
    torch.rand(100)
    run.load(tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_a_rank_that_was_not_there_before_has_random_numbers_of_its_own(world, tmp_path):
    """Without, all new ranks would go on with whatever their process started with: the same."""
    run = Run(world)
    run.step(0)
    run.save(tmp_path, 1)
    drawn = []
    for rank in (0, 1, 2):
        load_checkpoint(
            tmp_path, run.model, run.optimizer, SimpleNamespace(rank=rank, device=world.device)
        )
        drawn.append(torch.rand(1).item())
    assert len(set(drawn)) == 3


SETTINGS = {"lr": 0.1, "betas": (0.9, 0.95), "data": "abc"}


def test_other_settings_are_refused_and_the_field_is_named(world, tmp_path):
    run = Run(world)
    run.step(0)
    run.save(tmp_path, 1, settings=SETTINGS)
    assert run.load(tmp_path, **SETTINGS) == 1
    other = Run(world)
    before = other.model.lm_head.weight.full_tensor().clone()
    for changed, wanted in (
        ({"lr": 0.2}, "made with lr 0.1, not 0.2"),
        ({"gamma": 1.0}, "made with gamma None, not 1.0"),
    ):
        with pytest.raises(ValueError, match=wanted) as error:
            other.load(tmp_path, **SETTINGS | changed)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="made with data 'abc', not None"):
        other.load(tmp_path, lr=0.1, betas=(0.9, 0.95))
    assert torch.equal(other.model.lm_head.weight.full_tensor(), before)


def test_a_half_written_checkpoint_is_ignored_and_later_removed(world, tmp_path):
    """A run killed while saving step 9 leaves step_9.tmp; `latest` still names
    step 3, which is whole.
    """
    run = Run(world)
    run.step(1)
    run.save(tmp_path, 3)
    (tmp_path / "step_9.tmp").mkdir()
    (tmp_path / "step_9.tmp" / "__0_0.distcp").write_bytes(b"half")
    resumed = Run(world)
    assert resumed.load(tmp_path) == 3
    assert resumed.step(0) == run.step(0)
    resumed.save(tmp_path, 9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_9"]


@pytest.mark.parametrize(
    "how", [KeyboardInterrupt(), CheckpointException("full", {0: (OSError("disk full"), None)})]
)
def test_a_crash_while_writing_leaves_the_checkpoint_before(world, tmp_path, monkeypatch, how):
    run = Run(world)
    run.step(0)
    run.save(tmp_path, 1)

    def killed(*_, checkpoint_id, **__):
        Path(checkpoint_id).mkdir()
        raise how

    monkeypatch.setattr(dcp, "save", killed)
    with pytest.raises(
        (KeyboardInterrupt, RunFailed), match=r"^$|disk full.*; the checkpoint before is unharmed"
    ):
        run.save(tmp_path, 2)
    assert Run(world).load(tmp_path) == 1


def test_a_checkpoint_that_is_not_there_is_a_one_line_error(world, tmp_path):
    """Absent, without its metadata, or a name that is none: the run must not start anew in
    silence over days of work.
    """
    run = Run(world)
    run.save(tmp_path, 3)
    (tmp_path / "step_3" / ".metadata").unlink()
    for name in ("step_3", "step_4", ""):
        (tmp_path / "latest").write_text(name)
        with pytest.raises(
            ValueError, match="latest: names .* not a whole checkpoint; remove"
        ) as error:
            run.load(tmp_path)
        assert "\n" not in str(error.value)


def test_a_damaged_checkpoint_and_one_of_another_model_are_one_line_errors(world, tmp_path):
    """torch's CheckpointException is no Exception: it went past every handler,
    with pages of traceback.
    """
    Run(world).save(tmp_path, 1)
    with pytest.raises(
        ValueError, match="another model .*(Size mismatch|Missing key).*another --output"
    ) as error:
        Run(world, "untied_tf4").load(tmp_path)
    assert "\n" not in str(error.value)
    (data,) = (tmp_path / "step_1").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged") as error:
        Run(world).load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "keep"), [("extra.json", 20), ("extra.json", 0), (".metadata", 500), (".metadata", 0)]
)
def test_a_cut_off_file_of_a_checkpoint_is_named_damage(world, tmp_path, name, keep):
    """As a full or failing disk leaves it. The line was "Expecting value: line 1 column 1" without
    a path, or a traceback.
    """
    run = Run(world)
    run.step(0)
    run.save(tmp_path, 1, settings=SETTINGS)
    file = tmp_path / "step_1" / name
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(
        ValueError, match=r"step_1: damaged, or .*; give another --output, or remove it"
    ):
        run.load(tmp_path, **SETTINGS)


def test_a_checkpoint_put_aside_under_another_name_is_left_alone(world, tmp_path):
    """A copy named step_2.good was read as a number, and no run could start or save any more."""
    run = Run(world)
    run.step(0)
    run.save(tmp_path, 2)
    shutil.copytree(tmp_path / "step_2", tmp_path / "step_2.good")
    assert run.load(tmp_path) == 2
    run.save(tmp_path, 3)
    assert steps_in(tmp_path) == ["latest", "step_2.good", "step_3"]


# Loading and exporting in shards


@pytest.mark.parametrize("model", ["tied_tf5", "untied_tf4"])
def test_a_model_loaded_in_shards_is_the_one_loaded_whole(world, model):
    sharded = load_sharded(GOLDEN / model, world, dtype=torch.float32, bf16=False)
    whole = load_model(GOLDEN / model, dtype=torch.float32)
    assert [name for name, _ in sharded.named_parameters()] == [
        name for name, _ in whole.named_parameters()
    ]
    for ours, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs)
    ids = torch.arange(24).view(2, 12) * 5 % 64
    with unsharded(sharded), torch.no_grad():
        assert torch.equal(sharded(ids), whole(ids))


def with_tokenizer(directory):
    """A copy of a golden model that has a tokenizer file."""
    shutil.copytree(GOLDEN / "tied_tf5", directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def test_an_export_that_would_not_read_back_is_refused_and_the_one_before_stays(
    world, tmp_path, monkeypatch
):
    """One tensor wrong, one NaN, one not there: in turn what a bad shard boundary, a run gone
    astray and a tied head gone missing would give.
    """
    source, run, out = with_tokenizer(tmp_path / "source"), Run(world), tmp_path / "out"
    export_model(run.model, source, out, dtype=torch.float32, world=world)
    before = (out / "model.safetensors").read_bytes()
    for spoil in (
        lambda name, t: t.roll(1, 0) if "q_proj" in name else t,
        lambda name, t: t * float("nan") if "norm" in name else t,
    ):

        def write(config, tensors, directory, *, dtype, spoil=spoil):
            write_weights(
                config,
                [(name, spoil(name, tensor)) for name, tensor in tensors],
                directory,
                dtype=dtype,
            )

        monkeypatch.setattr(checkpoint, "write_weights", write)
        with pytest.raises(RunFailed, match="log-probs differ by"):
            export_model(run.model, source, out, dtype=torch.float32, world=world)
    assert (out / "model.safetensors").read_bytes() == before
    monkeypatch.setattr(
        checkpoint,
        "write_weights",
        lambda c, ts, d, dtype: write_weights(
            c, [t for t in ts if "norm" not in t[0]], d, dtype=dtype
        ),
    )
    with pytest.raises(ValueError, match="missing model.layers.0.input_layernorm"):
        export_model(run.model, source, out, dtype=torch.float32, world=world)
    assert (out / "model.safetensors").read_bytes() == before


def test_an_export_replaces_an_export_and_nothing_else(world, tmp_path):
    """--export ~ must not remove a home directory, nor --export MODEL the model that
    the run started from.
    """
    source, run, out = with_tokenizer(tmp_path / "source"), Run(world), tmp_path / "out"
    for _ in range(2):
        export_model(run.model, source, out, dtype=torch.float32, world=world)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes.txt, which no export wrote"):
        export_model(run.model, source, out, dtype=torch.float32, world=world)
    with pytest.raises(ValueError, match="is the model that the run starts from"):
        export_model(
            run.model, source, tmp_path / "x" / ".." / "source", dtype=torch.float32, world=world
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_folder_that_only_rank_0_sees_is_refused(world, tmp_path):
    """Two nodes with scratch disks of the same name: each would have half a checkpoint. `elsewhere`
    is the other node's view.
    """
    check_shared(tmp_path / "new", world)
    assert list((tmp_path / "new").iterdir()) == []
    elsewhere = SimpleNamespace(
        is_main=False, rank=1, barrier=lambda: None, gather=lambda items: items
    )
    with pytest.raises(ValueError, match=r"ranks \[1\] do not see .* one shared folder"):
        check_shared(tmp_path / "other", elsewhere)


@pytest.mark.slow
def test_an_exported_model_loads_in_transformers_with_the_tokenizer_and_equal_log_probs(
    world, tmp_path, tmp_path_factory
):
    """Trained a step, so that it is not the source's weights that are compared. fp32:
    1e-5, two small layers.
    """
    transformers = pytest.importorskip("transformers")
    source = tiny_runs.tiny_world(tmp_path_factory) / "model"
    model = Qwen3(Qwen3Config.read(source))
    model.init_weights(0)
    run = Run(world, model)
    run.step(0)
    out = tmp_path / "out"
    export_model(run.model, source, out, dtype=torch.float32, world=world)
    ids = torch.randint(
        Qwen3Config.read(source).vocab_size, (2, 30), generator=torch.Generator().manual_seed(1)
    )
    with unsharded(run.model), torch.no_grad():
        ours = run.model.logits(run.model(ids).flatten(0, 1)).log_softmax(-1).view(2, 30, -1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert theirs.config.tie_word_embeddings
    with torch.no_grad():
        assert (theirs(ids).logits.log_softmax(-1) - ours).abs().max() <= 1e-5
    text = "<|im_start|>user\nWhat is the base of Zitnas?<|im_end|>\n"
    assert transformers.AutoTokenizer.from_pretrained(out)(text)["input_ids"] == ChatTokenizer(
        out
    ).encode(text)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()


def test_an_export_is_cast_and_says_so(world, tmp_path):
    source, run = with_tokenizer(tmp_path / "source"), Run(world)
    export_model(run.model, source, tmp_path / "out", dtype=torch.bfloat16, world=world)
    exported, original = load_model(tmp_path / "out"), load_model(GOLDEN / "tied_tf5")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    for ours, theirs in zip(exported.parameters(), original.parameters(), strict=True):
        assert torch.equal(ours, theirs.bfloat16())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
