"""What every kernel needs before it starts: which implementation, which architecture, and a matrix
product that the interpreter gets right.
"""

import torch

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    INTERPRETED = triton.knobs.runtime.interpret
except ImportError:
    # no Triton for this platform (macOS, Windows): the torch forms serve, and the
    # kernels must still parse

    class triton:
        jit = staticmethod(lambda function: function)

    class tl:
        constexpr = staticmethod(lambda value: value)

    TensorDescriptor, INTERPRETED = None, False

KERNELS = ("auto", "triton", "torch")
IN_INTERPRETER = tl.constexpr(INTERPRETED)


def choose_kernel(kernel: str, device: torch.device | str) -> str:
    """Return "triton" or "torch". "auto" is Triton on CUDA and torch elsewhere; ValueError for
    "triton" where it cannot run.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel {kernel!r}: choose one of {', '.join(KERNELS)}")
    is_cuda = torch.device(device).type == "cuda"
    if kernel == "auto":
        return "triton" if is_cuda else "torch"
    if kernel == "triton" and TensorDescriptor is None:
        raise ValueError(
            "kernel 'triton': the package triton is not installed; use 'auto' or 'torch'"
        )
    if kernel == "triton" and not (is_cuda or INTERPRETED):
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


def descriptor(tensor: torch.Tensor, block_shape: list[int]) -> "TensorDescriptor":
    """A TMA descriptor of `tensor` (last dimension contiguous). ValueError where the hardware could
    not read it: it wants 16-byte steps.
    """
    steps = [
        tensor.data_ptr(),
        *(stride * tensor.element_size() for stride in tensor.stride()[:-1]),
    ]
    if tensor.stride(-1) != 1 or any(step % 16 for step in steps):
        raise ValueError(
            f"strides {tensor.stride()} of {tensor.dtype}: rows must be contiguous and start "
            "at multiples of 16 bytes"
        )
    return TensorDescriptor.from_tensor(tensor, block_shape)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in fp32. The interpreter keeps bf16 as raw bits and multiplies those, so there
    the operands are widened first.
    """
    if IN_INTERPRETER:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def row_sums(a, b, c):
    """The sums along the rows of three tiles, in one reduction: three kept more of the tiles alive
    and spilled registers on sm_100.

    The interpreter would call Python for every pair of elements, so there they are three.
    """
    if IN_INTERPRETER:
        return tl.sum(a, 1), tl.sum(b, 1), tl.sum(c, 1)
    else:
        return tl.reduce((a, b, c), 1, _add3)
