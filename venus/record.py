"""Record what a run was started with, so that every number can be regenerated: config, versions,
commit, seed, machine.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "triton")
# of field names; the values are neither saved nor printed
SECRET_ENDINGS = ("key", "token", "secret", "password")
MASK = "***"


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
    text = json.dumps(record | extra, indent=2, ensure_ascii=False, allow_nan=False)
    path = Path(directory) / "run.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name("run.json.tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)
    return json.loads(text)


def print_plan(cfg, rows):
    """Print the resolved config and the plan, a list of (name, value), as two aligned
    blocks. For --dry-run.
    """
    for title, pairs in (
        ("config", list(_config_and_secrets(cfg)[0].items())),
        ("plan", list(rows)),
    ):
        print(title)
        for name, value in pairs:
            print(f"  {name:<{max(len(name) for name, _ in pairs)}}  {value}")
