"""Keys and values of many rows, each with a length of its own: a stretch of memory for every row,
or pages of one pool.

Both caches are used alike: `reserve` room, `write` at `places`, `advance` over what shall stay;
what is not advanced over, such as an answer branch, is invisible, and `truncate` gives its room
back.

Shapes: R cache rows  K kv heads  T positions  E head_dim  N tokens  P pages  W pages of a row
        V vectors of E numbers in a layer.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class KVCache:
    """One contiguous buffer per layer, [R, K, T, E]; row r holds `lengths[r]` valid positions.
    Buffers grow by doubling as rows do.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_rows: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        # one position more than asked for: rows a power of two apart would compete for the same
        # lines of the processor's cache
        shape = (num_rows, num_kv_heads, min(capacity, 256) + 1, head_dim)
        self.keys_RKTE, self.values_RKTE = self.buffers = tuple(
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
            for _ in range(2)
        )
        self.capacity = capacity
        self.lengths = [0] * num_rows

    def fits(self, row: int, length: int, spare: int = 0) -> bool:
        """Whether `reserve` can be called with this length now."""
        return True

    def reserve(self, row: int, length: int) -> None:
        """Make room for `length` positions of a row. ValueError beyond the capacity."""
        self._check(length)
        allocated = self.keys_RKTE[0].shape[2]
        if length <= allocated:
            return
        extra = min(max(length, 2 * allocated), self.capacity + 1) - allocated
        for buffers in self.buffers:
            for layer, buffer_RKTE in enumerate(buffers):
                buffers[layer] = torch.nn.functional.pad(buffer_RKTE, (0, 0, 0, extra))

    def reserve_rows(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """`reserve` for several rows."""
        self.reserve(0, max(lengths, default=0))

    def places(self, rows: Sequence[int], positions: Sequence[int]) -> np.ndarray:
        """Where token n lies, int64 [N, K]: indices into `vectors` as they are now."""
        _, num_heads, allocated, _ = self.keys_RKTE[0].shape
        return (
            (np.asarray(rows) * num_heads + np.arange(num_heads)[:, None]) * allocated
            + np.asarray(positions)
        ).T

    def vectors(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [V, E]."""
        return tuple(buffers[layer].view(-1, buffers[layer].shape[-1]) for buffers in self.buffers)

    def write(self, layer: int, places_NK: Tensor, keys_NKE: Tensor, values_NKE: Tensor) -> None:
        """Store new keys and values of one layer at their places; lengths do not
        change (see `advance`).
        """
        for buffer_VE, new_NKE in zip(self.vectors(layer), (keys_NKE, values_NKE), strict=True):
            buffer_VE.index_copy_(0, places_NK.flatten(), new_NKE.flatten(0, 1))

    def read(self, layer: int, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `length` positions of a row, each [K, T, E]."""
        return tuple(buffers[layer][row, :, :length] for buffers in self.buffers)

    def advance(self, row: int, count: int) -> None:
        """Make the next `count` positions of a row visible."""
        assert self.lengths[row] + count <= self.capacity, (
            f"row {row}: {self.lengths[row]} + {count} positions of {self.capacity}"
        )
        self.lengths[row] += count

    def truncate(self, row: int, length: int) -> None:
        """Forget everything at and after `length` in one row, reserved room
        included; 0 frees it.
        """
        assert 0 <= length <= self.lengths[row], (
            f"truncate row {row} of {self.lengths[row]} to {length}"
        )
        self.lengths[row] = length

    def fork(self, source: int, targets: list[int], length: int) -> None:
        """Give every row of `targets` the first `length` positions of row `source` (a prompt shared
        by a rollout group).
        """
        assert length <= self.lengths[source], f"fork {length} of {self.lengths[source]} positions"
        # one by one: buffer[targets] = buffer[source] is refused as overlapping when
        # `length` fills the buffer
        for row in targets:
            for buffer_RKTE in (*self.keys_RKTE, *self.values_RKTE):
                buffer_RKTE[row, :, :length] = buffer_RKTE[source, :, :length]
            self.lengths[row] = length

    def _check(self, length: int) -> None:
        if length > self.capacity:
            raise ValueError(
                f"a row of {length} tokens exceeds the cache of {self.capacity}: raise the "
                "context length"
            )


class PagedKVCache(KVCache):
    """One pool of pages per layer, [P, T, K, E] with T = page_size, for `num_tokens` tokens
    of all rows together.

    Position p of row r lies in page tables_RW[r, p // T]. Rows may hold a page together, after
    `fork`; before one of them writes into it, it takes a copy, so that no page that two rows hold
    is ever written. Page 0 is no row's: idle slots of a decode step write there.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_rows: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        num_tokens: int,
        page_size: int,
    ):
        width, num_pages = check_pool(num_tokens, page_size, capacity)
        # keys and values of all layers in one tensor, so that a page is copied at once
        self.pages = torch.zeros(
            (2, num_layers, num_pages + 1, page_size, num_kv_heads, head_dim),
            dtype=dtype,
            device=device,
        )
        self.keys_PTKE, self.values_PTKE = self.buffers = tuple(map(list, self.pages))
        self.capacity, self.page_size = capacity, page_size
        self.lengths, self.num_held = [0] * num_rows, [0] * num_rows
        self.tables_RW = np.zeros((num_rows, width), dtype=np.int32)
        self.holders = [0] * (num_pages + 1)  # rows that hold a page
        self.free = list(range(num_pages, 0, -1))

    def fits(self, row: int, length: int, spare: int = 0) -> bool:
        """Whether the pool has the pages for `length` positions of a row, and `spare` more."""
        return self._missing(row, length) + spare <= len(self.free)

    def reserve(self, row: int, length: int) -> None:
        """Take the pages for `length` positions of a row, a copy of the one it writes to next if it
        shares that. ValueError beyond the capacity.
        """
        self._check(length)
        assert self.fits(row, length), (
            f"row {row} of {self.lengths[row]} to {length}: {len(self.free)} pages are free"
        )
        if self._is_shared(row, length):
            number = self.lengths[row] // self.page_size
            shared, copy = int(self.tables_RW[row, number]), self._take()
            self.pages[:, :, copy] = self.pages[:, :, shared]
            self._release(shared)
            self.tables_RW[row, number] = copy
        while self.num_held[row] * self.page_size < length:
            self.tables_RW[row, self.num_held[row]] = self._take()
            self.num_held[row] += 1

    def reserve_rows(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """`reserve` for several rows."""
        for row, length in zip(rows, lengths, strict=True):
            self.reserve(row, length)

    def places(self, rows: Sequence[int], positions: Sequence[int]) -> np.ndarray:
        """Where token n lies, int64 [N, K]: indices into `vectors`."""
        positions, num_heads = np.asarray(positions), self.pages.shape[-2]
        place_N = (
            self.tables_RW[rows, positions // self.page_size].astype(np.int64) * self.page_size
            + positions % self.page_size
        )
        return (place_N * num_heads + np.arange(num_heads)[:, None]).T

    def read(self, layer: int, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `length` positions of a row, each [K, T, E],
        gathered from its pages.
        """
        table_W = torch.from_numpy(
            self.tables_RW[row, : -(-length // self.page_size)].astype(np.int64)
        ).to(self.pages.device)
        return tuple(
            buffers[layer][table_W].flatten(0, 1)[:length].transpose(0, 1)
            for buffers in self.buffers
        )

    def truncate(self, row: int, length: int) -> None:
        """Forget everything at and after `length` in one row and give back the pages that only held
        that; 0 frees the row.
        """
        super().truncate(row, length)
        kept = -(-length // self.page_size)
        for page in self.tables_RW[row, kept : self.num_held[row]].tolist():
            self._release(page)
        self.tables_RW[row, kept:] = 0
        self.num_held[row] = kept

    def fork(self, source: int, targets: list[int], length: int) -> None:
        """Let every row of `targets`, all empty, hold the pages of the first `length` positions of
        row `source`. Nothing is copied yet.
        """
        assert length <= self.lengths[source], f"fork {length} of {self.lengths[source]} positions"
        count = -(-length // self.page_size)
        for row in targets:
            self.truncate(row, 0)
            self.tables_RW[row, :count] = self.tables_RW[source, :count]
            for page in self.tables_RW[source, :count].tolist():
                self.holders[page] += 1
            self.num_held[row], self.lengths[row] = count, length

    def _missing(self, row: int, length: int) -> int:
        return max(0, -(-length // self.page_size) - self.num_held[row]) + self._is_shared(
            row, length
        )

    def _is_shared(self, row: int, length: int) -> bool:
        """Whether writing on up to `length` begins in a page that another row holds, too."""
        start = self.lengths[row]
        return (
            start < length
            and start % self.page_size > 0
            and self.holders[self.tables_RW[row, start // self.page_size]] > 1
        )

    def _take(self) -> int:
        page = self.free.pop()
        self.holders[page] = 1
        return page

    def _release(self, page: int) -> None:
        self.holders[page] -= 1
        if not self.holders[page]:
            self.free.append(page)


def check_pool(num_tokens: int, page_size: int, capacity: int) -> tuple[int, int]:
    """(pages of one row of `capacity` positions, pages of a pool of `num_tokens`). ValueError when
    the pool cannot hold that row.
    """
    width, num_pages = -(-capacity // page_size), num_tokens // page_size
    if num_pages < width:
        raise ValueError(
            f"a KV pool of {num_tokens} tokens ({num_pages} pages of {page_size}) cannot "
            f"hold one row of {capacity}: "
            f"give it at least {width * page_size} tokens, or lower the context"
        )
    return width, num_pages
