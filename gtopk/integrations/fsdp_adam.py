"""AdamW's steps of a sharded model: each rank makes them of its shard, with the shard's replicas.

FSDP's optimizer has a parameter, and its state, as DTensors. The hook's vector has this rank's
shard of it, padded to be as long as the first rank's:

    parameter    [11, 12]        rank 0 of two has [6, 12]    rank 1 has [5, 12]
    in a vector                                    [6, 12]    [6, 12], whose last row is of zeros

Each shard has a second moment of its own, which its replicas share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from ..exchange.adamw import SHARED, SHARED_ROWS, Hyper, rows_of
from ..optim.wrapped.local_residual import on_this_rank
from .adam import HookGroups
from .bucket_exchanges import BucketExchanges
from .fsdp_units import Unit


class ShardGroups(HookGroups):
    """The groups of an optimizer of sharded parameters, looked up by the tensors of `Unit.padded`.

    Raises ValueError for an optimizer with other trained parameters: the hook does not make their
    steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, units: Iterable[Unit]) -> None:
        super().__init__(optimizer)
        self._of = {shape: (unit, name) for unit in units for name, shape in unit.padded.items()}
        sharded = set(map(self._parameter, self._of))
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.requires_grad and parameter not in sharded:
                raise ValueError(
                    f"the optimizer steps a parameter of shape {list(parameter.shape)} that "
                    "fully_shard has not sharded: make the optimizer after fully_shard, of what is "
                    "sharded, or give adam_steps='after'"
                )
        self._views: dict[torch.Tensor, dict[str, tuple[DTensor, torch.Tensor]]] = {}

    def _parameter(self, padded: torch.Tensor) -> DTensor:
        unit, name = self._of[padded]
        return unit.parameter(name)

    def read(self, parameters: Sequence[torch.Tensor]) -> list[Hyper | None]:
        """Return the options; raise ValueError for a parameter that the optimizer does not step."""
        return super().read([self._parameter(padded) for padded in parameters])

    def state_of(self, parameter: torch.Tensor) -> MutableMapping[str, Any]:
        """Return the optimizer's state of a parameter, as a mapping to this rank's shards."""
        sharded = self._parameter(parameter)
        views = self._views.setdefault(parameter, {})
        return _ShardState(super().state_of(sharded), sharded, parameter.shape, views)

    def values_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a parameter, padded."""
        return _padded(on_this_rank(self._parameter(parameter).detach()), parameter.shape)

    def first_state(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a parameter's shared second moment and row sums before the first step."""
        shared, _ = super().first_state(parameter)
        padded = next(each for each in self._of if self._parameter(each) is parameter)
        rows = torch.zeros(rows_of(padded), dtype=shared.dtype, device="cpu")
        assert isinstance(parameter, DTensor)
        return shared, _rows_of_all(rows, parameter)


class _ShardState(MutableMapping[str, Any]):
    """The state of a sharded parameter, as padded tensors of this rank's shard.

    views: by key, the DTensor that was put in, and the padded tensor that it is a view of.
    """

    def __init__(
        self,
        state: MutableMapping[str, Any],
        parameter: DTensor,
        padded: torch.Size,
        views: dict[str, tuple[DTensor, torch.Tensor]],
    ) -> None:
        self._state, self._parameter, self._shape, self._views = state, parameter, padded, views

    def __getitem__(self, key: str) -> Any:
        value = self._state[key]
        # load_state_dict puts other DTensors in: the view is good only for the one that was put in
        # here.
        own, whole = self._views.get(key, (None, None))
        if own is value:
            return whole
        if key == SHARED_ROWS or not isinstance(value, DTensor):
            return on_this_rank(value)
        return _padded(on_this_rank(value), self._shape)

    def __setitem__(self, key: str, value: Any) -> None:
        if key == SHARED_ROWS:
            own = _rows_of_all(value, self._parameter)
        elif key == SHARED:
            own = _shard_of(value, self._parameter)
        else:
            self._state[key] = value
            return
        self._views[key] = own, value
        self._state[key] = own

    def __delitem__(self, key: str) -> None:
        del self._state[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def residuals_of(
    bucket_exchanges: Mapping[Unit, BucketExchanges],
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Return each sharded parameter that has a residual, and a view of it in its shard's shape."""
    for unit, exchanges in bucket_exchanges.items():
        for stand_in, residual in exchanges.residuals():
            parameter = unit.parameter(unit.name_of(stand_in))
            # The last shard may be shorter than the first, whose length all vectors have.
            shape = on_this_rank(parameter.detach()).shape
            yield parameter, residual[: shape.numel()].view(shape)  # type: ignore[misc]


def _padded(shard: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a shard with as many rows as the first rank's; added rows are zeros."""
    if shard.shape == shape:
        return shard
    padded = shard.new_zeros(shape)
    padded[: shard.shape[0]] = shard
    return padded


def _shard_of(padded: torch.Tensor, parameter: DTensor) -> DTensor:
    """Return a DTensor like the parameter, whose local part is the memory of this rank's shard."""
    here = padded[: on_this_rank(parameter.detach()).shape[0]]
    return _part_of(
        here, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
    )


def _rows_of_all(rows: torch.Tensor, parameter: DTensor) -> DTensor:
    """Return a DTensor of all shards' row sums, shard after shard, whose local part these are."""
    mesh = parameter.device_mesh
    return _part_of(rows, mesh, [Shard(0)], torch.Size([len(rows) * mesh.size()]), (1,))


@torch.no_grad()
def _part_of(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: tuple[int, ...],
) -> DTensor:
    """Return a DTensor whose part on this rank is this memory, on any device.

    `from_local` would copy row sums, which are on the host, to a GPU. And copy.deepcopy fails for a
    DTensor whose part does not begin where its storage does.
    """
    nothing = local.new_empty(local.shape, device="meta")
    like = DTensor.from_local(
        nothing, mesh, placements, run_check=False, shape=shape, stride=stride
    )
    found = DTensor(torch.empty_like(local), like._spec, requires_grad=False)
    found._local_tensor = local
    return found
