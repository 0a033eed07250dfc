"""What a run was started with is saved whole, atomically and without secrets."""

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest

from venus.cli import option
from venus.runlog import git_state, print_plan, save_run


@dataclass(frozen=True)
class ExampleConfig:
    lr: float = option(1e-5, help="learning rate")
    seed: int = option(3, help="seed")
    files: tuple[str, ...] = option(("a", "b"), help="files")
    max_tokens: int = option(8, help="budget", unit="tokens")
    judge_api_key: str | None = option(None, help="key of the judge")


def git(directory, *args):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    return subprocess.run(
        ["git", "-C", str(directory), *identity, *args], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_the_saved_record_is_the_returned_one(tmp_path):
    record = save_run(ExampleConfig(), tmp_path / "new" / "run", world_size=2)
    assert json.loads((tmp_path / "new" / "run" / "run.json").read_text()) == record


def test_the_record_holds_config_seed_versions_argv_machine_and_extras(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--seed", "3"])
    record = save_run(ExampleConfig(), tmp_path, world_size=2)
    assert record["config"] == {
        "lr": 1e-5,
        "seed": 3,
        "files": ["a", "b"],
        "max_tokens": 8,
        "judge_api_key": None,
    }
    assert (record["seed"], record["argv"], record["world_size"]) == (
        3,
        ["train.py", "--seed", "3"],
        2,
    )
    assert record["versions"]["python"] == "{}.{}.{}".format(*sys.version_info)
    assert (
        record["versions"]["torch"]
        and record["platform"]["cores"] >= 1
        and record["platform"]["cpu"]
    )


def test_secrets_reach_neither_the_file_nor_the_screen(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["eval.py", "--judge-api-key=s3cr3t"])
    config = ExampleConfig(judge_api_key="s3cr3t")
    save_run(config, tmp_path)
    print_plan(config, [])
    assert "s3cr3t" not in (tmp_path / "run.json").read_text() + capsys.readouterr().out


def test_a_run_that_cannot_be_saved_leaves_the_old_record_whole(tmp_path):
    before = save_run(ExampleConfig(), tmp_path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_run(ExampleConfig(), tmp_path, loss=float("nan"))
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert json.loads((tmp_path / "run.json").read_text()) == before


def test_a_clean_checkout_gives_its_commit(checkout):
    assert git_state(checkout) == {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": False}


@pytest.mark.parametrize("name", ["file", "untracked"])
def test_a_changed_or_a_new_file_makes_the_checkout_dirty(checkout, name):
    (checkout / name).write_text("2")
    assert git_state(checkout)["dirty"] is True


def test_a_directory_below_another_projects_checkout_has_no_commit(checkout):
    """A copy installed in a virtual environment inside some repository would otherwise record that
    repository's commit.
    """
    (checkout / "sub").mkdir()
    assert git_state(checkout / "sub") is None


def test_outside_git_and_before_the_first_commit_there_is_no_commit(tmp_path):
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None


def test_the_plan_lists_config_and_rows_in_aligned_columns(capsys):
    print_plan(ExampleConfig(), [("parameters", "4.0 B"), ("steps", 12)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "config" and "  lr             1e-05" in lines
    assert lines[-3:] == ["plan", "  parameters  4.0 B", "  steps       12"]
