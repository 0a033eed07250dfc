"""Inputs of the loss tests, and the size of the largest tensor that a computation makes.

Shapes: N tokens  V vocab  D hidden.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def problem(num_tokens=37, vocab=101, hidden=16, dtype=torch.float32, seed=0):
    """Hidden rows, head weights and targets with logits of order 4, so that some
    softmaxes are peaked.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(num_tokens, hidden, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(vocab, hidden, generator=generator).to(dtype).requires_grad_()
    return hidden_ND, weight_VD, torch.randint(vocab, (num_tokens,), generator=generator)


def upstream(num_tokens, seed=1):
    return torch.randn(2, num_tokens, generator=torch.Generator().manual_seed(seed))


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of any tensor that an operation returns, the
    backward pass included.
    """

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return out
