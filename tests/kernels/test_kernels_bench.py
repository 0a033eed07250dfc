"""The benchmark: it checks before it times, it says what is missing, and its tables hold
what the README quotes.
"""

import json
import sys

import pytest
import torch
import torch.nn.functional as F

from kernels import bench


@pytest.fixture
def no_children(monkeypatch):
    """Memory on a CPU costs a process a provider."""
    monkeypatch.setattr(bench, "extra_bytes", lambda *_: None)


def small_case():
    return bench.cross_entropy_case("cpu", num_tokens=64, hidden=8, vocab=50, share=0.25)


@pytest.mark.usefixtures("no_children")
@pytest.mark.parametrize("key", ["gt_score-tiny", "attention-tiny", "cross_entropy-8192-656-24%"])
def test_every_provider_that_runs_on_a_cpu_is_right(key):
    """Gradients and values against fp32 or fp64 oracles that share no code with them, at the
    shapes of the tiny model.
    """
    rows = bench.measure(key, bench.cases("all", "cpu")[key](), "cpu", repeats=1)
    lacking = {row["provider"] for row in rows if row["status"] not in ("ok", bench.ON_CUDA_ONLY)}
    # torch 2.11 has it not
    assert lacking <= (set() if hasattr(F, "linear_cross_entropy") else {"F.linear_cross_entropy"})
    assert all(
        row["total_ms"] > 0 and row["time_to_bound"] > 0 for row in rows if row["status"] == "ok"
    )


@pytest.mark.usefixtures("no_children")
def test_what_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr(
        bench,
        "linear_token_loss",
        lambda h, w, targets, objective: ((h @ w.T).mean() * 0 + 5.0, None, None),
    )
    rows = {row["provider"]: row for row in bench.measure("", small_case(), "cpu", repeats=1)}
    assert rows["one pass"]["status"] == "WRONG"
    assert "total_ms" not in rows["one pass"]
    assert rows["recompute"]["status"] == "ok"


@pytest.mark.usefixtures("no_children")
def test_a_baseline_that_this_torch_lacks_is_absent(monkeypatch, capsys):
    """torch 2.11 has no F.linear_cross_entropy."""
    if hasattr(F, "linear_cross_entropy"):
        monkeypatch.delattr(F, "linear_cross_entropy")
    case = small_case()
    bench.print_table(case, bench.measure("", case, "cpu", repeats=1))
    assert "| F.linear_cross_entropy | absent |" in capsys.readouterr().out


def test_flops_credit_no_recomputation():
    """2 N V D forward and 6 N V D in all, for 16 rows of 64."""
    case = small_case()
    assert case.flops("log-probs, no gradient") == 2 * 16 * 50 * 8
    assert case.flops("recompute") == case.flops("one pass") == 6 * 16 * 50 * 8


@pytest.mark.slow
def test_the_command_measures_memory_in_a_process_of_its_own(tmp_path, monkeypatch):
    """Two tables of the tiny model; the JSON file holds what was printed and what it depends on."""
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "bench",
            "attention",
            "--device",
            "cpu",
            "--json",
            str(tmp_path / "rows.json"),
            "--repeats",
            "1",
        ],
    )
    bench.main()
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written["environment"]["torch"] == torch.__version__
    memory = [row["extra_bytes"] for row in written["rows"] if row["status"] == "ok"]
    assert memory and all(size is None or size > 2**20 for size in memory)
