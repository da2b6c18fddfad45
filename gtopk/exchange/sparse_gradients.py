"""The exchange of sparse gradients (COO tensors), as embeddings make them: gathered, uncompressed.

Each rank coalesces its entries; two allgathers concatenate the ranks' indices and values. Entries
that several ranks have add up when the wrapped optimizer applies them. With `sparse_as_dense`,
`Bucket` takes sparse gradients instead.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from collectives.errors import MismatchError
from collectives.ranges import profiled
from collectives.transports import Transport

from .bucket_exchange import BucketExchange
from .buckets.arrays import as_bytes
from .buckets.parameters import lacks_gradient
from .exchange import Exchanged
from .residual import ResidualSize


class SparseGradientExchange:
    """The exchange of one parameter with sparse gradients; has the interface of `BucketExchange`.

    A dense gradient of it is taken as sparse by rows.

    unsent: a residual from when its gradients were dense, in its shape; the first step that counts
        sends it along, dense. None: it was sent, or no rank had one.
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
        self._indices, self._values = _entries(parameter, None)
        self._weight = self._scale = 1.0
        self._sum: torch.Tensor | None = None
        self.unsent: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None  # `unsent` as it was applied, until `commit`

    @property
    def _parameter(self) -> torch.nn.Parameter:
        return self.parameters[0]

    @property
    def has_residual(self) -> bool:
        """Tell whether there is room for a residual."""
        return self.unsent is not None

    def record(self) -> dict[str, Any]:
        """Return the bucket's record for a checkpoint: its parameter's name."""
        return {"names": self.names, "regions": None}

    def resume(self, record: Mapping[str, Any]) -> None:
        """Do nothing: nothing is kept from step to step."""

    @property
    def sparse(self) -> Sequence[torch.nn.Parameter]:
        """Return the parameter."""
        return self.parameters

    def accept_sparse(self, names: Collection[str]) -> None:
        """Do nothing: this exchange takes sparse gradients anyway."""

    def start_draining(self) -> None:
        """Make room for a residual, which the next step sends; all ranks call it alike."""
        # As wide as a bucket's residual, of which this may have been a part.
        dtype = torch.promote_types(self._parameter.dtype, torch.float32)
        self.unsent = torch.zeros(self._parameter.shape, dtype=dtype, device="cpu")

    def capture_gradients(self, weight: float, scale: float) -> None:
        """Capture the gradient as it is now."""
        gradient = self._parameter.grad
        self._captured = gradient, -1 if gradient is None else gradient._version
        self._weight, self._scale = weight, scale
        # A placeholder is no gradient: its zeros would travel as entries of every row.
        mine = None if lacks_gradient(self._parameter) else gradient
        self._indices, self._values = _entries(self._parameter, mine)

    def set_weight(self, weight: float, share: float) -> None:
        """Set another weight for the entries that were captured."""
        self._weight = weight

    def capture_zeros(self, scale: float) -> None:
        """Take part without entries."""
        self._scale = scale
        self._indices, self._values = _entries(self._parameter, None)

    def watch(self) -> None:
        """Do nothing: `capture_gradients` has noted all that `is_unchanged` needs."""

    def is_unchanged(self) -> bool:
        """Tell whether the captured gradient has not changed, as torch counts changes."""
        gradient, version = self._captured
        now = self._parameter.grad
        return now is gradient and (now is None or now._version == version)

    def missing(self) -> list[str]:
        """Return the parameter's name where it has no gradient here."""
        return self.names if lacks_gradient(self._parameter) else []

    def all_finite(self) -> bool:
        """Tell whether the values hold neither NaN nor infinity."""
        return bool(self._values.isfinite().all())

    def not_finite(self) -> list[str]:
        """Return the parameter's name where its gradient holds NaN or infinity here."""
        return [] if self.all_finite() else self.names

    def snapshot(self) -> None:
        """Do nothing: an exchange changes nothing that `undo` would have to take back."""

    def exclude(self, missing_everywhere: Collection[str]) -> None:
        """Do nothing: the residual of dense gradients is sent in the next step."""

    def undo(self) -> None:
        """Put back the residual that `apply` removed."""
        if self._sent is not None:
            self.unsent, self._sent = self._sent, None

    def reduce(self, transport: Transport) -> Exchanged:
        """Gather every rank's entries."""
        begun = time.perf_counter()
        with profiled("select"):
            # Here, as nothing adds the ranks' entries up before the optimizer does.
            values = (self._values * self._weight).cpu().contiguous()
            # `contiguous` would keep a single index's odd stride: any stride counts as contiguous.
            indices = self._indices.t().cpu().clone(memory_format=torch.contiguous_format)
            # The number of sparse dimensions goes first: a rank without entries does not know it.
            mine = torch.tensor([indices.shape[1] if len(indices) else 0], device="cpu")
        prepared = time.perf_counter()
        with profiled("exchange"):
            sent = as_bytes(torch.cat([mine, indices.flatten()]))
            all_indices = transport.allgather(sent.numpy())
            all_values = transport.allgather(as_bytes(values).numpy())
            along = self._sum_unsent(transport)
        communicate_seconds = time.perf_counter() - prepared
        dimensions = self._agreed([int(part[:8].view(np.int64)[0]) for part in all_indices])
        rows = _joined([part[8:] for part in all_indices], torch.int64).reshape(-1, dimensions).t()
        gathered = _joined(all_values, values.dtype)
        gathered = gathered.reshape(-1, *self._parameter.shape[dimensions:])
        if along is not None:
            entries = along.to_sparse(dimensions)
            rows = torch.cat([rows, entries._indices()], dim=1)
            gathered = torch.cat([gathered, entries._values().to(gathered.dtype)])
        # With the residual's part, which is in the units of weighted gradients, too.
        gathered = gathered * self._scale
        self._sum = torch.sparse_coo_tensor(
            rows,
            gathered,
            self._parameter.shape,
            device=self._parameter.device,
            check_invariants=True,  # the indices are of other ranks
        )
        return Exchanged(
            "sparse-allgather",
            len(values),
            len(gathered),
            prepared - begun,
            communicate_seconds,
            0.0,
            finite=bool(gathered.isfinite().all()),
            bytes_counted=along is None or transport.counts_allreduce,
        )

    def _sum_unsent(self, transport: Transport) -> torch.Tensor | None:
        """Return the sum of all ranks' residuals, in the parameter's shape; None: there is none."""
        if self.unsent is None:
            return None
        # A copy: the step may not count.
        total = self.unsent.clone()
        transport.allreduce(total.view(-1).numpy())
        return total

    def _agreed(self, dimensions: Sequence[int]) -> int:
        """Return the number of sparse dimensions, from every rank's; a rank without entries has 0.

        Raises MismatchError where ranks have different numbers.
        """
        said = {many: rank for rank, many in enumerate(dimensions) if many}
        if len(said) > 1:
            raise MismatchError(
                f"the sparse gradient of '{self.names[0]}' has "
                + ", ".join(f"{many} sparse dimensions on rank {said[many]}" for many in said)
                + "; make them alike, or use sparse_as_dense=True"
            )
        return next(iter(said), 1)

    def apply(self, missing_everywhere: Collection[str]) -> None:
        """Replace the gradient by the sum; where no rank has a gradient, it stays None."""
        assert self._sum is not None
        stays_without = self.names[0] in missing_everywhere and not self._sum._nnz()
        self._parameter.grad = None if stays_without else self._sum
        self._sent, self.unsent = self.unsent, None
        self.release_gradients()

    def commit(self) -> None:
        """Make the step final: it cannot be undone any more."""
        self._sent = None

    def residual_size(self) -> ResidualSize | None:
        """Return None: every step sends everything."""
        return None

    def finish_joined_step(self) -> None:
        """End a step of a rank that has joined: its residual is sent, its parameter stays."""
        self.unsent = None
        self.release_gradients()

    def poison(self) -> None:
        """Make the gradient's values NaN: the step is skipped."""
        gradient = self._parameter.grad
        if gradient is not None and not lacks_gradient(self._parameter):
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
    # Coalesced, so that a row which a batch has used many times is sent once.
    gradient = gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(1)
    return gradient._indices(), gradient._values().detach()


def _joined(parts: Sequence[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
    """Return the concatenated parts, given as bytes, as a tensor of this dtype."""
    joined = torch.from_numpy(np.concatenate(parts))
    return joined.as_strided((len(joined),), (1,)).view(dtype)  # an empty array has any stride
