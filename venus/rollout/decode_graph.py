"""One decode step as a CUDA graph: the hundreds of small launches of a step cost the processor more
time than the GPU needs to do them.

Shapes: N slots  W pages of a row  D hidden.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from venus.model.cache import PagedKVCache
from venus.model.decode import CachedLayout, PageTables
from venus.model.qwen3 import Qwen3


class DecodeGraph:
    """A forward pass of one token for each of `num_slots` slots over pages, captured once. Weights
    and pool must stay where they are.
    """

    def __init__(self, model: Qwen3, cache: PagedKVCache, num_slots: int, kernel: str):
        device, width = cache.pages.device, cache.tables_RW.shape[1]
        self.ids_N, self.positions_N = (
            torch.zeros(num_slots, dtype=torch.int64, device=device) for _ in range(2)
        )
        self.places_NK = torch.zeros(
            (num_slots, cache.pages.shape[-2]), dtype=torch.int64, device=device
        )
        tables_RW = torch.zeros((num_slots, width), dtype=torch.int32, device=device)
        lengths_R = torch.ones(num_slots, dtype=torch.int32, device=device)
        self.pages = PageTables(tables_RW, lengths_R, kernel)
        layout = CachedLayout(
            (), (), (), num_slots, self.positions_N, self.places_NK, self.pages, None
        )
        self.replay, self.hidden_ND = capture(
            lambda: model(self.ids_N[None], self.positions_N[None], layout, cache)[0]
        )

    def run(self, ids_N: Tensor, layout: CachedLayout) -> Tensor:
        """Hidden states [num_slots, D], valid until the next call; the first ones are those of the
        layout's rows, the others mean nothing.

        A slot without a row runs token 0 at position 0 into page 0, which is no row's.
        """
        count, width = layout.num_singles, layout.singles.tables_RW.shape[1]
        for kept, new in (
            (self.ids_N, ids_N),
            (self.positions_N, layout.positions_N),
            (self.places_NK, layout.places_NK),
        ):
            kept.zero_()
            kept[:count] = new[:count]
        self.pages.tables_RW.zero_()
        self.pages.tables_RW[:count, :width] = layout.singles.tables_RW
        self.pages.lengths_R.fill_(1)
        self.pages.lengths_R[:count] = layout.singles.lengths_R
        self.replay()
        return self.hidden_ND


def capture(forward: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """(replay, output): replay repeats `forward` on the tensors it read at capture, into `output`.
    It runs twice before, so that nothing is compiled or allocated for the first time while it is
    captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            forward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = forward()
    return graph.replay, output
