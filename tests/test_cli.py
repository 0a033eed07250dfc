"""The command line: one dataclass in, flags out, and one line for everything a user
can get wrong.
"""

import subprocess
import sys
from dataclasses import dataclass, fields

import pytest

from venus.cli import option, parse, run


@dataclass(frozen=True)
class ExampleConfig:
    model: str = option(help="model directory")
    # optimiser
    lr: float = option(1e-5, help="peak learning rate, 100% of it")
    max_length: int = option(200_000, help="longest row kept", unit="tokens")
    seed: int = option(0, help="seed of everything")
    date: str | None = option(None, help="date in the system prompt")
    files: tuple[str, ...] = option(("a.jsonl", "b.jsonl"), help="input files")
    loss_norm: str = option("token", help="denominator of the loss", choices=("token", "sequence"))
    shuffle: bool = option(True, help="shuffle every epoch")
    dry_run: bool = option(False, help="print the plan and exit")

    def validate(self):
        if self.lr <= 0:
            raise ValueError(f"lr {self.lr} is not positive;\nuse one above 0")


def example(*argv):
    return parse(ExampleConfig, ["--model", "m", *argv], description="An example.")


def refusal(capsys, *argv, prefix=("--model", "m")):
    """What `argv` gets: the single line on stderr of an exit with code 2."""
    with pytest.raises(SystemExit) as exit_:
        parse(ExampleConfig, [*prefix, *argv], description="An example.")
    streams = capsys.readouterr()
    assert (exit_.value.code, streams.out, streams.err.count("\n")) == (2, "", 1)
    return streams.err


def run_script(tmp_path, body, *argv):
    """Run a script whose config has one flag, --path, and whose main(cfg) is `body`."""
    script = tmp_path / "script.py"
    script.write_text(
        "from dataclasses import dataclass\nfrom venus.cli import option, run\n"
        "@dataclass(frozen=True)\nclass Config:\n    path: str = option('nowhere', help='a file')\n"
        f"def main(cfg):\n    {body}\nrun(main, Config, 'A script.')\n"
    )
    return subprocess.run(
        [sys.executable, str(script), *argv],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": "."},
        timeout=60,
    )


def test_absent_flags_give_the_defaults_of_the_dataclass():
    assert example() == ExampleConfig(model="m")


def test_every_type_is_read_from_its_flag():
    argv = [
        "--lr",
        "3e-4",
        "--max-length",
        "1_000",
        "--seed",
        "-1",
        "--date",
        "2026-01-01",
        "--files",
        "x",
        "y",
    ]
    argv += ["--loss-norm", "sequence", "--no-shuffle", "--dry-run"]
    expected = ExampleConfig(
        model="m",
        lr=3e-4,
        max_length=1000,
        seed=-1,
        date="2026-01-01",
        files=("x", "y"),
        loss_norm="sequence",
        shuffle=False,
        dry_run=True,
    )
    assert example(*argv) == expected


def test_an_empty_value_of_an_optional_field_is_none():
    assert example("--date", "2026-01-01", "--date", "").date is None


def test_an_empty_value_of_a_plain_string_stays_an_empty_string():
    assert parse(ExampleConfig, ["--model", ""], description="").model == ""


def test_no_values_make_an_empty_tuple():
    assert example("--files").files == ()


def test_help_names_every_flag_with_default_and_unit(capsys):
    with pytest.raises(SystemExit) as exit_:
        example("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert exit_.value.code == 0
    assert all("--" + field.name.replace("_", "-") in text for field in fields(ExampleConfig))
    assert "longest row kept [tokens] (default: 200000)" in text
    assert "peak learning rate, 100% of it (default: 1e-05)" in text
    assert "model directory (required)" in text


def test_an_unknown_flag_is_one_line_with_the_closest_flag(capsys):
    assert (
        refusal(capsys, "--max-lenght=5")
        == "error: unknown argument --max-lenght=5; did you mean --max-length?\n"
    )


def test_a_mistyped_required_flag_is_reported_as_unknown_rather_than_missing(capsys):
    assert "unknown argument --modle; did you mean --model?" in refusal(
        capsys, "--modle", "m", prefix=()
    )


def test_an_abbreviated_flag_is_unknown(capsys):
    """argparse accepts any unambiguous prefix by default, so a typo such as --max would
    silently set --max-length.
    """
    assert "unknown argument --max" in refusal(capsys, "--max", "5")


def test_a_stray_word_is_an_error(capsys):
    assert "unknown argument stray" in refusal(capsys, "stray")


def test_a_missing_required_flag_is_named_with_its_help(capsys):
    assert refusal(capsys, prefix=()) == "error: --model is required: model directory\n"


@pytest.mark.parametrize(
    "argv",
    [
        ("--max-length", "1.5"),
        ("--lr", "fast"),
        ("--lr", "nan"),
        ("--lr", "inf"),
        ("--loss-norm", "mean"),
    ],
)
def test_a_bad_value_names_flag_and_value(capsys, argv):
    line = refusal(capsys, *argv)
    assert argv[0] in line and repr(argv[1]) in line


def test_a_bad_choice_names_the_choices(capsys):
    line = refusal(capsys, "--loss-norm", "mean")
    assert "token" in line and "sequence" in line


def test_a_config_that_does_not_validate_is_one_line(capsys):
    assert refusal(capsys, "--lr", "-1") == "error: lr -1.0 is not positive; use one above 0\n"


def test_a_field_type_without_a_flag_is_our_error():
    @dataclass(frozen=True)
    class Bad:
        table: dict = option(None, help="no flag can hold it")

    with pytest.raises(AssertionError, match="table: no flag for the type"):
        parse(Bad, [], description="")


def test_run_hands_the_config_to_main(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "argv", ["script", "--model", "m", "--seed", "7"])
    run(seen.append, ExampleConfig, "An example.")
    assert seen == [ExampleConfig(model="m", seed=7)]


def test_a_missing_file_in_main_is_one_line_and_code_2(tmp_path):
    result = run_script(tmp_path, "open(cfg.path)")
    assert (result.returncode, result.stderr) == (
        2,
        "error: [Errno 2] No such file or directory: 'nowhere'\n",
    )


def test_a_value_error_of_several_lines_is_printed_as_one(tmp_path):
    result = run_script(tmp_path, "raise ValueError('bad row\\n  in line 3')")
    assert (result.returncode, result.stderr) == (2, "error: bad row in line 3\n")


def test_traceback_shows_where_the_error_arose(tmp_path):
    result = run_script(tmp_path, "open(cfg.path)", "--traceback")
    assert (
        result.returncode == 1
        and "Traceback" in result.stderr
        and "open(cfg.path)" in result.stderr
    )


def test_our_own_bugs_keep_their_traceback(tmp_path):
    result = run_script(tmp_path, "assert cfg is None, 'an invariant'")
    assert result.returncode == 1 and "Traceback" in result.stderr


def test_an_interrupt_ends_with_code_130_and_says_how_to_go_on(tmp_path):
    result = run_script(tmp_path, "raise KeyboardInterrupt")
    assert (result.returncode, result.stderr) == (
        130,
        "interrupted; run the same command to resume\n",
    )


@pytest.mark.parametrize(
    ("body", "code", "errors"),
    [
        ("return cli.STOPPED", 3, ""),
        ("raise cli.RunFailed('no\\n memory')", 1, "error: no memory\n"),
        ("return None", 0, ""),
    ],
)
def test_main_returns_its_exit_code_and_a_run_that_failed_is_one_line(tmp_path, body, code, errors):
    result = run_script(tmp_path, f"from venus import cli; {body}")
    assert (result.returncode, result.stderr) == (code, errors)


def test_the_exit_codes_are_documented(capsys):
    with pytest.raises(SystemExit):
        parse(ExampleConfig, ["--help"], description="")
    assert "3 stopped by SIGTERM or Ctrl-C with everything saved" in " ".join(
        capsys.readouterr().out.split()
    )


def test_traceback_in_an_argv_given_by_the_caller_counts():
    with pytest.raises(ValueError, match="broken"):
        run(
            lambda cfg: int("broken"), ExampleConfig, "An example.", ["--model", "m", "--traceback"]
        )


@dataclass(frozen=True)
class Sparing:
    """A required field that a dry run does without."""

    model: str | None = option(None, unless="dry_run", help="where the weights are")
    dry_run: bool = option(False, help="say what would be done")


def test_a_field_may_be_required_unless_a_flag_is_given(capsys):
    assert parse(Sparing, ["--dry-run"], description="").model is None
    assert parse(Sparing, ["--model", "here"], description="").model == "here"
    with pytest.raises(SystemExit) as stopped:
        parse(Sparing, [], description="")
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: --model is required: where the weights are\n"
