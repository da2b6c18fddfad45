"""The exchange of sparse gradients (COO tensors), as from embeddings: gathered, uncompressed.

Each rank coalesces its entries, and two allgathers concatenate the ranks' indices and values. If
several ranks have the same entry, the wrapped optimizer adds them up when it applies them. With
`sparse_as_dense`, `Bucket` handles sparse gradients instead.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from collectives.errors import MismatchError
from collectives.telemetry import profiled
from collectives.transports import Transport

from .bucket_exchange import BucketExchange
from .buckets.arrays import as_bytes, current_streams
from .exchange import Exchanged
from .residual import ResidualSize


class SparseGradientExchange:
    """The exchange of one parameter with sparse gradients; has the interface of `BucketExchange`.

    A dense gradient of this parameter is treated as sparse by rows.

    unsent: a residual from when the gradients were dense, in the parameter's shape; the first step
        that counts sends it along, dense. None: it was sent, or no rank had one.
    """

    checks_finite_first = True
    signature = "sparse gradient"
    residual, adam = None, None

    def __init__(self, name: str, parameter: torch.nn.Parameter, parameter_name: str) -> None:
        self.name = name
        self.parameters = [parameter]
        self.names = [parameter_name]
        self.elements = parameter.numel()
        self._captured: tuple[torch.Tensor | None, int] = None, -1
        self._gpus = [parameter.device] if parameter.is_cuda else []
        self._on_stream = current_streams(self._gpus)
        self._indices, self._values = _entries(parameter, None)
        self._weight = self._scale = 1.0
        self._sum: torch.Tensor | None = None
        self.unsent: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None  # the applied `unsent`, until `commit`

    @property
    def _parameter(self) -> torch.nn.Parameter:
        return self.parameters[0]

    @property
    def has_residual(self) -> bool:
        """Return whether there is a residual."""
        return self.unsent is not None

    def after_last_step(self) -> torch.Tensor | None:
        """Return `unsent` as it was before a step that may still be undone."""
        return self.unsent if self._sent is None else self._sent

    def record(self) -> dict[str, Any]:
        """Return the bucket's record for a checkpoint: its parameter's name."""
        return {"names": self.names, "regions": None}

    def resume(self, record: Mapping[str, Any]) -> None:
        """Do nothing: no state is kept between steps."""

    @property
    def sparse(self) -> Sequence[torch.nn.Parameter]:
        """Return the parameter."""
        return self.parameters

    def accept_sparse(self, names: Collection[str]) -> None:
        """Do nothing: this exchange always takes sparse gradients."""

    def start_draining(self) -> None:
        """Add a residual, which the next step sends; all ranks must call it."""
        # At least float32, like the bucket's residual that this may come from.
        dtype = torch.promote_types(self._parameter.dtype, torch.float32)
        self.unsent = torch.zeros(self._parameter.shape, dtype=dtype, device="cpu")

    def capture_gradients(self, weight: float, scale: float) -> None:
        """Capture the current gradient."""
        gradient = self._parameter.grad
        self._captured = gradient, -1 if gradient is None else gradient._version
        self._weight, self._scale = weight, scale
        # The engine's thread, which reads the entries, has another current stream.
        self._on_stream = current_streams(self._gpus)
        self._indices, self._values = _entries(self._parameter, gradient)

    def set_weight(self, weight: float, share: float) -> None:
        """Change the weight of the captured entries."""
        self._weight = weight

    def capture_zeros(self, scale: float) -> None:
        """Take part without entries."""
        self._scale = scale
        self._indices, self._values = _entries(self._parameter, None)

    def watch(self) -> None:
        """Do nothing: `capture_gradients` recorded all that `is_unchanged` needs."""

    def is_unchanged(self) -> bool:
        """Return whether the captured gradient is unchanged, according to torch's version."""
        gradient, version = self._captured
        now = self._parameter.grad
        return now is gradient and (now is None or now._version == version)

    def missing(self) -> list[str]:
        """Return the parameter's name if it has no gradient on this rank."""
        return self.names if self._parameter.grad is None else []

    def all_finite(self) -> bool:
        """Return whether the values hold neither NaN nor infinity."""
        return bool(self._values.isfinite().all())

    def not_finite(self) -> list[str]:
        """Return the parameter's name if its gradient holds NaN or infinity on this rank."""
        return [] if self.all_finite() else self.names

    def snapshot(self) -> None:
        """Do nothing: an exchange changes nothing that `undo` would have to revert."""

    def exclude(self, missing_everywhere: Collection[str]) -> None:
        """Do nothing: a residual of dense gradients is sent in the next step anyway."""

    def undo(self) -> None:
        """Restore the residual that `apply` removed."""
        if self._sent is not None:
            self.unsent, self._sent = self._sent, None

    def reduce(self, transport: Transport) -> Exchanged:
        """Gather every rank's entries."""
        with self._on_stream():
            return self._gather(transport)

    def _gather(self, transport: Transport) -> Exchanged:
        begun = time.perf_counter()
        with profiled("select"):
            # Weight them now: entries are not summed until the optimizer applies them.
            values = (self._values * self._weight).cpu().contiguous()
            # Not `contiguous`, which would keep the odd stride of a single index.
            indices = self._indices.t().cpu().clone(memory_format=torch.contiguous_format)
            # Send the number of sparse dimensions first: a rank without entries does not know it.
            own_dimensions = torch.tensor([indices.shape[1] if len(indices) else 0], device="cpu")
        prepared = time.perf_counter()
        with profiled("exchange"):
            message = as_bytes(torch.cat([own_dimensions, indices.flatten()]))
            all_indices = transport.allgather(message.numpy())
            all_values = transport.allgather(as_bytes(values).numpy())
            unsent_sum = self._sum_unsent(transport)
        communicate_seconds = time.perf_counter() - prepared
        dimensions = self._common_dimensions(
            transport.ranks, [int(part[:8].view(np.int64)[0]) for part in all_indices]
        )
        rows = _joined([part[8:] for part in all_indices], torch.int64).reshape(-1, dimensions).t()
        gathered = _joined(all_values, values.dtype)
        gathered = gathered.reshape(-1, *self._parameter.shape[dimensions:])
        if unsent_sum is not None:
            entries = unsent_sum.to_sparse(dimensions)
            rows = torch.cat([rows, entries._indices()], dim=1)
            gathered = torch.cat([gathered, entries._values().to(gathered.dtype)])
        # Also scales the residual's part, which is in units of weighted gradients.
        gathered = gathered * self._scale
        self._sum = torch.sparse_coo_tensor(
            rows,
            gathered,
            self._parameter.shape,
            device=self._parameter.device,
            check_invariants=True,  # because the indices come from other ranks
        )
        return Exchanged(
            "sparse-allgather",
            len(values),
            len(gathered),
            prepared - begun,
            communicate_seconds,
            0.0,
            finite=bool(gathered.isfinite().all()),
            bytes_counted=unsent_sum is None or transport.counts_allreduce,
        )

    def _sum_unsent(self, transport: Transport) -> torch.Tensor | None:
        """Return the sum of all ranks' residuals, in the parameter's shape; None without one."""
        if self.unsent is None:
            return None
        # A copy, because the step may not count.
        total = self.unsent.clone()
        transport.allreduce(total.view(-1).numpy())
        return total

    def _common_dimensions(self, ranks: Sequence[int], dimensions: Sequence[int]) -> int:
        """Return the common number of sparse dimensions; a rank without entries sends 0.

        ranks: the world ranks, for the error. Raises MismatchError if the ranks' numbers differ.
        """
        rank_of = {count: rank for rank, count in zip(ranks, dimensions, strict=True) if count}
        if len(rank_of) > 1:
            raise MismatchError(
                f"the sparse gradient of '{self.names[0]}' has "
                + ", ".join(
                    f"{count} sparse dimensions on rank {rank_of[count]}" for count in rank_of
                )
                + "; use the same number on all ranks, or sparse_as_dense=True"
            )
        return next(iter(rank_of), 1)

    def apply(self, missing_everywhere: Collection[str]) -> None:
        """Replace the gradient with the sum; if no rank has a gradient, it stays None."""
        assert self._sum is not None
        stays_none = self.names[0] in missing_everywhere and not self._sum._nnz()
        self._parameter.grad = None if stays_none else self._sum
        self._sent, self.unsent = self.unsent, None
        self.release_gradients()

    def commit(self) -> None:
        """Make the step final: it can no longer be undone."""
        self._sent = None

    def residual_size(self) -> ResidualSize | None:
        """Return None: every step sends everything."""
        return None

    def finish_joined_step(self) -> None:
        """End a step of a joined rank: its residual is sent, its parameter does not change."""
        self.unsent = None
        self.release_gradients()

    def poison(self) -> None:
        """Make the gradient's values NaN: the step is skipped."""
        gradient = self._parameter.grad
        if gradient is not None:
            (gradient._values() if gradient.is_sparse else gradient).fill_(float("nan"))
        self.release_gradients()

    def release_gradients(self) -> None:
        """Drop all references to gradients."""
        self._captured = None, -1
        self._indices, self._values = _entries(self._parameter, None)
        self._sum = None


AnyBucketExchange = BucketExchange | SparseGradientExchange


def _entries(
    parameter: torch.Tensor, gradient: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices, int64 [sparse dimensions, entries], and values [entries, ...]."""
    if gradient is None:
        rows = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        return rows, parameter.new_empty((0, *parameter.shape[1:])).detach()
    # Coalesce, so that a row that the batch uses many times is sent once.
    gradient = gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(1)
    return gradient._indices(), gradient._values().detach()


def _joined(parts: Sequence[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
    """Concatenate parts given as bytes, and return them as a tensor of this dtype."""
    joined = torch.from_numpy(np.concatenate(parts))
    return joined.as_strided((len(joined),), (1,)).view(dtype)  # an empty array has any stride
