"""Sparse allreduce: the entries of all ranks' sparse tensors, side by side."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...reduce_ops import NAMES, Average, Sum
from ...runtime.world.process_sets import ProcessSet, global_process_set
from .allgathering import begin_allgather
from .handles import synchronize
from .tensors import require_tensor


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str,
    op: int,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Begin to add a sparse COO tensor over the ranks; return what waits for it and returns it.

    Where ranks have entries at one place, the result has several there: it is not coalesced.
    Raises ValueError for a dense tensor, and for another op than Average and Sum.
    """
    require_tensor(tensor, "sparse_allreduce_async")
    if op not in (Average, Sum):
        raise ValueError(f"sparse tensors take op=Average or op=Sum, got {NAMES.get(op, op)}")
    if tensor.layout != torch.sparse_coo:
        raise ValueError(f"a sparse COO tensor is needed, got one of layout {tensor.layout}")
    shape = tensor.shape
    signature = [f"{tensor.dtype} {list(shape)}"]
    size = process_set.engine.transport.size
    indices, values = tensor._indices().t(), tensor._values()
    in_flight_indices, in_flight_values = (
        begin_allgather(
            [part], f"{name}.{what}", process_set, lambda g: g[0].rows, signature=signature
        )
        for what, part in (("indices", indices), ("values", values))
    )

    def finish() -> torch.Tensor:
        try:
            indices = synchronize(in_flight_indices)
        finally:  # leave none in flight
            values = synchronize(in_flight_values)
        if op == Average:
            values = (values / size).to(values.dtype)
        return torch.sparse_coo_tensor(
            indices.t(), values, shape, device=values.device, check_invariants=False
        )

    return finish
