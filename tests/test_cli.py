"""The command line: one dataclass in, flags out, and one line for everything a user
can get wrong.
"""

import errno
import subprocess
import sys
from dataclasses import dataclass, fields

import pytest

from venus.cli import Options, exit_code, option, parse, program, run, run_command


@dataclass(frozen=True)
class ExampleConfig:
    model: str = option(help="model directory")
    lr: float = option(1e-5, group="optimiser", help="peak learning rate, 100% of it")
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


def help_of(config, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(config, ["--help"], description="An example.")
    assert exit_.value.code == 0
    return capsys.readouterr().out


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
    assert "date in the system prompt (default: none)" in text


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
    text = " ".join(help_of(ExampleConfig, capsys).split())
    assert "3 stopped by SIGTERM or Ctrl-C with everything saved" in text
    assert "4 finished but not to be trusted" in text


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


# ---- ranges


@dataclass(frozen=True)
class Ranged(Options):
    lr: float = option(0.1, group="optimiser", help="learning rate", above=0, most=1)
    share: float = option(0.0, help="a share", least=0, below=1)
    steps: int | None = option(None, group="run", help="steps", least=1)
    norm: str = option("token", help="a choice", choices=("token", "sequence"))


def refused(config, capsys, *argv):
    """The one line that a command line ends in, with exit code 2."""
    with pytest.raises(SystemExit) as exit_:
        parse(config, list(argv), description="An example.")
    streams = capsys.readouterr()
    assert (exit_.value.code, streams.out, streams.err.count("\n")) == (2, "", 1)
    return streams.err.removeprefix("error: ").strip()


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("--lr", "-1"), "--lr -1.0: must be above 0 and at most 1"),
        (("--lr", "0"), "--lr 0.0: must be above 0 and at most 1"),
        (("--lr", "1e300"), "--lr 1e+300: must be above 0 and at most 1"),
        (("--share", "1"), "--share 1.0: must be at least 0 and below 1"),
        (("--steps", "0"), "--steps 0: must be at least 1"),
        (("--steps", "9" * 400), f"--steps {'9' * 400}: must be below {2**53:,}"),
    ],
)
def test_a_number_out_of_its_range_is_one_line(capsys, argv, line):
    assert refused(Ranged, capsys, *argv) == line


@pytest.mark.parametrize(
    "argv", [("--lr", "1"), ("--share", "0"), ("--steps", "1"), ("--steps", "")]
)
def test_the_ends_of_a_range_belong_to_it_as_declared(argv):
    parse(Ranged, list(argv), description="")


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"lr": 2.0}, "lr 2.0: must be above 0 and at most 1"),
        ({"lr": float("nan")}, "lr nan: must be finite"),
        ({"norm": "mean"}, "norm mean: must be one of token, sequence"),
    ],
)
def test_options_made_in_code_are_checked_like_flags(values, line):
    """A config is also made by other code: a range that only the parser knows would not hold."""
    with pytest.raises(ValueError, match=line):
        Ranged(**values)


def test_help_names_the_range(capsys):
    text = " ".join(help_of(Ranged, capsys).split())
    assert "learning rate (default: 0.1; above 0 and at most 1)" in text


# ---- groups


@dataclass(frozen=True)
class Base(Options):
    threads: int = option(1, group="run", help="threads")
    data: str = option(help="the data")


@dataclass(frozen=True)
class Derived(Base):
    lr: float = option(0.1, group="optimiser", help="learning rate")
    seed: int = option(0, group="run", help="seed")


def test_help_opens_with_what_is_required_then_goes_by_groups(capsys):
    """The required three stood after fifty others, under one heading."""
    lines = help_of(Derived, capsys).splitlines()
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["required:", "optimiser:", "run:", "command line:"]
    flags = [line.split()[0] for line in lines if line.startswith("  --")]
    assert flags == ["--data", "--lr", "--seed", "--threads", "--traceback"]


def test_usage_names_the_program_and_what_it_needs(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "from dataclasses import dataclass\nfrom venus.cli import Options, option, run\n"
        "@dataclass(frozen=True)\nclass Config(Options):\n"
        "    data: str = option(help='rows')\nrun(print, Config, 'A script.')\n"
    )
    how = {"capture_output": True, "text": True, "env": {"PYTHONPATH": f".:{tmp_path}"}}
    as_file = subprocess.run([sys.executable, str(script), "--help"], **how)
    assert as_file.stdout.startswith("usage: python train.py --data DATA [options]\n")
    as_module = subprocess.run([sys.executable, "-m", "train", "--help"], **how)
    assert as_module.stdout.startswith("usage: python -m train --data DATA [options]\n")


# ---- where a value comes from: flag > preset > agent.json > default


@dataclass(frozen=True)
class Layered(Options):
    PRESETS = {"paper": {"top_p": 0.95, "max_turns": 50}}
    model: str | None = option(None, help="model directory")
    max_turns: int = option(200, help="turns", least=1, agent=True)
    top_p: float = option(1.0, help="nucleus", above=0, most=1)
    lr: float = option(0.1, help="learning rate")


def model_with(tmp_path, text):
    (tmp_path / "agent.json").write_text(text)
    return ("--model", str(tmp_path))


@pytest.mark.parametrize(
    ("argv", "max_turns", "source"),
    [
        ((), 7, "agent.json"),
        (("--preset", "paper"), 50, "preset paper"),
        (("--preset", "paper", "--max-turns", "3"), 3, "flag"),
    ],
)
def test_a_flag_beats_a_preset_beats_the_models_agent_file(tmp_path, argv, max_turns, source):
    config = parse(Layered, [*model_with(tmp_path, '{"max_turns": 7}'), *argv], description="")
    assert (config.max_turns, config.sources["max_turns"]) == (max_turns, source)


def test_without_any_of_them_the_default_holds(tmp_path):
    config = parse(Layered, ["--model", str(tmp_path)], description="")
    assert (config.max_turns, config.sources["max_turns"]) == (200, "default")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"lr": 1.0}', "'lr' is no run-time limit; use max_turns"),
        ('{"max_turns": 0}', "max_turns 0: must be at least 1"),
        ('{"max_turns": "7"}', "max_turns '7' must be of type int"),
        ('{"max_turns": true}', "max_turns True must be of type int"),
        ("[7]", "must be an object of options and values"),
        ("{", "not JSON"),
    ],
)
def test_an_agent_file_holds_run_time_limits_and_nothing_else(tmp_path, capsys, text, said):
    """A model that one downloads must not set how one trains."""
    line = refused(Layered, capsys, *model_with(tmp_path, text))
    assert said in line and str(tmp_path / "agent.json") in line


def test_a_config_without_such_options_reads_no_agent_file(tmp_path):
    @dataclass(frozen=True)
    class Training(Options):
        model: str = option(help="model directory")

    parse(Training, [*model_with(tmp_path, "not JSON")], description="")


def test_sources_survive_replace():
    config = parse(Layered, ["--max-turns", "3"], description="").replace(top_p=0.5)
    assert (config.top_p, config.sources["max_turns"]) == (0.5, "flag")


def test_an_unknown_preset_names_those_there_are(capsys):
    assert "paper" in refused(Layered, capsys, "--preset", "fast")


# ---- words without a flag, and several commands


@dataclass(frozen=True)
class Wordy(Options):
    paths: tuple[str, ...] = option(help="files", positional=True)
    output: str = option("out", help="a file")


@pytest.mark.parametrize(
    "argv",
    [
        ("a", "b", "--output", "o"),
        ("--output", "o", "a", "b"),
        ("--paths", "a", "b", "--output", "o"),
    ],
)
def test_words_without_a_flag_are_the_positional_option(argv):
    assert parse(Wordy, list(argv), description="") == Wordy(paths=("a", "b"), output="o")


def test_usage_shows_the_positional_option_without_its_flag(capsys):
    text = help_of(Wordy, capsys)
    assert text.startswith(f"usage: {program()} PATHS [options]\n")
    assert "files (required; its flag may be left out)" in " ".join(text.split())


def test_a_second_word_for_one_value_is_unknown(capsys):
    @dataclass(frozen=True)
    class One(Options):
        path: str = option(help="a file", positional=True)

    assert parse(One, ["a"], description="").path == "a"
    assert refused(One, capsys, "a", "b").startswith("unknown argument b")


def test_an_unknown_flag_beside_words_is_named(capsys):
    assert refused(Wordy, capsys, "a", "--outptu", "o") == (
        "unknown argument --outptu; did you mean --output?"
    )


COMMANDS = {"count": (lambda cfg: print(cfg.paths), Wordy, "Count words.")}


def test_a_command_is_run_by_its_name(capsys):
    run_command(COMMANDS, "Commands.", ["count", "a"])
    assert capsys.readouterr().out == "('a',)\n"


def test_help_without_a_command_lists_the_commands(capsys):
    run_command(COMMANDS, "Commands.", ["--help"])
    assert "  count       Count words." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"), [([], "no command given"), (["cuont"], "no command 'cuont'")]
)
def test_without_a_known_command_the_known_ones_are_named(capsys, argv, said):
    with pytest.raises(SystemExit) as exit_:
        run_command(COMMANDS, "Commands.", argv)
    line = f"error: {said}; choose one of count\n"
    assert (exit_.value.code, capsys.readouterr().err) == (2, line)


# ---- exit codes


class Refused(ValueError):
    """As a service that refuses a key."""

    exit_code = 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("bad row"), 2),
        (FileNotFoundError(errno.ENOENT, "no such file"), 2),
        (OSError(errno.ENOSPC, "no space left"), 1),
        (MemoryError(), 1),
        (Refused("the key"), 1),
    ],
)
def test_bad_input_is_2_and_a_machine_or_service_that_failed_is_1(error, code):
    assert exit_code(error) == code
