"""`--help` costs little more than torch: the slow parts are imported where they are used.

Each start is a process of its own.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("train_sft", "train_igpo", "rollout", "eval")
SLOW = (
    *("torch._dynamo", "torch._inductor", "torch.nn.attention.varlen", "sympy", "triton"),
    *("torch.nn.attention.flex_attention", "torch.utils.flop_counter", "torch.utils.tensorboard"),
    *("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint"),
    *("torch.distributed.elastic", "tensorboard", "transformers", "pyarrow", "matplotlib"),
)
# a second start, as users know it: with the bytecode of the first
ENVIRONMENT = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}


def start(*args):
    """Run Python to its end and return what it prints and the CPU seconds it takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *args],
        cwd=ROOT,
        env=ENVIRONMENT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout, seconds


@pytest.fixture(scope="module")
def of_torch():
    """The slow modules that torch, at the version at hand, loads by itself."""
    return loaded("import torch")


def loaded(code):
    printed, _ = start("-c", f"import sys\n{code}\nprint('modules', *sys.modules)")
    return set(SLOW) & set(printed.splitlines()[-1].split())


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_loads_nothing_slow(script, of_torch):
    """flash attention's module brought in torch.compile with all of sympy, and every --help, dry
    run and refused flag took twice as long.
    """
    code = f"""
import contextlib, runpy
sys.argv = ["{script}.py", "--help"]
with contextlib.suppress(SystemExit):
    runpy.run_path("{script}.py", run_name="__main__")
"""
    assert loaded(code) - of_torch == set()


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_costs_little_more_than_torch(script):
    """CPU seconds and not the clock, by turns, and the best of at most three ratios: on a shared
    machine the same start takes up to half as long again, but both of a pair feel that.
    """
    start(f"{script}.py", "--help")  # writes the bytecode
    ratios = (start(f"{script}.py", "--help")[1] / start("-c", "import torch")[1] for _ in range(3))
    assert any(ratio <= 1.25 for ratio in ratios)
