"""What a training run does between its steps: bad updates are skipped and counted, a stop is saved,
a lack of memory is one line.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from venus.cli import STOPPED, UNTRUSTED, RunFailed
from venus.model.qwen3 import WeightedNLL
from venus.model.weights import load_model
from venus.train.backward import backward, with_weights
from venus.train.batches import Document
from venus.train.loop import OptimizerOptions, TrainingOptions, TrainingRun, lack_of_memory
from venus.train.parallel import World, shard

MODEL = Path(__file__).parents[1] / "golden" / "tied_tf5"
SETTINGS = {"seed": 1}


@dataclass(frozen=True)
class Config(OptimizerOptions, TrainingOptions):
    """What the scripts' configs have besides the shared flags."""

    model: str = str(MODEL)
    output: str = ""
    lr: float = 1e-3
    beta2: float = 0.95
    save_every: int = 100


@pytest.fixture
def start(tmp_path):
    """A function that starts (or resumes) the run of this test's directory:
    `start(num_steps=.., **flags)`.
    """
    worlds = []

    def begin(num_steps=10, **flags):
        cfg = Config(output=str(tmp_path / "run"), recompute="off", **flags)
        worlds.append(World())
        model = shard(load_model(MODEL), worlds[-1], bf16=False)
        spread = cfg.spread(world_size=1, longest=12, reference=False, bf16=False)
        return TrainingRun(
            cfg,
            model,
            worlds[-1],
            settings=SETTINGS,
            num_steps=num_steps,
            spread=spread,
            console=("loss",),
            extra={"lengths": {}},
        )

    yield begin
    if torch.distributed.is_initialized():
        worlds[-1].close()


def weights_of(run):
    return torch.cat(
        [parameter.full_tensor().flatten().clone() for parameter in run.model.parameters()]
    )


def learn(run, number, *, poison=None):
    """The gradients of step `number`, one of them set to `poison`, and the update."""
    ids = torch.randint(64, (12,), generator=torch.Generator().manual_seed(number)).tolist()
    batch = with_weights([Document(ids, {"mask": [0.0] * 4 + [1.0] * 8})], "token")
    results = backward(
        run.model,
        batch,
        lambda fields: WeightedNLL(fields["weights"]),
        max_tokens=100,
        world=run.world,
    )
    if poison is not None:
        run.model.model.norm.weight.grad.to_local()[0] = poison
    return run.update(results, 1e-3, [f"row {number}", "row 99"])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_changes_nothing_and_is_counted(start, poison):
    run = start()
    learn(run, 0)
    before = weights_of(run)
    moments = [state["exp_avg"].full_tensor().clone() for state in run.optimizer.state.values()]
    _, grad_norm = learn(run, 1, poison=poison)
    assert not grad_norm < float("inf")
    assert (
        torch.equal(weights_of(run), before)
        and run.extra["skipped"] == run.extra["skipped_in_a_row"] == 1
    )
    assert all(
        torch.equal(state["exp_avg"].full_tensor(), moment)
        for state, moment in zip(run.optimizer.state.values(), moments, strict=True)
    )
    assert all(parameter.grad is None for parameter in run.model.parameters())
    learn(run, 2)
    assert not torch.equal(weights_of(run), before)
    assert (run.extra["skipped"], run.extra["skipped_in_a_row"]) == (1, 0)


def test_a_loss_that_is_not_finite_is_enough(start):
    """A finite gradient does not make the loss one to learn from."""
    run = start()
    before = weights_of(run)
    ids = torch.arange(12).tolist()
    batch = with_weights([Document(ids, {"mask": [1.0] * 12})], "token")
    results = backward(
        run.model,
        batch,
        lambda fields: WeightedNLL(fields["weights"]),
        max_tokens=100,
        world=run.world,
    )
    results = [(results[0][0]._replace(loss=torch.tensor(float("inf"))), results[0][1])]
    loss, grad_norm = run.update(results, 1e-3, [])
    assert loss == float("inf") and grad_norm < float("inf") and run.extra["skipped"] == 1
    assert torch.equal(weights_of(run), before)


def test_skipped_updates_in_a_row_end_the_run_in_one_line_with_what_they_held(start, tmp_path):
    """Counted over a resume as well: a run that is restarted whenever it fails must
    come to the same end.
    """
    run = start(max_skipped=3, save_every=1)
    with (
        pytest.raises(
            RunFailed, match="step 3: .* 3 updates in a row .* look at row 3, row 99"
        ) as error,
        run.running(),
    ):
        for step in run.steps("test"):
            learn(run, step, poison=float("nan") if step else None)
    assert "\n" not in str(error.value)
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step_3\n"
    run.world.close()
    again = start(max_skipped=3, save_every=1)
    assert (again.step, again.extra["skipped_in_a_row"]) == (3, 2)
    with pytest.raises(RunFailed, match="step 3"):
        learn(again, 3, poison=float("nan"))


@pytest.mark.parametrize(
    ("poisoned", "code", "line"),
    [
        (
            {1, 2},
            UNTRUSTED,
            "the last 2 updates were not finite and skipped; do not trust the model",
        ),
        ({1}, None, ""),
    ],
)
def test_a_run_that_ends_with_skipped_updates_exports_and_is_not_to_be_trusted(
    start, tmp_path, capsys, poisoned, code, line
):
    run = start(num_steps=3)
    with run.running():
        for step in run.steps("test"):
            learn(run, step, poison=float("nan") if step in poisoned else None)
    assert run.finish() == code
    assert capsys.readouterr().out == (f"{tmp_path / 'run'}: {line}\n" if line else "")
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_a_stop_saves_the_step_it_comes_in_and_the_next_start_goes_on_from_there(start, tmp_path):
    run = start()
    with run.running():
        for step in run.steps("test"):
            learn(run, step)
            if step == 3:
                run.world.request_stop()
    run.extra["lengths"]["q"] = 1.5  # too late to be saved
    assert run.finish() == STOPPED
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step_4\n"
    assert not (tmp_path / "run" / "model").exists()
    again = start()
    assert again.step == 4 and again.extra["lengths"] == {}
    with again.running():
        assert [step for step in again.steps("test") if learn(again, step)] == list(range(4, 10))


def test_a_stop_in_the_middle_of_a_step_saves_the_steps_before(start, tmp_path):
    """As in rollouts: the step is left by `break`, and starts again."""
    run = start()
    with run.running():
        for step in run.steps("test"):
            if step == 2:
                run.world.request_stop()
                break
            learn(run, step)
    assert run.finish() == STOPPED
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step_2\n"


def test_a_stop_before_anything_is_learnt_saves_nothing(start, tmp_path):
    run = start()
    with run.running():
        for _ in run.steps("test"):
            run.world.request_stop()
            break
    assert run.finish() == STOPPED
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_saving_changes_nothing_before_the_first_sound_update_either(start):
    """To read the state of an optimizer that has none, torch makes some, by a step: Adam then
    counts one step too many, for good.
    """
    ends = []
    for save_every in (1, 100):
        run = start(save_every=save_every)
        for number in range(3):
            learn(run, number, poison=float("nan") if number == 0 else None)
            run.step = number + 1
            if save_every == 1:
                run.save()
        ends.append(weights_of(run))
        shutil.rmtree(run.output)
        run.world.close()
    assert torch.equal(*ends)


def test_the_ranks_meet_after_every_step_where_a_missing_one_is_named(start, monkeypatch):
    """The next collective would wait for it a day, in silence: it is one of the host group, whose
    time is that of rollouts.
    """
    run, met = start(num_steps=2), []
    monkeypatch.setattr(run.world, "check_alive", met.append)
    assert list(run.steps("test")) == [0, 1]
    assert met == ["step 0", "step 1"]


def test_a_run_that_fails_does_not_save_what_it_has(start, tmp_path):
    run = start()
    with pytest.raises(ZeroDivisionError), run.running():
        for step in run.steps("test"):
            learn(run, step)
            raise ZeroDivisionError
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_lack_of_gpu_memory_is_one_line_with_the_plan_and_the_flag_to_turn(start):
    run = start()
    with (
        pytest.raises(
            RunFailed,
            match=r"step 0, rank 0: out of GPU memory; the plan has .*iB.* try --recompute on",
        ) as error,
        run.running(),
    ):
        for _ in run.steps("test"):
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 GiB. \nSee documentation"
            )
    assert "\n" not in str(error.value)


def test_the_flags_to_turn_come_to_an_end(start):
    run = start(max_tokens_per_gpu=12)
    spread = Config(recompute="offload", max_tokens_per_gpu=12).spread(
        world_size=1, longest=12, reference=False, bf16=True
    )
    assert "try more GPUs, or shorter sequences" in lack_of_memory(run.model.config, spread)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({"sp": 0}, "sp 0"),
        ({"max_skipped": 0}, "max_skipped 0"),
        ({"dry_run": True, "world_size": 6, "sp": 4}, "sp 4: does not divide"),
    ],
)
def test_values_out_of_range_are_refused(flags, wanted):
    with pytest.raises(ValueError, match=wanted):
        Config(**flags).validate()
