"""What every kernel needs before it starts: which implementation, and which architecture. Without
Triton, which is slow to import: `kernels.language` has it.
"""

import torch

KERNELS = ("auto", "triton", "torch")


def choose_kernel(kernel: str, device: torch.device | str) -> str:
    """Return "triton" or "torch". "auto" is Triton on CUDA and torch elsewhere; ValueError for
    "triton" where it cannot run.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel {kernel!r}: choose one of {', '.join(KERNELS)}")
    is_cuda = torch.device(device).type == "cuda"
    if kernel == "auto":
        return "triton" if is_cuda else "torch"
    if kernel == "triton":
        from kernels.language import INTERPRETED, TensorDescriptor

        if TensorDescriptor is None:
            raise ValueError(
                "kernel 'triton': the package triton is not installed; use 'auto' or 'torch'"
            )
        if not (is_cuda or INTERPRETED):
            raise ValueError(
                f"kernel 'triton' on {device}: it needs a CUDA device (or Triton's interpreter, "
                "for tests); use 'auto' or 'torch'"
            )
    return kernel


def architecture(device: torch.device) -> str:
    """The key of a kernel's table of block sizes: sm_80 (A100), sm_90 (H100, H200), sm_100 (B200),
    or "interpreter". ValueError for others.
    """
    if device.type != "cuda":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    known = {(8, 0): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100"}
    if (major, minor) not in known:
        raise ValueError(
            f"no block sizes for compute capability {major}.{minor}: use kernel 'torch', or "
            "add what kernels/tune.py finds"
        )
    return known[major, minor]
