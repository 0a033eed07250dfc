#!/usr/bin/env bash
# Every GPU figure in one go, in two parts of 6 minutes each on one H200.
#   kernels/bench_gpu.sh [OUTPUT_DIR] [PART]     default: kernels/results, both parts; PYTHON=... chooses the interpreter
#   PART kernels: correctness, K1, K2, training attention, the pieces of a 4B-shaped layer
#   PART model:   a 4B-shaped model with random weights: training steps at 8K and 32K tokens, decoding 16 rows at 30K
# Section by section: a section that fails or runs out of time is named, and what came before it stays.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-kernels/results}
part=${2:-all}
python=${PYTHON:-python3}
mkdir -p "$out"
export TRITON_DEFAULT_FP_FUSION=1
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw,temperature.gpu --format=csv | tee "$out/gpu.txt"

section() {
    local name=$1 seconds=$2 start=$SECONDS
    shift 2
    echo "== $name"
    timeout "$seconds" "$@" 2>&1 | tee "$out/$name.txt"
    local status=${PIPESTATUS[0]}
    echo "== $name: exit $status after $((SECONDS - start)) s"
}

bench() { section "$1" "$2" "$python" -W ignore -m kernels.bench "${@:3}" --device cuda --json "$out/$1.json"; }

if [ "$part" != kernels ]; then
    section model 340 "$python" -W ignore -m venus.bench gpu --json "$out/model.json"
fi
[ "$part" != model ] || exit 0

if "$python" -c "import pytest" 2>/dev/null; then
    section correctness 90 "$python" -m pytest -q --noconftest -m gpu tests/kernels/test_on_gpu.py
else
    echo "== correctness: no pytest here; the benchmarks check every result before they time it"
fi
bench k1_8k 70 cross_entropy --cases 8192-151936 --repeats 7
bench k2 60 gt_score --repeats 10
bench attention 30 attention --repeats 10
# Are fused RMSNorm, q/k-norm + RoPE or SwiGLU worth writing? Only where a piece takes >= 5 % of the step (and a kernel would halve it).
section layer 40 "$python" - "$out/layer.json" <<'PY'
import dataclasses, json, sys, time
import torch
import torch.nn.functional as F
from venus.model.attention import Layout, plan_attention
from venus.model.qwen3 import Block, Qwen3Config, apply_rope, rope_cos_sin

cuda = torch.cuda.is_available()
device, dtype, tokens = ("cuda", torch.bfloat16, 8192) if cuda else ("cpu", torch.float32, 256)
config = Qwen3Config(151936, 2560, 9728, 36, 32, 8, 128, 1e-6, 5e6, 262144, True)
if not cuda:
    config = dataclasses.replace(config, hidden_size=256, intermediate_size=960, num_attention_heads=4, num_key_value_heads=1)
torch.manual_seed(0)
block = Block(config, 0).to(device, dtype)
x = torch.randn(1, tokens, config.hidden_size, device=device, dtype=dtype, requires_grad=True)
heads = lambda n: torch.randn(1, tokens, n, config.head_dim, device=device, dtype=dtype, requires_grad=True)
q, k = heads(config.num_attention_heads), heads(config.num_key_value_heads)
gate, up = (torch.randn(1, tokens, config.intermediate_size, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
rope = rope_cos_sin(torch.arange(tokens, device=device)[None], config.head_dim, config.rope_theta, dtype)
layout = plan_attention(Layout.documents([tokens // 2, tokens // 2]), x, config.num_attention_heads // config.num_key_value_heads, "auto")
pieces = {
    "layer": lambda: block(x, rope, layout, None),
    "2 RMSNorm": lambda: (block.input_layernorm(x), block.post_attention_layernorm(x)),
    "q/k-norm + RoPE": lambda: (apply_rope(block.self_attn.q_norm(q), *rope), apply_rope(block.self_attn.k_norm(k), *rope)),
    "SwiGLU": lambda: F.silu(gate) * up,
}


def step(piece):
    outputs = piece()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def milliseconds(piece, rounds=10 if cuda else 3):
    taken = []
    for _ in range(rounds + 2):
        if cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        step(piece)
        if cuda:
            torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - started))
    return sorted(taken[2:])[rounds // 2]


rows = {name: milliseconds(piece) for name, piece in pieces.items()}
for name, value in rows.items():
    print(f"{name:<16} {value:9.3f} ms  {100 * value / rows['layer']:5.1f} % of the layer, forward + backward")
json.dump({"device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__, "tokens": tokens, "ms": rows}, open(sys.argv[1], "w"), indent=1)
PY
bench k1_32k 70 cross_entropy --cases 32768-151936 --repeats 3
nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu --format=csv | tee -a "$out/gpu.txt"
