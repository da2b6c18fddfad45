"""Gradients that are sparse tensors (COO), as embeddings make them: gathered, not compressed.

Each rank's entries are coalesced; the ranks' indices and values are put one after the other, in two
allgathers. Those that several ranks have add up where the wrapped optimizer applies them.
Those of `sparse_as_dense` do not come here: `Bucket` takes them.
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

from .buckets.arrays import as_bytes
from .buckets.placeholders import lacks_gradient
from .exchange import Exchanged
from .residual import ResidualSize


class SparseGradientExchange:
    """One parameter whose gradient is sparse: what `BucketExchange` is for a bucket.

    A dense gradient of it is taken as sparse by rows.

    unsent: the residual while its gradients were dense, as its shape; the first step that
        counts sends it along, as dense as it is. None: it was sent, or there was none on any rank.
    """

    looks_first = True
    signature = "sparse gradient"

    def __init__(self, name: str, parameter: torch.nn.Parameter, parameter_name: str) -> None:
        self.name = name
        self.parameters = [parameter]
        self.names = [parameter_name]
        self.elements = parameter.numel()
        self._taken: tuple[torch.Tensor | None, int] = None, -1
        self._indices, self._values = _entries(parameter, None)
        self._weight = self._scale = 1.0
        self._sum: torch.Tensor | None = None
        self.unsent: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None  # it, until `commit`

    @property
    def _parameter(self) -> torch.nn.Parameter:
        return self.parameters[0]

    @property
    def has_room(self) -> bool:
        """Tell whether there is a residual here, or may be."""
        return self.unsent is not None

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint needs: that there is such a bucket."""
        return {"names": self.names, "regions": None}

    def resume(self, record: Mapping[str, Any]) -> None:
        """Do nothing: every step begins anew."""

    @property
    def sparse(self) -> Sequence[torch.nn.Parameter]:
        """Return the parameter."""
        return self.parameters

    def take_sparse(self, names: Collection[str]) -> None:
        """Do nothing: it takes them anyway."""

    def send_along(self) -> None:
        """Have room for the residual, and send it in the next step; on all ranks alike."""
        dtype = torch.promote_types(self._parameter.dtype, torch.float32)
        self.unsent = torch.zeros(self._parameter.shape, dtype=dtype, device="cpu")

    def take(self, weight: float, scale: float) -> None:
        """Take the gradient as it is now."""
        gradient = self._parameter.grad
        self._taken = gradient, -1 if gradient is None else gradient._version
        self._weight, self._scale = weight, scale
        mine = None if lacks_gradient(self._parameter) else gradient
        self._indices, self._values = _entries(self._parameter, mine)

    def weigh(self, weight: float, share: float) -> None:
        """Multiply what was taken with another weight."""
        self._weight = weight

    def take_nothing(self, scale: float) -> None:
        """Take part without entries."""
        self._scale = scale
        self._indices, self._values = _entries(self._parameter, None)

    def watch(self) -> None:
        """Nothing more is to be known of a gradient that was taken as it was."""

    def is_as_taken(self) -> bool:
        """Tell whether nobody has changed the gradient since `take`."""
        gradient, version = self._taken
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

    def remember(self) -> None:
        """Do nothing: an exchange changes nothing that `undo` would have to take back."""

    def set_aside(self, missing_everywhere: Collection[str]) -> None:
        """Do nothing: the residual of dense gradients is sent in the next step."""

    def undo(self) -> None:
        """Have unsent what `apply` took for sent."""
        if self._sent is not None:
            self.unsent, self._sent = self._sent, None

    def reduce(self, transport: Transport) -> Exchanged:
        """Gather every rank's entries."""
        begun = time.perf_counter()
        with profiled("select"):
            values = (self._values * self._weight).cpu().contiguous()
            # A single index may have any stride, and is contiguous all the same.
            indices = self._indices.t().cpu().clone(memory_format=torch.contiguous_format)
            mine = torch.tensor([indices.shape[1] if len(indices) else 0], device="cpu")
        prepared = time.perf_counter()
        with profiled("exchange"):
            all_indices = transport.allgather(_bytes_of(torch.cat([mine, indices.flatten()])))
            all_values = transport.allgather(_bytes_of(values))
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
        gathered = gathered * self._scale
        self._sum = torch.sparse_coo_tensor(
            rows,
            gathered,
            self._parameter.shape,
            device=self._parameter.device,
            check_invariants=True,  # a peer said where they are
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
        """Return what all ranks together are to send along, in the parameter's shape."""
        if self.unsent is None:
            return None
        total = self.unsent.clone()
        transport.allreduce(total.view(-1).numpy())
        return total

    def _agreed(self, dimensions: Sequence[int]) -> int:
        """Return how many dimensions an index has, by what each rank says; 0: it has no entries."""
        said = {many: rank for rank, many in enumerate(dimensions) if many}
        if len(said) > 1:
            raise MismatchError(
                f"the sparse gradient of '{self.names[0]}' has "
                + ", ".join(f"{many} sparse dimensions on rank {said[many]}" for many in said)
                + "; make them alike, or use sparse_as_dense=True"
            )
        return next(iter(said), 1)

    def apply(self, missing_everywhere: Collection[str]) -> None:
        """Make the sum the gradient; where no rank has any, it stays None."""
        assert self._sum is not None
        stays_without = self.names[0] in missing_everywhere and not self._sum._nnz()
        self._parameter.grad = None if stays_without else self._sum
        self._sent, self.unsent = self.unsent, None
        self._let_go_of_taken()

    def commit(self) -> None:
        """Have nothing to undo any more."""
        self._sent = None

    def residual_size(self) -> ResidualSize | None:
        """Return None: all is sent."""
        return None

    def apply_to_nothing(self) -> None:
        """Let the sum be."""
        self.unsent = None
        self.let_go()

    def poison(self) -> None:
        """Make the gradient's values NaN: the step is skipped."""
        gradient = self._parameter.grad
        if gradient is not None and not lacks_gradient(self._parameter):
            (gradient._values() if gradient.is_sparse else gradient).fill_(float("nan"))
        self.let_go()

    def let_go(self) -> None:
        """Hold on to no gradient."""
        self._let_go_of_taken()
        self.commit()

    def _let_go_of_taken(self) -> None:
        self._taken = None, -1
        self._indices, self._values = _entries(self._parameter, None)
        self._sum = None


def _entries(
    parameter: torch.Tensor, gradient: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices, int64 [sparse dimensions, entries], and values [entries, ...]."""
    if gradient is None:
        rows = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        return rows, parameter.new_empty((0, *parameter.shape[1:])).detach()
    # A row that a batch has used many times is sent once.
    gradient = gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(1)
    return gradient._indices(), gradient._values().detach()


def _joined(parts: Sequence[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of which these are the bytes, one part after the other."""
    joined = torch.from_numpy(np.concatenate(parts))
    return joined.as_strided((len(joined),), (1,)).view(dtype)  # no bytes may have any stride


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = as_bytes(tensor).numpy()
    return array
