"""Numbers that would ruin a training are refused in one line, before anything is read."""

import pytest
from tiny_runs import run_all

RUINOUS = {
    "train_sft.py": {
        "--epochs": ("0", "-1"),
        "--batch-size": ("0",),
        "--lr": ("0", "-1e-5", "2"),
        "--min-lr-ratio": ("-3", "2"),
        "--warmup-ratio": ("-1", "5"),
        "--beta1": ("-0.1", "1"),
        "--beta2": ("-0.1", "1"),
        "--weight-decay": ("-1",),
        "--clip-norm": ("-1", "0"),
        "--seed": ("-1",),
        "--gpu-memory": ("0",),
    },
    "train_igpo.py": {
        "--group-size": ("1",),
        "--lr": ("0",),
        "--warmup-steps": ("-5",),
        "--clip-norm": ("-1", "0"),
        "--clip": ("-1", "0"),
        "--dual-clip": ("0", "1"),
        "--kl-beta": ("-1",),
        "--ig-weight": ("-1",),
        "--ig-std-floor": ("-1",),
        "--format-penalty": ("-1",),
        "--gamma": ("-1", "1.5"),
        "--judge-seconds": ("0",),
        "--rank-minutes": ("-1", "0"),
    },
}
CASES = [
    (script, flag, value)
    for script, flags in RUINOUS.items()
    for flag, values in flags.items()
    for value in (*values, "nan", "1e300")
]


@pytest.fixture(scope="module")
def refusals():
    """{case: what it got}, all of one process: importing torch takes longer than they do."""
    return dict(zip(CASES, run_all(*CASES), strict=True))


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_number_that_ruins_a_training_is_refused_in_one_line(refusals, case):
    result, flag = refusals[case], case[1]
    assert (result["code"], result["out"]) == (2, "")
    assert result["err"].startswith((f"error: {flag} ", f"error: argument {flag}: "))
    assert result["err"].count("\n") == 1
