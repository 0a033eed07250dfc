"""Turn one frozen dataclass per command into flags, and errors into one line.

A field is declared once, with its help, unit and range:

    max_length: int = option(200_000, help="longest row kept", unit="tokens", least=1)

becomes `--max-length`, a line of --help and a check with its message. Types: str, int, float, bool
(--flag and --no-flag), tuple[..., ...] (several values); a scalar may be `| None`: an empty value
is None. A value comes from, in this order: the flag, the preset, the model's agent.json (run-time
limits and protocol only), the default; `sources` of the config says which.
"""

import argparse
import dataclasses
import difflib
import errno
import inspect
import json
import math
import operator
import sys
import typing
from collections.abc import Mapping
from pathlib import Path

STOPPED = 3  # what main returns when it was asked to stop
UNTRUSTED = 4  # what it returns when it finished and its results are not to be trusted
EXIT_CODES = (
    "exit codes: 0 done, 1 a service or the machine failed, 2 bad input, 3 stopped by SIGTERM or "
    "Ctrl-C with everything saved (the same command resumes), 4 finished but not to be trusted, "
    "130 interrupted by Ctrl-C where there was nothing to save"
)
# an OSError that says nothing against the input
SYSTEM_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
AGENT_FILE = "agent.json"
LARGEST = 2**53  # no option needs more, and beyond it neither fp64 nor int64 can be relied on
# range of a number: how it is said, and what must hold
BOUNDS = {
    "above": ("above", operator.gt),
    "least": ("at least", operator.ge),
    "below": ("below", operator.lt),
    "most": ("at most", operator.le),
}


class RunFailed(RuntimeError):
    """What ends a run that was asked for rightly, in one line that says what to do about it."""

    exit_code = 1


def option(
    default=dataclasses.MISSING,
    *,
    help,
    group=None,
    unit=None,
    choices=None,
    above=None,
    least=None,
    below=None,
    most=None,
    unless=None,
    positional=False,
    agent=False,
):
    """Declare a config field: keyword-only, required when it has no default.

    group: the heading in --help of this field and of those that follow it in its class. choices:
    the values allowed; above, least, below, most: the range of a number. unless: the name of a flag
    under which the field, whose default is None, may be absent; without that flag it is required.
    positional: words without a flag are its value too. agent: the model's agent.json may set it.
    """
    bounds = {"above": above, "least": least, "below": below, "most": most}
    metadata = {"help": help, "group": group, "unit": unit, "choices": choices, "unless": unless}
    metadata |= {"bounds": {name: x for name, x in bounds.items() if x is not None}}
    metadata |= {"positional": positional, "agent": agent}
    return dataclasses.field(default=default, kw_only=True, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Options:
    """Base of a config: its values are checked against their ranges whenever one is made."""

    sources: typing.ClassVar[Mapping[str, str]] = {}  # field -> where its value comes from
    PRESETS: typing.ClassVar[Mapping[str, Mapping]] = {}  # name -> {field: value}, for --preset

    def __post_init__(self):
        """ValueError for a value out of range."""
        for field in _options(type(self)):
            if problem := _problem(field, value := getattr(self, field.name)):
                raise ValueError(f"{field.name} {value}: {problem}")

    def validate(self) -> None:
        """ValueError where fields contradict each other. A class that adds checks calls super's."""

    def replace(self, **changes):
        """Return a copy with other values and the same `sources`."""
        changed = dataclasses.replace(self, **changes)
        object.__setattr__(changed, "sources", self.sources)
        return changed


def _options(config_class):
    return [field for field in dataclasses.fields(config_class) if "help" in field.metadata]


def _flag(field):
    return "--" + field.name.replace("_", "-")


def _kind(field):
    """Return (str, int, float or bool; whether several; whether None is allowed) of a field."""
    args = typing.get_args(field.type)
    kind = args[0] if args else field.type
    assert kind in (str, int, float, bool), f"{field.name}: no flag for the type {field.type}"
    return kind, typing.get_origin(field.type) is tuple, type(None) in args


def _range(field):
    return " and ".join(f"{BOUNDS[name][0]} {x:,}" for name, x in field.metadata["bounds"].items())


def _problem(field, value):
    """Say what is wrong with a value of the right type; None when nothing is."""
    choices = field.metadata["choices"]
    if choices and value is not None and value not in choices:
        return f"must be one of {', '.join(choices)}"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return "must be finite"
    if not all(BOUNDS[name][1](value, x) for name, x in field.metadata["bounds"].items()):
        return f"must be {_range(field)}"
    return None if abs(value) < LARGEST else f"must be below {LARGEST:,}"


def program() -> str:
    """Return how the user started this program: `python train_sft.py`, `python -m venus.clean`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return f"python {Path(sys.argv[0]).name}"
    return f"python -m {spec.name.removesuffix('.__main__')}"


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        # argparse would bury the line under its usage dump
        self.exit(2, f"error: {' '.join(message.split())}\n")


def _groups(config_class):
    """Return {heading: fields}: what is required, then the class's own groups, then its bases'."""
    fields = {field.name: field for field in _options(config_class)}
    groups = {"required": [field for field in fields.values() if _is_required(field)]}
    for owner in config_class.__mro__:
        heading = "options"
        for name in inspect.get_annotations(owner):
            if name in fields:
                field = fields.pop(name)
                heading = field.metadata["group"] or heading
                if not _is_required(field):
                    groups.setdefault(heading, []).append(field)
    return groups


def _is_required(field):
    return field.default is dataclasses.MISSING or field.metadata["unless"] is not None


def _add_flag(group, field):
    """Add one field's flag to the group, in place. The default stays with the dataclass: an absent
    flag sets nothing.
    """
    kind, several, optional = _kind(field)

    def convert(text):
        value = None if optional and not text else kind(text)
        if isinstance(value, float) and not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not finite")
        return value

    convert.__name__ = kind.__name__  # argparse says "invalid int value: '1.5'"
    unless, unit = field.metadata["unless"], field.metadata["unit"]
    if field.default is dataclasses.MISSING:
        state = "required"
    elif unless:
        state = f"required without --{unless.replace('_', '-')}"
    else:
        state = f"default: {'none' if field.default is None else repr(field.default)}"
    state += f"; {_range(field)}" if field.metadata["bounds"] else ""
    state += "; its flag may be left out" if field.metadata["positional"] else ""
    text = f"{field.metadata['help']}{f' [{unit}]' if unit else ''} ({state})".replace("%", "%%")
    form = {"action": argparse.BooleanOptionalAction}
    if kind is not bool:
        choices = field.metadata["choices"]
        form = {"type": convert, "nargs": "*" if several else None, "choices": choices}
        form["metavar"] = {int: "N", float: "X"}.get(kind)
    group.add_argument(_flag(field), dest=field.name, default=argparse.SUPPRESS, help=text, **form)


def _parser(config_class, prog, description):
    groups = _groups(config_class)
    usage = [prog]
    for field in groups["required"]:
        usage += [] if field.metadata["positional"] else [_flag(field)]
        usage.append(field.name.upper())
    parser = _Parser(
        prog=prog,
        usage=" ".join([*usage, "[options]"]),
        description=description,
        epilog=EXIT_CODES,
        allow_abbrev=False,
        add_help=False,
    )
    for heading, fields in groups.items():
        if fields:
            group = parser.add_argument_group(heading)
            for field in fields:
                _add_flag(group, field)
    group = parser.add_argument_group("command line")
    group.add_argument("-h", "--help", action="help", help="show this help and exit")
    if presets := getattr(config_class, "PRESETS", {}):
        text = "values for several options at once; a flag overrides them"
        group.add_argument("--preset", choices=presets, help=text)
    text = "show where an error arose instead of one line"
    group.add_argument("--traceback", action="store_true", help=text)
    return parser


def _take_words(config_class, given, unknown):
    """Give words without a flag to the positional field, in place; return what is left unknown."""
    if flags := [word for word in unknown if word.startswith("-")]:
        return flags
    field = next((field for field in _options(config_class) if field.metadata["positional"]), None)
    if field is None or field.name in given or not unknown:
        return unknown
    if _kind(field)[1]:
        given[field.name] = tuple(unknown)
        return []
    given[field.name] = unknown[0]
    return unknown[1:]


def read_agent_file(config_class, directory) -> dict:
    """Read the model's agent.json, {option: value}: run-time limits and protocol that belong to the
    model. {} where there is none. ValueError for another option, or a value that does not fit.
    """
    path = Path(directory) / AGENT_FILE
    allowed = {f.name: f for f in _options(config_class) if f.metadata["agent"]}
    if not allowed or not path.is_file():
        return {}
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: must be an object of options and values")
    for name, value in values.items():
        if name not in allowed:
            raise ValueError(f"{path}: {name!r} is no run-time limit; use {', '.join(allowed)}")
        kind, several, optional = _kind(allowed[name])
        fits = type(value) is kind or (kind is float and type(value) is int)
        if several or not (fits or optional and value is None):
            raise ValueError(f"{path}: {name} {value!r} must be of type {kind.__name__}")
        if problem := _problem(allowed[name], value):
            raise ValueError(f"{path}: {name} {value!r}: {problem}")
    return values


def parse(config_class, argv=None, *, description, prog=None):
    """Read argv (default: the command line) into a config; what is wrong with it is one line on
    stderr and exit code 2.
    """
    parser = _parser(config_class, prog or program(), description)
    given, unknown = parser.parse_known_args(argv)
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in vars(given).items()}
    preset = given.pop("preset", None)
    del given["traceback"]
    if unknown := _take_words(config_class, given, unknown):
        close = difflib.get_close_matches(
            unknown[0].split("=")[0], parser._option_string_actions, n=1
        )
        hint = f"did you mean {close[0]}?" if close else "--help lists the flags"
        parser.error(f"unknown argument {unknown[0]}; {hint}")
    for field in _options(config_class):
        if field.name in given and (problem := _problem(field, value := given[field.name])):
            parser.error(f"{_flag(field)} {value}: {problem}")
    try:
        layers = {
            "default": {f.name: f.default for f in _options(config_class)},
            AGENT_FILE: read_agent_file(config_class, given["model"]) if given.get("model") else {},
            f"preset {preset}": config_class.PRESETS[preset] if preset else {},
            "flag": given,
        }
        values, sources = {}, {}
        for source, layer in layers.items():
            values |= layer
            sources |= dict.fromkeys(layer, source)
        for field in filter(_is_required, _options(config_class)):
            unless = field.metadata["unless"]
            if values[field.name] in (None, dataclasses.MISSING) and not (
                unless and values[unless]
            ):
                parser.error(f"{_flag(field)} is required: {field.metadata['help']}")
        config = config_class(**values)
        if hasattr(config, "validate"):
            config.validate()
    except (ValueError, OSError) as error:
        parser.error(str(error))
    object.__setattr__(config, "sources", sources)
    return config


def exit_code(error: Exception) -> int:
    """2 for bad input, 1 for what failed around it: an OSError by its errno, others by the
    `exit_code` of their class.
    """
    if isinstance(error, OSError):
        return 1 if error.errno in SYSTEM_ERRORS else 2
    return 1 if isinstance(error, MemoryError) else getattr(error, "exit_code", 2)


def run(main, config_class, description, argv=None, prog=None):
    """Parse argv (default: the command line) and call main(config), whose result, when it has one,
    is the exit code.

    ValueError, OSError, MemoryError and RunFailed are one line and `exit_code`, Ctrl-C is 130.
    """
    config = parse(config_class, argv, description=description, prog=prog)
    try:
        code = main(config)
    except KeyboardInterrupt:
        print("interrupted; run the same command to resume", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, MemoryError, RunFailed) as error:
        if "--traceback" in (sys.argv[1:] if argv is None else argv):
            raise
        print("error:", " ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
        sys.exit(exit_code(error))
    if code:
        sys.exit(code)


def run_command(commands, description, argv=None):
    """Run the command that the first word names: commands is {name: (main, config_class,
    description)}. Without one, or with an unknown one, say which there are.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] in (["-h"], ["--help"]):
        print(f"usage: {program()} COMMAND [options]\n\n{description}\n\ncommands:")
        for name, (_, _, text) in commands.items():
            print(f"  {name:<12}{text}")
        print(f"\n{program()} COMMAND --help lists the options of one")
        return
    if not argv or argv[0] not in commands:
        said = f"no command {argv[0]!r}" if argv else "no command given"
        print(f"error: {said}; choose one of {', '.join(commands)}", file=sys.stderr)
        sys.exit(2)
    run(*commands[argv[0]], argv[1:], prog=f"{program()} {argv[0]}")
