"""Triton's names, or stand-ins where it is not installed, and what several kernels share: TMA
descriptors, checks of what they read, and a matrix product that the interpreter gets right.
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

IN_INTERPRETER = tl.constexpr(INTERPRETED)


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


def check_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """ValueError for a head_dim (the last dimension) or dtypes that attention's products cannot
    take.
    """
    if q.shape[-1] not in (16, 32, 64, 128, 256):
        raise ValueError(
            f"head_dim {q.shape[-1]}: a power of 2 from 16 to 256 is needed; use kernel 'torch'"
        )
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    if not q.dtype == k.dtype == v.dtype or not (INTERPRETED or is_half):
        raise ValueError(
            f"dtypes {q.dtype}, {k.dtype}, {v.dtype}: one of bf16 and fp16 is needed; use kernel "
            "'torch'"
        )


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
