"""Starts the kernel tests that need a process of their own: Triton decides when it is imported
whether it interprets or compiles, once.

One by hand: pytest tests/kernels/interpreted_cross_entropy.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
INTERPRETED = sorted(path.name for path in HERE.glob("interpreted_*.py"))


def run(name, **environment):
    """Run one file of tests; on failure the end of its output is this test's message."""
    # numpy's threads on tiny blocks cost ten times what they save
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        str(HERE / name),
    ]
    done = subprocess.run(
        command,
        env=os.environ | threads | environment,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", INTERPRETED)
def test_the_kernels_are_right_under_the_interpreter(name):
    pytest.importorskip("triton", reason="no Triton for this platform")
    run(name, TRITON_INTERPRET="1")


@pytest.mark.slow
def test_the_kernels_compile_for_real_gpus(pytestconfig):
    """The compiler's cache stays with pytest's own, so that only changed
    kernels are compiled again.
    """
    pytest.importorskip("triton", reason="no Triton for this platform")
    # fusion of a * b + c is set because its default changes between Triton versions
    cache = str(pytestconfig.cache.mkdir("triton"))
    run(
        "ahead_of_time.py",
        TRITON_CACHE_DIR=cache,
        TRITON_DEFAULT_FP_FUSION="1",
        TRITON_INTERPRET="0",
    )
