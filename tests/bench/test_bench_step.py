"""The benchmark of a training step: both sides train on the same tokens, what disagrees is noticed,
and the commands run. No claim about times.
"""

import json
import re
import subprocess
import sys

import pytest
import torch
from chat_samples import tiny_file, tiny_spec

from venus.bench import step as bench_step
from venus.bench.gpu import GpuConfig, gpu
from venus.bench.step import StepConfig, check, random_rows, real_rows, step
from venus.files import write_jsonl
from venus.model.qwen3 import Qwen3Config
from venus.protocol import assistant_text, format_answer
from venus.tokenizer import ChatTokenizer

SMALL = Qwen3Config(600, 32, 48, 2, 4, 2, 8, 1e-6, 1e4, 4096, True, "float32")
TURNS = 5, ((3, 4), (2, 6), (4, 0))  # 5 to 7, 12 to 13 and 20 to 23


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["off", "on"])
def test_both_sides_have_the_same_gradients(monkeypatch, capsys, recompute):
    pytest.importorskip("transformers")
    monkeypatch.setattr(bench_step, "STEP_SHAPE", SMALL)
    step(StepConfig(length=20, repeats=1, recompute=recompute), TURNS)
    out = capsys.readouterr().out
    assert "38 tokens" not in out and "40 tokens, 10 with loss" in out
    error = float(re.search(r"24 gradients, the furthest apart is \S+: (\S+) of its norm", out)[1])
    assert error < 1e-5  # a tenth of what is allowed
    assert re.search(r"^time: \d+\.\d\dx of transformers' \(goal 0.6x: (met|missed)\)$", out, re.M)


@pytest.mark.parametrize(
    ("change", "message"), [(1e-3, "differ by 1.0e-03"), (float("nan"), "differ by inf")]
)
def test_gradients_that_disagree_are_an_error(change, message):
    grads = {"a": torch.ones(4), "b": torch.ones(3)}
    check(grads, {name: grad * (1 + 1e-6) for name, grad in grads.items()}, [1.0, 1.0])
    with pytest.raises(SystemExit, match=message):  # a string: exit code 1
        check({**grads, "b": grads["b"] * (1 + change)}, grads, [1.0, 1.0])
    with pytest.raises(SystemExit, match=r"different tensors: \['b'\]"):
        check({"a": grads["a"]}, grads, [1.0, 1.0])


def test_loss_lies_on_the_turns_of_the_released_row():
    whole, again = random_rows(StepConfig(length=100), *TURNS)
    assert whole.per_token["mask"].nonzero()[:, 0].tolist() == [5, 6, 7, 12, 13, 20, 21, 22, 23]
    assert len(whole.ids) == 24 and whole.ids != again.ids
    assert (
        random_rows(StepConfig(length=13), *TURNS)[0].per_token["mask"].tolist()
        == whole.per_token["mask"][:13].tolist()
    )


def test_rows_of_ones_own_are_cut(tmp_path):
    tokenizer = ChatTokenizer(tiny_file(tmp_path, tiny_spec()))
    answer = assistant_text("done", format_answer("x"))
    row = {
        "question": "q?",
        "gt": "x",
        "messages": [
            {"role": r, "content": c}
            for r, c in (("system", "s"), ("user", "q?"), ("assistant", answer))
        ],
    }
    write_jsonl(tmp_path / "rows.jsonl", [row, row])
    start = len(tokenizer.prompt_ids("s", "q?"))
    documents = real_rows(
        StepConfig(data=str(tmp_path / "rows.jsonl"), tokenizer=str(tmp_path), length=start + 3)
    )
    assert [document.per_token["mask"].tolist() for document in documents] == [
        [0.0] * start + [1.0] * 3
    ] * 2
    write_jsonl(tmp_path / "rows.jsonl", [row])
    with pytest.raises(ValueError, match="1 rows; two are needed"):
        real_rows(StepConfig(data=str(tmp_path / "rows.jsonl"), tokenizer=str(tmp_path)))


@pytest.mark.slow
def test_the_gpu_benchmark_runs_on_a_tiny_shape(tmp_path):
    """The code path that a GPU will take, plans and gaps included; in fp32 on a CPU the sampler
    agrees with the trainer to rounding.
    """
    command = [
        sys.executable,
        "-m",
        "venus.bench",
        "gpu",
        "--shape",
        "tiny",
        "--json",
        str(tmp_path / "gpu.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [(row["part"], row.get("tokens"), row.get("kernel")) for row in rows] == [
        ("train", 64, None),
        ("train", 128, None),
        ("decode", None, "torch"),
    ]
    assert rows[2]["gap_max"] < 1e-4 and rows[0]["planned_bytes"] > 0 and rows[0]["mfu"] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_the_4b_shape_needs_a_gpu():
    with pytest.raises(
        ValueError, match="shape 4b needs a CUDA device; --shape tiny runs anywhere"
    ):
        gpu(GpuConfig())
