"""Metrics: one JSON line per step, nothing counted twice, nothing that JSON cannot hold."""

import importlib.util
import json

import pytest

from venus.runlog import MetricsLogger


def rows(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def log_steps(directory, steps, **options):
    logger = MetricsLogger(directory, **options)
    for step in steps:
        logger.log(step, {"loss": float(step)})
    logger.close()


def test_a_row_can_be_read_as_soon_as_it_is_logged(tmp_path):
    logger = MetricsLogger(tmp_path / "run")
    logger.log(0, {"loss": 1.5, "by_turn": [0.1, None]})
    assert rows(tmp_path / "run") == [{"step": 0, "loss": 1.5, "by_turn": [0.1, None]}]
    logger.close()


def test_non_finite_numbers_are_null_and_named(tmp_path):
    logger = MetricsLogger(tmp_path)
    logger.log(
        3,
        {
            "loss": float("nan"),
            "kl": 0.0,
            "by_turn": [1.0, float("inf")],
            "phase": {"s": -float("inf")},
        },
    )
    logger.close()
    expected = {"step": 3, "loss": None, "kl": 0.0, "by_turn": [1.0, None], "phase": {"s": None}}
    assert rows(tmp_path) == [expected | {"non_finite": ["loss", "by_turn.1", "phase.s"]}]


def test_resuming_drops_the_rows_that_will_be_logged_again(tmp_path):
    """A run killed at step 5 whose last checkpoint is of step 3 logs 3 and 4 again: without the cut
    both would count twice.
    """
    log_steps(tmp_path, range(5))
    log_steps(tmp_path, range(3, 6), start_step=3)
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4, 5]


def test_starting_over_drops_every_old_row(tmp_path):
    log_steps(tmp_path, range(5))
    log_steps(tmp_path, range(2))
    assert [row["step"] for row in rows(tmp_path)] == [0, 1]


def test_a_torn_last_line_is_dropped_on_resume(tmp_path):
    log_steps(tmp_path, range(2))
    with (tmp_path / "metrics.jsonl").open("a") as handle:
        handle.write('{"step": 2, "lo')
    log_steps(tmp_path, [2], start_step=2)
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2]


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}')
    log_steps(tmp_path, [2], start_step=2)
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("line", ["not json", '{"loss": 1}', "[]", '{"step": null}'])
def test_a_broken_row_before_the_last_names_file_and_line(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{line}\n{{"step": 1}}\n')
    with pytest.raises(ValueError, match="metrics.jsonl:2: not a metrics row"):
        MetricsLogger(tmp_path, start_step=2)


def test_a_rank_that_does_not_log_leaves_no_file_and_no_output(tmp_path, capsys):
    log_steps(tmp_path, range(3), enabled=False, console=("loss",))
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


def test_the_console_line_shows_the_chosen_keys_in_their_order(tmp_path, capsys):
    logger = MetricsLogger(tmp_path, console=("lr", "loss", "absent", "turns"))
    logger.log(7, {"loss": 1.23456, "turns": 12, "lr": 1e-6, "other": 1})
    logger.close()
    assert capsys.readouterr().out == "step 7  lr 1e-06  loss 1.235  turns 12\n"


def test_the_loggers_own_keys_cannot_be_overwritten(tmp_path):
    logger = MetricsLogger(tmp_path)
    with pytest.raises(AssertionError, match="own keys"):
        logger.log(0, {"step": 5})
    logger.close()


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is not None, reason="tensorboard is installed"
)
def test_tensorboard_asked_for_but_missing_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="pip install tensorboard"):
        MetricsLogger(tmp_path, tensorboard=True)


def test_tensorboard_gets_every_scalar(tmp_path):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    logger = MetricsLogger(tmp_path, tensorboard=True)
    logger.log(0, {"loss": 2.0, "by_turn": [1.0]})
    logger.log(1, {"loss": 1.0})
    logger.close()
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 2.0), (1, 1.0)]
