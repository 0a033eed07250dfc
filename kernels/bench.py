"""Time the kernels against what else there is, check every result first, and print
where time and memory go.

    python -m kernels.bench cross_entropy|gt_score|attention|all [--device cpu|cuda] [--json FILE]
    [--repeats R] [--cases WORD]

Wall clock between synchronisations, the providers of a table interleaved round by round, median [20
%, 80 %]. Flops are those of the mathematics (2 N V D forward, 6 N V D both; recomputation earns
nothing). Memory is the peak above the inputs: of the allocator on CUDA, of a process of its own on
a CPU. What this installation lacks prints `absent`; what is wrong is not timed. "selected"
providers get the rows with loss only, as ours do. Shapes as in cross_entropy.py and gt_score.py.
"""

import argparse
import functools
import importlib.util
import inspect
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cross_entropy import linear_log_probs, linear_token_loss
from kernels.gt_score import branch_attention, branch_attention_ref, plan_rows, visibility
from kernels.language import triton

# one bf16 product on an H100 or H200, as others measured it; the data sheet says 989
PEAK_TFLOPS = 790
ON_CUDA_ONLY = "cuda only"


class Case(NamedTuple):
    """One table. providers: name -> function of no arguments, or why there is none; check(name,
    result, grads) -> errors by name.
    """

    title: str
    inputs: list[Tensor]
    providers: dict[str, Callable[[], Tensor] | str]
    flops: Callable[[str], float]
    check: Callable[[str, Tensor, tuple], dict[str, float]]
    tolerance: float
    bound: str  # the providers whose time, and whose time and memory, the others are divided by
    baseline: str


# ---- linear cross-entropy


def cross_entropy_case(
    device: str, *, num_tokens: int, hidden: int, vocab: int, share: float
) -> Case:
    """The mean -log p over a random `share` of the rows, with the gradients of rows and head."""
    h, w, targets, rows = _loss_inputs(device, num_tokens, hidden, vocab, share)
    # how the others are told which rows count
    ignored = torch.full_like(targets, -100).index_copy_(0, rows, targets[rows])
    count, chunk = len(rows), 128 if device == "cpu" else 4096

    def objective(log_probs, part):
        return -log_probs / count, torch.full_like(log_probs, -1 / count)

    def naive(x, t):
        return F.cross_entropy((x @ w.T).float(), t)

    def ours():
        return -linear_log_probs(h[rows], w, targets[rows])[0].mean()

    def flops(name):
        return (2.0 if "no gradient" in name else 6.0) * count * vocab * hidden

    providers = {
        "one pass": lambda: linear_token_loss(h[rows], w, targets[rows], objective)[0],
        "recompute": ours,
        "log-probs, no gradient": torch.no_grad()(ours),
        "naive, all rows": lambda: naive(h, ignored),
        "naive, selected": lambda: naive(h[rows], targets[rows]),
        "torch.compile, selected": ON_CUDA_ONLY,
        **_other_cross_entropies(device, h, w, ignored, rows, chunk),
        "bare products": lambda: _bare_products(h[rows], w, chunk),
    }
    if device == "cuda":
        compiled = torch.compile(naive)
        providers["torch.compile, selected"] = lambda: compiled(h[rows], targets[rows])
    exact = functools.cache(lambda: _exact_loss(h, w, targets, rows))

    def check(name, loss, grads):
        if name == "bare products":
            return {}
        total, want = exact()
        pairs = zip(("dX", "dW"), grads, want, strict=False)  # without gradients there are none
        return {"loss": abs(loss.item() - total)} | {
            key: ((got.float() - true).norm() / true.norm()).item() for key, got, true in pairs
        }

    title = f"cross_entropy N {num_tokens:,} D {hidden:,} V {vocab:,} {str(h.dtype)[6:]}, loss on "
    title += f"{share:.0%} of the rows"
    names = "bare products", "naive, all rows"
    return Case(title, [h, w], providers, flops, check, 3e-2 if h.is_cuda else 1e-3, *names)


def _loss_inputs(device, num_tokens, hidden, vocab, share) -> tuple[Tensor, ...]:
    """Hidden rows, head and targets, the same every time, and the rows that carry loss."""
    how = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    h = torch.randn(num_tokens, hidden, **how).to(_dtype(device)).requires_grad_()
    w = torch.randn(vocab, hidden, **how).mul_(hidden**-0.5).to(h.dtype).requires_grad_()
    targets = torch.randint(vocab, (num_tokens,), **how)
    rows = torch.randperm(num_tokens, **how)[: round(share * num_tokens)].sort().values
    return h, w, targets, rows


@torch.no_grad()
def _bare_products(x, w, chunk) -> Tensor:
    """What every exact form must do at least, a chunk of logits in a buffer that is made once."""
    z = x.new_empty(min(chunk, len(x)), len(w))
    grad_x, grad_w = torch.empty_like(x), torch.zeros_like(w)
    for part, grad_part in zip(x.split(chunk), grad_x.split(chunk), strict=True):
        logits = torch.mm(part, w.T, out=z[: len(part)])
        torch.mm(logits, w, out=grad_part)
        grad_w.addmm_(logits.T, part)
    return grad_w


def _exact_loss(h, w, targets, rows) -> tuple[float, tuple[Tensor, Tensor]]:
    """Loss and gradients in fp32, full logits of a few rows at a time."""
    x, y = (tensor.detach().float().requires_grad_() for tensor in (h, w))
    total = 0.0
    for part in rows.split(512):
        loss = F.cross_entropy(x[part] @ y.T, targets[part], reduction="sum") / len(rows)
        loss.backward()
        total += loss.item()
    return total, (x.grad, y.grad)


def _other_cross_entropies(device, h, w, ignored, rows, chunk) -> dict:
    found = {}
    if hasattr(F, "linear_cross_entropy"):
        settings = {f"chunk {chunk}": {"batch_chunk_size": chunk, "chunking_method": None}}
        if device == "cuda":  # on a CPU the default goes by two rows at a time: more than 200 s
            settings["default"] = {}
        for name, how in settings.items():
            options = torch.nn.LinearCrossEntropyOptions(**how)
            found[f"F.linear_cross_entropy {name}, selected"] = lambda options=options: (
                F.linear_cross_entropy(h[rows], w, ignored[rows], options=options)
            )
    else:
        found["F.linear_cross_entropy"] = "absent"
    for name, package in (("Liger", "liger_kernel"), ("CCE", "cut_cross_entropy")):
        if device == "cpu":
            found[name] = ON_CUDA_ONLY
        elif importlib.util.find_spec(package) is None:
            found[name] = "absent"
    if "Liger" not in found:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss as Liger

        for name, how in (("Liger", {}), ("Liger fp32 dW", {"accum_dtype": torch.float32})):
            loss = Liger(**how)
            found[f"{name}, all rows"] = functools.partial(loss, w, h, ignored)
            found[f"{name}, selected"] = lambda loss=loss: loss(w, h[rows], ignored[rows])
    if "CCE" not in found:
        from cut_cross_entropy import linear_cross_entropy

        for impl in ("cce", "cce_exact"):
            loss = functools.partial(linear_cross_entropy, impl=impl)
            found[f"CCE {impl}, all rows"] = functools.partial(loss, h, w, ignored)
            found[f"CCE {impl}, selected"] = lambda loss=loss: loss(h[rows], w, ignored[rows])
    return found


# ---- attention


def gt_score_case(
    device: str, *, trunk: int, cuts: int, length: int, heads: int, kv_heads: int, head_dim: int
) -> Case:
    """Attention of one trajectory with evenly spaced cuts. Every provider returns the branches'
    rows; "trunk only" is the cost of no branch at all.
    """
    ends = [trunk * (i + 1) // cuts for i in range(cuts)]
    starts = range(trunk, trunk + cuts * length, length)
    spans = [(start, start + length, 0, cut) for start, cut in zip(starts, ends, strict=True)]
    q, k, v = _qkv(device, spans[-1][1], heads, kv_heads, head_dim)

    def flops(name):
        branches = 0 if name.startswith("trunk only") else sum(ends) * length + cuts * length**2 / 2
        return 4 * (trunk**2 / 2 + branches) * heads * head_dim

    @functools.cache
    def exact():
        return torch.cat([_one_row(q, k, v, span, span[1] - 1) for span in spans])

    def check(name, out, _):
        if name.startswith("trunk only"):
            return {}
        return {"out": (out[length - 1 :: length].double() - exact()).abs().max().item()}

    providers = _branch_providers(q, k, v, trunk, spans)
    title = (
        f"gt_score trunk {trunk:,} T {cuts} L {length} heads {heads}/{kv_heads} x {head_dim} "
        f"{str(q.dtype)[6:]}"
    )
    names = "trunk only, SDPA", "T separate forwards"
    return Case(title, [], providers, flops, check, 3e-2 if q.is_cuda else 1e-5, *names)


def _branch_providers(q, k, v, trunk, branches) -> dict:
    """The forms of attention of a trunk and of branches of one length, given as their spans."""
    ends, length = [cut for _, _, _, cut in branches], branches[0][1] - branches[0][0]
    spans = [(0, trunk, 0, 0), *branches]

    def trunk_only():
        return _sdpa(q[:trunk], k[:trunk], v[:trunk], is_causal=True)

    def separate():
        parts = []
        for start, end, _, cut in branches:
            alone = (torch.cat([x[:cut], x[start:end]]) for x in (q, k, v))
            parts.append(_sdpa(*alone, is_causal=True)[cut:])
        return torch.cat(parts)

    def span_by_span():
        parts = [trunk_only()]
        for start, end, _, cut in branches:
            mask = torch.ones(length, cut + length, dtype=torch.bool, device=q.device).tril(cut)
            seen = (torch.cat([x[:cut], x[start:end]]) for x in (k, v))
            parts.append(_sdpa(q[start:end], *seen, attn_mask=mask))
        return torch.cat(parts[1:])

    providers = {
        "branch kernel": ON_CUDA_ONLY,
        "SDPA, span by span": span_by_span,
        "T separate forwards": separate,
        "FlexAttention": _flex(q, k, v, spans, trunk),
        "varlen, two calls + merge": ON_CUDA_ONLY,
        "trunk only, branch kernel": ON_CUDA_ONLY,
        "trunk only, SDPA": trunk_only,
    }
    if q.is_cuda:
        groups, alone = q.shape[1] // k.shape[1], [x[:trunk] for x in (q, k, v)]
        plan, trunk_plan = (plan_rows(part, groups, q.device) for part in (spans, spans[:1]))
        providers |= {
            "branch kernel": lambda: branch_attention(q, k, v, plan)[0][trunk:],
            "varlen, two calls + merge": lambda: _varlen_merge(q, k, v, trunk, ends, length),
            "trunk only, branch kernel": lambda: branch_attention(*alone, trunk_plan)[0],
        }
    return providers


def attention_case(
    device: str, *, lengths: list[int], heads: int, kv_heads: int, head_dim: int
) -> Case:
    """Training attention: packed causal documents, forward and backward; the branch kernel, without
    gradient, beside them.
    """
    q, k, v = (x.requires_grad_() for x in _qkv(device, sum(lengths), heads, kv_heads, head_dim))
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    spans = [(start, end, start, start) for start, end in zip(starts, starts[1:], strict=False)]

    def per_document():
        documents = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        return torch.cat([_sdpa(*document, is_causal=True) for document in documents])

    providers = {
        "SDPA, document by document": per_document,
        "varlen": ON_CUDA_ONLY,
        "branch kernel, no gradient": ON_CUDA_ONLY,
    }
    if device == "cuda":
        plan = plan_rows(spans, heads // kv_heads, q.device)
        at = torch.tensor(starts, dtype=torch.int32, device=device)
        places = (at, at, max(lengths), max(lengths))
        providers["varlen"] = lambda: _varlen(q, k, v, *places, window_size=(-1, 0))
        providers["branch kernel, no gradient"] = torch.no_grad()(
            lambda: branch_attention(q, k, v, plan)[0]
        )

    def check(_name, out, _grads):
        want = torch.cat([_one_row(q, k, v, span, span[1] - 1) for span in spans])
        return {"out": (out[[end - 1 for end in starts[1:]]].double() - want).abs().max().item()}

    def flops(name):
        forward = 4 * sum(n * n / 2 for n in lengths) * heads * head_dim
        return forward if "no gradient" in name else 3.5 * forward

    title = (
        f"attention documents {lengths} heads {heads}/{kv_heads} x {head_dim} {str(q.dtype)[6:]}"
    )
    names = ["SDPA, document by document"] * 2
    return Case(title, [q, k, v], providers, flops, check, 3e-2 if q.is_cuda else 1e-5, *names)


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def _qkv(device, tokens, heads, kv_heads, head_dim):
    how = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    return [
        torch.randn(tokens, n, head_dim, **how).to(_dtype(device))
        for n in (heads, kv_heads, kv_heads)
    ]


def _sdpa(q_NHE, k_MKE, v_MKE, **how):
    return F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q_NHE, k_MKE, v_MKE)), enable_gqa=True, **how
    )[0].transpose(0, 1)


def _one_row(q, k, v, span, row):
    """The output of one row in fp64."""
    keys = [*range(span[2], span[3]), *range(span[0], row + 1)]
    alone = [(0, len(keys), 0, 0)]
    parts = (x.detach().double() for x in (q[row : row + 1], k[keys], v[keys]))
    return branch_attention_ref(*parts, alone, len(keys) - 1)[0]


def _flex(q, k, v, spans, trunk):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    doc, pre, own = (torch.tensor(values, device=q.device) for values in visibility(spans))

    def seen(_batch, _head, i, j):
        return ((j >= doc[i]) & (j < pre[i])) | ((j >= own[i]) & (j <= i))

    mask = create_block_mask(seen, None, None, len(q), len(q), device=q.device)
    attention = torch.compile(flex_attention) if q.is_cuda else flex_attention
    batched = [x.transpose(0, 1)[None] for x in (q, k, v)]
    return lambda: attention(*batched, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)[trunk:]


def _varlen(*args, **how):
    from torch.nn.attention.varlen import varlen_attn

    grouped = (
        {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    )
    return varlen_attn(*args, **how, **grouped)


def _varlen_merge(q, k, v, trunk, ends, length):
    """Flash attention of the trunk; of every branch to its prefix (copied: varlen cannot share
    keys) and to itself; merged by their log-sum-exp.
    """
    from torch.nn.attention.varlen import AuxRequest

    def starts(sizes):
        ends = torch.tensor(sizes).cumsum(0).tolist()
        return torch.tensor([0, *ends], dtype=torch.int32, device=q.device)

    whole, own, aux = starts([trunk]), starts([length] * len(ends)), AuxRequest(lse=True)
    _varlen(q[:trunk], k[:trunk], v[:trunk], whole, whole, trunk, trunk, window_size=(-1, 0))
    branch = [x[trunk:] for x in (q, k, v)]
    prefixes = [torch.cat([x[:end] for end in ends]) for x in (k, v)]
    out_1, lse_1 = _varlen(
        branch[0], *prefixes, own, starts(ends), length, max(ends), return_aux=aux
    )
    out_2, lse_2 = _varlen(*branch, own, own, length, length, window_size=(-1, 0), return_aux=aux)
    # [N, H], and [H, N] in older versions
    lse_1, lse_2 = (lse if lse.shape[0] == len(branch[0]) else lse.T for lse in (lse_1, lse_2))
    share = torch.sigmoid(lse_1 - lse_2)[..., None].to(q.dtype)
    return share * out_1 + (1 - share) * out_2


# ---- measuring


def cases(op: str, device: str) -> dict[str, Callable[[], Case]]:
    """The tables of an operation by name: the shapes of the 4B model and of the tiny one. On a CPU
    the large head has 256 columns, not 2,560.
    """
    heads = dict(heads=32, kv_heads=8, head_dim=128)
    tiny = dict(heads=4, kv_heads=2, head_dim=32)
    losses, trunks, documents = [(2048, 256, 151_936)], [], []
    if device == "cuda":
        losses = [(8192, 2560, 151_936), (32768, 2560, 151_936)]
        trunks, documents = [(8192, 10), (32768, 40)], [[16384, 12288, 4096]]
    shapes = {}
    for (n, d, v), share in itertools.product([*losses, (8192, 128, 656)], (0.24, 1.0)):
        shape = dict(num_tokens=n, hidden=d, vocab=v, share=share)
        shapes[f"cross_entropy-{n}-{v}-{share:.0%}"] = cross_entropy_case, shape
    for trunk, cuts in trunks:
        shape = dict(trunk=trunk, cuts=cuts, length=32, **heads)
        shapes[f"gt_score-{trunk}-{cuts}"] = gt_score_case, shape
    shapes["gt_score-tiny"] = gt_score_case, dict(trunk=2048, cuts=12, length=24, **tiny)
    for lengths in documents:
        shapes[f"attention-{sum(lengths)}"] = attention_case, dict(lengths=lengths, **heads)
    shapes["attention-tiny"] = attention_case, dict(lengths=[1024, 700, 324], **tiny)
    return {
        name: functools.partial(make, device, **shape)
        for name, (make, shape) in shapes.items()
        if op in ("all", name.partition("-")[0])
    }


def run_once(case: Case, name: str, device: str) -> tuple[Tensor, tuple, float, float]:
    """Result, gradients, and seconds of the forward and of the backward pass."""
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    synchronize()
    started = time.perf_counter()
    result = case.providers[name]()
    synchronize()
    between = time.perf_counter()
    grads = ()
    if result.requires_grad:
        grads = torch.autograd.grad(result, case.inputs, torch.ones_like(result))
    synchronize()
    return result.detach(), grads, between - started, time.perf_counter() - between


def extra_bytes(key: str, case: Case, name: str, device: str) -> int | None:
    """Peak memory of one forward and backward above the inputs. None where the
    system does not tell.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_once(case, name, device)
        return torch.cuda.max_memory_allocated() - before
    words = f"-m kernels.bench all --device {device} --child".split()
    command, root = [sys.executable, *words, key, name], Path(__file__).parents[1]
    printed = subprocess.check_output(command, text=True, cwd=root).split()[-1]
    return None if printed == "None" else int(printed)


def child(key: str, name: str, device: str) -> None:
    """In a process of its own: print how far the resident memory rises over that of the inputs."""
    case, status = cases("all", device)[key](), Path("/proc/self/status")
    # the library's own buffers are no part of any provider
    torch.randn(64, 64) @ torch.randn(64, 64)
    resident = lambda word: 1024 * int(status.read_text().split(word)[1].split()[0])  # noqa: E731
    before = resident("VmRSS:") if status.exists() else None
    run_once(case, name, device)
    print(None if before is None else max(0, resident("VmHWM:") - before))


def measure(key: str, case: Case, device: str, repeats: int) -> list[dict]:
    """Check every provider, then time those that are right, round by round."""
    rows = []
    for name, provider in case.providers.items():
        row = {"case": case.title, "provider": name, "status": provider}
        rows.append(row)
        if callable(provider):
            result, grads, *_ = run_once(case, name, device)
            errors = case.check(name, result, grads)
            is_right = all(error <= case.tolerance for error in errors.values())
            row |= {"status": "ok" if is_right else "WRONG", "errors": errors}
    runnable = {row["provider"]: row for row in rows if row["status"] == "ok"}
    rounds = [[run_once(case, name, device)[2:] for name in runnable] for _ in range(repeats)]
    taken_RP2 = torch.tensor(rounds, dtype=torch.float64) * 1e3
    shares = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    for (name, row), taken_R2 in zip(runnable.items(), taken_RP2.unbind(1), strict=True):
        figures = [*taken_R2.median(0).values, *taken_R2.sum(1).quantile(shares)]
        keys = ("forward_ms", "backward_ms", "p20_ms", "total_ms", "p80_ms")
        row |= zip(keys, map(float, figures), strict=True)
        row["tflops"] = case.flops(name) / row["total_ms"] / 1e9
        row["extra_bytes"] = extra_bytes(key, case, name, device)
    bound, baseline = (runnable.get(name, {}) for name in (case.bound, case.baseline))
    for row in runnable.values():
        row["time_to_bound"] = _ratio(row, bound, "total_ms")
        row["time_to_baseline"] = _ratio(row, baseline, "total_ms")
        row["memory_to_baseline"] = _ratio(row, baseline, "extra_bytes")
    return rows


def _ratio(row: dict, other: dict, key: str) -> float | None:
    return row[key] / other[key] if row[key] and other.get(key) else None


def print_table(case: Case, rows: list[dict]) -> None:
    """The rows of one table as Markdown."""
    print(f"\n{case.title}")
    print(f"time / bound: {case.bound}; time and memory / baseline: {case.baseline}")
    print(
        "| provider | forward ms | backward ms | both ms [p20, p80] | TFLOP/s | % of "
        f"{PEAK_TFLOPS} | time / bound | time / baseline | extra MiB "
        "| memory / baseline | errors |\n" + "|---" * 11 + "|"
    )
    for row in rows:
        if row["status"] != "ok":
            cells = f"{row['provider']} | {row['status']} |" + " |" * 8
            print(f"| {cells} {row.get('errors', '')} |")
            continue
        ratios = [
            "?" if row[key] is None else f"{row[key]:.3g}"
            for key in ("time_to_bound", "time_to_baseline", "memory_to_baseline")
        ]
        memory = "?" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 2**20:,.0f}"
        errors = " ".join(f"{what} {error:.0e}" for what, error in row["errors"].items())
        times = (
            f"{row['forward_ms']:.4g} | {row['backward_ms']:.4g} | {row['total_ms']:.4g} "
            f"[{row['p20_ms']:.4g}, {row['p80_ms']:.4g}]"
        )
        speed = f"{row['tflops']:.3g} | {100 * row['tflops'] / PEAK_TFLOPS:.2g}"
        print(
            f"| {row['provider']} | {times} | {speed} | {ratios[0]} | {ratios[1]} | {memory} "
            f"| {ratios[2]} | {errors} |",
            flush=True,
        )


def environment(device: str) -> dict:
    """What a figure depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    hardware = f"{[*models, platform.machine()][0]}, {os.cpu_count()} cores"
    if device == "cuda":
        hardware = torch.cuda.get_device_name()
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": getattr(triton, "__version__", "absent"),
    }
    return {"hardware": hardware, "threads": torch.get_num_threads()} | versions


def main() -> None:
    """Measure the tables asked for, one after the other."""
    description = " ".join(__doc__.split("\n\n")[0].split())
    parser = argparse.ArgumentParser("python -m kernels.bench", description=description)
    parser.add_argument("op", choices=("cross_entropy", "gt_score", "attention", "all"))
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--json", type=Path, help="write the rows here, after every table")
    parser.add_argument("--repeats", type=int, help="rounds (default: 3 on a CPU, 20 on CUDA)")
    parser.add_argument("--cases", default="", help="only the tables whose name contains this")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "PROVIDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child, args.device)
        return
    found, rows = environment(args.device), []
    repeats = args.repeats or (3 if args.device == "cpu" else 20)
    print(", ".join(f"{name} {value}" for name, value in found.items()))
    for key, make in cases(args.op, args.device).items():
        if args.cases in key:
            case = make()
            table = measure(key, case, args.device, repeats)
            rows += table
            print_table(case, table)
            if args.json:
                text = json.dumps({"environment": found, "rows": rows}, indent=1)
                args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
