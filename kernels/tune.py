"""Find block sizes for the GPU at hand: time every candidate on the 4B shapes and print the lines
to put into TILES and BLOCKS.

    python -m kernels.tune cross_entropy|gt_score

Offline, and not at run time: a kernel that tunes itself gives different bits and different times
from run to run. Each candidate is first compared with the torch form; what does not compile, does
not fit or is wrong is named and left out. Not yet run on a GPU.
"""

import argparse
import itertools

import torch

from kernels import cross_entropy, gt_score
from kernels.cross_entropy import Tiles
from kernels.gt_score import Blocks
from kernels.language import triton
from kernels.launch import architecture


def candidates(op: str, descriptors: bool) -> list:
    """What is worth compiling; ahead-of-time compilation has shown which of them spill."""
    if op == "gt_score":
        return [
            Blocks(m, k, warps, stages, descriptors)
            for m, k, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3))
        ]
    shapes = ((128, 128), (128, 256), (256, 128), (64, 256))
    return [
        Tiles(n, v, 64, group, 8, stages, descriptors)
        for (n, v), group, stages in itertools.product(shapes, (4, 8, 16), (3, 4))
    ]


def cross_entropy_task(device: torch.device):
    """Forward and backward of the recompute form, 4,096 rows of the 4B model, and its error
    against torch's chunks.
    """
    h = torch.randn(4096, 2560, device=device, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(151_936, 2560, device=device, dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    targets = torch.randint(151_936, (4096,), device=device)

    def run(kernel="triton"):  # reads TILES at every launch
        log_probs, _ = cross_entropy.linear_log_probs(h, w, targets, kernel=kernel)
        return log_probs, *torch.autograd.grad(log_probs.mean(), (h, w))

    want = run("torch")
    return lambda: run, lambda got: max(
        ((x - y).float().norm() / y.float().norm()).item() for x, y in zip(got, want, strict=True)
    )


def gt_score_task(device: torch.device):
    """A trunk of 16,384 tokens with 20 branches of 32, heads 32/8 x 128, and its error in the last
    512 rows against the dense reference.
    """
    trunk, cuts, length = 16384, 20, 32
    spans = [
        (0, trunk, 0, 0),
        *(
            (trunk + i * length, trunk + (i + 1) * length, 0, trunk * (i + 1) // cuts)
            for i in range(cuts)
        ),
    ]
    q, k, v = (
        torch.randn(spans[-1][1], heads, 128, device=device, dtype=torch.bfloat16)
        for heads in (32, 8, 8)
    )
    want = gt_score.branch_attention_ref(
        q[-512:].float(), k.float(), v.float(), spans, len(q) - 512
    )[0]

    def make():
        plan = gt_score.plan_rows(spans, 4, device)  # of this candidate's tiles, and not timed
        return lambda: gt_score.branch_attention(q, k, v, plan)[0]

    return make, lambda out: ((out[-512:].float() - want).norm() / want.norm()).item()


def main() -> None:
    """Print every candidate with its time, the fastest last."""
    description = " ".join(__doc__.split("\n\n")[0].split())
    parser = argparse.ArgumentParser("python -m kernels.tune", description=description)
    parser.add_argument("op", choices=("cross_entropy", "gt_score"))
    op = parser.parse_args().op
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device to tune for")
    device = torch.device("cuda")
    table, task = (
        (cross_entropy.TILES, cross_entropy_task)
        if op == "cross_entropy"
        else (gt_score.BLOCKS, gt_score_task)
    )
    name, (make, error_of) = architecture(device), task(device)
    found = []
    for candidate in candidates(op, table[name].descriptors):
        table[name] = candidate
        try:
            run = make()
            error = error_of(run())
        except (triton.errors.TritonError, RuntimeError) as failure:
            print(f"{candidate}: {str(failure).splitlines()[0]}")
            continue
        if not error < 2e-2:
            print(f"{candidate}: WRONG, error {error:.2g}")
            continue
        found.append(
            (triton.testing.do_bench(run, warmup=50, rep=300, return_mode="median"), candidate)
        )
    for milliseconds, candidate in sorted(found, reverse=True):
        print(f"{milliseconds:8.2f} ms  {candidate}")
    if found:
        print(f'"{name}": {min(found)[1]},')


if __name__ == "__main__":
    main()
