"""Keys and values of many rows, each with a length of its own.

Shapes: R cache rows  K kv heads  T positions  E head_dim  N tokens.
"""

import torch
from torch import Tensor


class KVCache:
    """One contiguous buffer per layer, [R, K, T, E]; row r holds `lengths[r]` valid positions.

    A write beyond `lengths` is not visible until `advance` moves the length over it, so a scratch token (an idle slot of the sampler, an answer
    branch) may be written and simply forgotten. One position more than `capacity` is allocated for exactly that. Buffers grow by doubling as rows do.
    """

    def __init__(self, *, num_layers: int, num_rows: int, capacity: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str):
        shape = (num_rows, num_kv_heads, min(capacity, 256) + 1, head_dim)
        self.keys_RKTE = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values_RKTE = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.capacity = capacity
        self.lengths = [0] * num_rows

    def reserve(self, length: int) -> None:
        """Make the buffers hold `length` positions a row, at most capacity + 1. Raises ValueError beyond that."""
        if length > self.capacity + 1:
            raise ValueError(f"a row of {length} tokens exceeds the cache of {self.capacity}: raise the context length")
        allocated = self.keys_RKTE[0].shape[2]
        if length <= allocated:
            return
        extra = min(max(length, 2 * allocated), self.capacity + 1) - allocated
        for buffers in (self.keys_RKTE, self.values_RKTE):
            for layer, buffer_RKTE in enumerate(buffers):
                buffers[layer] = torch.nn.functional.pad(buffer_RKTE, (0, 0, 0, extra))

    def write(self, layer: int, rows_N: Tensor, positions_N: Tensor, keys_NKE: Tensor, values_NKE: Tensor) -> None:
        """Store token n of the step at (rows_N[n], positions_N[n]) of one layer; lengths do not change (see `advance`)."""
        self.keys_RKTE[layer][rows_N, :, positions_N] = keys_NKE
        self.values_RKTE[layer][rows_N, :, positions_N] = values_NKE

    def advance(self, row: int, count: int) -> None:
        """Make the next `count` positions of a row visible."""
        assert self.lengths[row] + count <= self.capacity, f"row {row}: {self.lengths[row]} + {count} positions of {self.capacity}"
        self.lengths[row] += count

    def truncate(self, row: int, length: int) -> None:
        """Forget everything at and after `length` in one row; 0 frees it."""
        assert 0 <= length <= self.lengths[row], f"truncate row {row} of {self.lengths[row]} to {length}"
        self.lengths[row] = length

    def fork(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first `length` positions of row `source` into every row of `targets` (a prompt shared by a rollout group)."""
        assert length <= self.lengths[source], f"fork {length} of {self.lengths[source]} positions"
        for row in targets:  # one by one: buffer[targets] = buffer[source] is refused as overlapping when `length` fills the buffer
            for buffer_RKTE in (*self.keys_RKTE, *self.values_RKTE):
                buffer_RKTE[row, :, :length] = buffer_RKTE[source, :, :length]
            self.lengths[row] = length
