"""Turn one frozen dataclass per script into flags with help and units, and errors into one line.

A field is declared once: `max_length: int = option(200_000, help="longest row kept",
unit="tokens")` becomes `--max-length`. Types: str, int, float, bool (--flag and --no-flag),
tuple[..., ...] (several values); a scalar may be `| None`: an empty value is None.
"""

import argparse
import dataclasses
import difflib
import math
import sys
import typing

STOPPED = 3  # what main returns when it was asked to stop
EXIT_CODES = (
    "exit codes: 0 done, 2 bad input, 3 stopped by SIGTERM or Ctrl-C with everything saved "
    "(the same command resumes), 130 interrupted by Ctrl-C "
    "where there was nothing to save, 1 anything else"
)


class RunFailed(RuntimeError):
    """What ends a run that was asked for rightly, in one line that says what to do about it."""


def option(default=dataclasses.MISSING, *, help, unit=None, choices=None, unless=None):
    """Declare a config field: keyword-only, required when it has no default; choices
    are the values allowed.

    unless: the name of a flag under which the field, whose default is None, may be absent; without
    that flag it is required.
    """
    return dataclasses.field(
        default=default,
        kw_only=True,
        metadata={"help": help, "unit": unit, "choices": choices, "unless": unless},
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        # argparse would bury the line under its usage dump
        self.exit(2, f"error: {' '.join(message.split())}\n")


def _add_flag(parser, field):
    """Add one field's flag to the parser, in place. The default stays with the dataclass: an
    absent flag sets nothing.
    """
    args, unit, default = typing.get_args(field.type), field.metadata["unit"], field.default
    kind = args[0] if args else field.type
    several = typing.get_origin(field.type) is tuple
    optional = type(None) in args
    assert kind in (str, int, float, bool), f"{field.name}: no flag for the type {field.type}"

    def convert(text):
        value = None if optional and not text else kind(text)
        if isinstance(value, float) and not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not finite")
        return value

    convert.__name__ = kind.__name__  # argparse says "invalid int value: '1.5'"
    unless = field.metadata["unless"]
    state = (
        "required"
        if default is dataclasses.MISSING
        else f"required without --{unless.replace('_', '-')}"
        if unless
        else f"default: {default!r}"
    )
    text = f"{field.metadata['help']}{f' [{unit}]' if unit else ''} ({state})".replace("%", "%%")
    form = {
        "type": convert,
        "nargs": "*" if several else None,
        "choices": field.metadata["choices"],
    }
    form = {"action": argparse.BooleanOptionalAction} if kind is bool else form
    parser.add_argument(
        "--" + field.name.replace("_", "-"),
        dest=field.name,
        default=argparse.SUPPRESS,
        help=text,
        **form,
    )


def parse(config_class, argv=None, *, description):
    """Read argv (default: the command line) into a config; what is wrong with it is one line on
    stderr and exit code 2.
    """
    parser = _Parser(description=description, epilog=EXIT_CODES, allow_abbrev=False)
    parser.add_argument(
        "--traceback", action="store_true", help="show where an error arose instead of one line"
    )
    for field in dataclasses.fields(config_class):
        _add_flag(parser, field)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        close = difflib.get_close_matches(
            unknown[0].split("=")[0], parser._option_string_actions, n=1
        )
        parser.error(
            f"unknown argument {unknown[0]}; "
            + (f"did you mean {close[0]}?" if close else "--help lists the flags")
        )
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(given).items()
        if name != "traceback"
    }
    for field in dataclasses.fields(config_class):
        unless = field.metadata["unless"]
        if values.get(field.name) is None and (
            field.default is dataclasses.MISSING or unless and not values.get(unless)
        ):
            parser.error(f"--{field.name.replace('_', '-')} is required: {field.metadata['help']}")
    try:
        config = config_class(**values)
        if hasattr(config, "validate"):
            config.validate()
    except ValueError as error:
        parser.error(str(error))
    return config


def run(main, config_class, description, argv=None):
    """Parse argv (default: the command line) and call main(config), whose result, when it has
    one, is the exit code.

    ValueError and OSError are one line and exit code 2, RunFailed one line and 1, Ctrl-C is 130.
    """
    config = parse(config_class, argv, description=description)
    try:
        code = main(config)
    except KeyboardInterrupt:
        print("interrupted; run the same command to resume", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, RunFailed) as error:
        if "--traceback" in (sys.argv[1:] if argv is None else argv):
            raise
        print("error:", " ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
        sys.exit(1 if isinstance(error, RunFailed) else 2)
    if code:
        sys.exit(code)
