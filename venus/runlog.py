"""What a run leaves behind beside its results: what it was started with (config, versions, commit,
seed, machine), so that every number can be regenerated, and its metrics, one JSON line and one
console line per step, TensorBoard on request.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from venus.cli import Options, option
from venus.files import replacing, write_json

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "triton")
# of field names; the values are neither saved nor printed
SECRET_ENDINGS = ("key", "token", "secret", "password")
MASK = "***"


@dataclass(frozen=True)
class RunOptions(Options):
    """Flags of every script that change no result."""

    threads: int | None = option(
        None,
        group="run",
        help="CPU threads; empty is one per core, which for tiny models on a busy machine is "
        "slower than 1",
        least=1,
    )
    dry_run: bool = option(
        False, help="print the resolved config with its sources and the plan, and exit"
    )
    gpu_memory: float | None = option(
        None, help="for --dry-run: plan for GPUs of this size", unit="GB", above=0, most=10_000
    )

    def set_threads(self) -> None:
        """Give torch the threads asked for."""
        if self.threads:
            import torch

            torch.set_num_threads(self.threads)


def _config_and_secrets(cfg):
    """Return the config as a dict with secrets masked, and the secrets themselves."""
    config = dataclasses.asdict(cfg)
    named = [
        name
        for name, value in config.items()
        if isinstance(value, str) and value and name.rsplit("_", 1)[-1] in SECRET_ENDINGS
    ]
    return config | dict.fromkeys(named, MASK), [config[name] for name in named]


def git_state(directory):
    """Return {commit, dirty} of the checkout whose root is `directory`, None when it is not the
    root of one or git is missing.
    """

    def git(*args):
        return subprocess.run(
            ["git", "-C", str(directory), *args], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        root, commit = git("rev-parse", "--show-toplevel", "HEAD").splitlines()
        # An installed copy may lie below some other project's checkout, whose commit says
        # nothing about this code.
        if Path(root).resolve() != Path(directory).resolve():
            return None
        return {"commit": commit, "dirty": git("status", "--porcelain") != ""}
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None


def _cpu_model():
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment():
    """Return what any measurement depends on: versions (None: not installed), git ({commit, dirty}
    or None), platform (system, cpu, cores).
    """
    return {
        "versions": {"python": platform.python_version()}
        | {package: _version(package) for package in PACKAGES},
        "git": git_state(Path(__file__).resolve().parents[1]),
        "platform": {"system": platform.platform(), "cpu": _cpu_model(), "cores": os.cpu_count()},
    }


def machine():
    """Return the environment as one line, to stand beside a measurement."""
    env = environment()
    versions = ", ".join(
        f"{name} {version}" for name, version in env["versions"].items() if version
    )
    commit = (
        f"commit {env['git']['commit'][:12]}{' with changes' * env['git']['dirty']}"
        if env["git"]
        else "no commit"
    )
    return f"{env['platform']['cpu']}, {env['platform']['cores']} cores; {versions}; {commit}"


def save_run(cfg, directory, **extra):
    """Write directory/run.json atomically and return what it holds.

    Keys: config (resolved, secrets masked), versions (None: not installed), git ({commit, dirty} or
    None), seed (None when the config has none), argv, platform (system, cpu, cores), and the extra
    ones given, such as device or world_size. ValueError for NaN.
    """
    config, secrets = _config_and_secrets(cfg)
    argv = list(sys.argv)
    for secret in secrets:
        argv = [word.replace(secret, MASK) for word in argv]
    record = {"config": config, **environment(), "seed": config.get("seed"), "argv": argv}
    assert not record.keys() & extra.keys(), (
        f"extra keys {sorted(record.keys() & extra.keys())} are the record's own"
    )
    path = Path(directory) / "run.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record | extra)
    return json.loads(path.read_bytes())


def print_plan(cfg, rows):
    """Print the resolved config, each value with its source, and the plan, a list of (name, value),
    as two aligned blocks. For --dry-run.
    """
    sources = getattr(cfg, "sources", {})
    config = [
        (name, f"{value}  ({sources[name]})" if name in sources else value)
        for name, value in _config_and_secrets(cfg)[0].items()
    ]
    for title, pairs in (("config", config), ("plan", list(rows))):
        print(title)
        for name, value in pairs:
            print(f"  {name:<{max(len(name) for name, _ in pairs)}}  {value}")


# ---- metrics


def _without_non_finite(value, key, found):
    """Return value with NaN and infinities, which JSON lacks, as None; append their dotted keys
    to `found`, in place.
    """
    if isinstance(value, dict):
        return {
            name: _without_non_finite(item, f"{key}.{name}", found) for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            _without_non_finite(item, f"{key}.{index}", found) for index, item in enumerate(value)
        ]
    if isinstance(value, float) and not math.isfinite(value):
        found.append(key)
        return None
    return value


def _drop_rows_from(path, start_step):
    """Keep the rows before start_step, atomically: the steps to come would count twice. A
    torn last line goes too.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    kept = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            if json.loads(line)["step"] < start_step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            if number <= text.count("\n"):  # only the last line can be torn
                raise ValueError(
                    f"{path}:{number}: not a metrics row; mend or move the file"
                ) from None
    if "".join(kept) != text:
        with replacing(path) as temporary:
            temporary.write_text("".join(kept), encoding="utf-8")


class MetricsLogger:
    """Append one row per step to directory/name; enabled=False (every rank but 0)
    writes and prints nothing.

    start_step: the first step this process runs; rows of it and later ones, left by an interrupted
    run, are dropped (0: all). console: the keys printed, by `write` (tqdm.write keeps a progress
    bar whole). tensorboard: also write event files; ValueError when the package is missing.
    """

    def __init__(
        self,
        directory,
        name="metrics.jsonl",
        *,
        enabled=True,
        start_step=0,
        console=(),
        tensorboard=False,
        write=print,
    ):
        self.console, self.write, self.file, self.tensorboard = tuple(console), write, None, None
        if tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise ValueError("tensorboard is asked for and not installed: pip install tensorboard")
        if not enabled:
            return
        path = Path(directory) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_rows_from(path, start_step)
        self.file = path.open("a", encoding="utf-8")
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and seldom wanted

            self.tensorboard = SummaryWriter(str(directory), purge_step=start_step)

    def log(self, step, values, *, show=True):
        """Write {step, **values} and, with `show`, print the console's keys. A NaN or infinity is
        null, its key listed under non_finite.
        """
        assert not values.keys() & {"step", "non_finite"}, (
            "step and non_finite are the logger's own keys"
        )
        if self.file is None:
            return
        found = []
        row = {"step": step} | {
            key: _without_non_finite(value, key, found) for key, value in values.items()
        }
        self.file.write(
            json.dumps(row | ({"non_finite": found} if found else {}), allow_nan=False) + "\n"
        )
        self.file.flush()
        shown = {key: values[key] for key in self.console if key in values}
        cells = [
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in shown.items()
        ]
        if show:
            self.write("  ".join([f"step {step}", *cells]))
        if self.tensorboard is not None:
            for key, value in values.items():
                if isinstance(value, int | float):
                    self.tensorboard.add_scalar(key, value, step)

    def close(self):
        """Close the files."""
        for writer in filter(None, (self.file, self.tensorboard)):
            writer.close()
