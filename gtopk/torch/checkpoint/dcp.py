"""Storage reader and writer of gtopk's checkpoints for torch.distributed.checkpoint (DCP).

    from torch.distributed import checkpoint as dcp
    dcp.load({"model": model.state_dict()}, storage_reader=Reader(folder))
    dcp.save({"model": model.state_dict(), "epoch": 3}, storage_writer=Writer(folder, step))

Use the top-level names of `save_checkpoint`: "model", "optimizer", "loader", and those of the
others. Sharded tensors are cut on reading and joined on writing, so `load_latest` finds them whole.

Residuals: Writer stores each rank's residuals as part of an optimizer's state. Reader finds no
residuals in a checkpoint from `save_checkpoint`: remove "gtopk" from the optimizer's state before
loading one. DCP only loads entries that a state already has, and an optimizer has no residuals
before its first step. `load_latest` restores them, for any number of ranks.

DCP saves any other tensor from one rank only. The inner state of LocalSGD and of Adasum's optimizer
differs between ranks, so Writer refuses it if several ranks save together. Do not save a model in
the middle of LocalSGD's round. `save_checkpoint` saves each rank's own state.

DCP writes the keys of dicts as text, and omits empty dicts. `load_latest` restores the keys of
everything with a state_dict(); plain data is returned as DCP wrote it.
"""

from __future__ import annotations

import io
import logging
import os
import re
import secrets
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, SupportsIndex

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ...errors import CheckpointError, DamagedError
from ...exchange.residual_state import norm_of
from ...optim.wrapped.checkpoint import KEY
from ...units import counted
from .files import (
    ALL,
    Content,
    Part,
    complete_checkpoints,
    list_parts,
    name_of,
    path_of,
    read_part,
    whole_number,
    write_part,
)
from .state import NOTHING_OWN
from .tree import flatten, unflatten

_log = logging.getLogger("gtopk")
_STANDARD: Final = ("model", "optimizer", "loader")
_RESIDUAL_RANK: Final = re.compile(r"\.held\.(\d+)\.")  # the rank in the name of a residual
_STEPS: Final = f".{KEY}.steps"  # every optimizer of gtopk has one name that ends like this

# For optimizers with a different inner state on each rank: the end of one name, and the error text.
_PER_RANK_STATES: Final = {"local_sgd.format": "LocalSGD", "adasum.format": "op=Adasum"}


class Reader(StorageReader):
    """Reads the newest whole checkpoint in a folder, even while a job is writing to the folder.

    path: the checkpoint's folder, the same on all ranks; set once DCP has read the metadata.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = path_of(folder)
        self._part: Part | None = None
        self._values: dict[str, Any] = {}

    @property
    def path(self) -> Path | None:
        return None if self._part is None else self._folder / self._part.folder

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._folder = path_of(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()

    # No parameter may be named "kwargs": DCP looks for that name. A rank on which this fails would
    # then retry as if it had its own metadata, and continue without the others.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Return the newest whole checkpoint's metadata; raise CheckpointError if none is whole."""
        self._part, self._values = self._newest()
        self._warn_of_other_ranks()
        layout: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, value in self._values.items():
            if isinstance(value, torch.Tensor):
                whole = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.shape)
                properties = TensorProperties(dtype=value.dtype)
                layout[name] = TensorStorageMetadata(properties, value.shape, [whole])
            else:
                layout[name] = BytesStorageMetadata()
        return Metadata(layout)

    def _warn_of_other_ranks(self) -> None:
        """Warn if more ranks load than saved: DCP may miss keys of the new ranks' residuals."""
        found = [_RESIDUAL_RANK.search(name) for name in self._values]
        saved = 1 + max((int(rank[1]) for rank in found if rank), default=-1)
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if 0 < saved < ranks:
            _log.warning(
                "%s has the residuals of %s, and %d load it: if dcp.load misses keys of a "
                "residual ('held'), load with gtopk.load_latest, or skip these keys with "
                "planner=DefaultLoadPlanner(allow_partial_load=True)",
                self.path,
                counted(saved, "rank"),
                ranks,
            )

    def _newest(self) -> tuple[Part, dict[str, Any]]:
        parts, problems = self._list(), []
        for part in complete_checkpoints(parts):
            try:
                return part, self._read(part)
            except (OSError, DamagedError) as error:
                problems.append(str(error))
        if {*self._list()} != {*parts}:
            return self._newest()  # a running job has finished newer ones and removed these
        raise CheckpointError(
            f"no checkpoint in {self._folder} is whole: {'; '.join(problems) or 'found none'}"
        )

    def _list(self) -> list[Part]:
        try:
            return list_parts(self._folder)
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint in {self._folder} can be listed: {error}; pass the folder that "
                "they were saved in"
            ) from None

    def _read(self, part: Part) -> dict[str, Any]:
        """Return a dict from DCP's names to the values of a part."""
        content = read_part(self._folder, part)
        state = unflatten(content.state.tree, content.state.tensors)
        if not isinstance(state, dict) or not isinstance(state.get("others"), dict):
            raise DamagedError(f"{part.file}: its content is not a checkpoint's")
        standard = {name: state[name] for name in _STANDARD if name in state}
        # Let DCP name nested state: the loading planner has flattened its own state in the same
        # way.
        flattening = DefaultSavePlanner()
        flattening.set_up_planner({**standard, **state["others"]})
        return dict(flattening.state_dict)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        # The plan carries this rank's choice to rank 0, which chooses one checkpoint for all.
        return replace(plan, storage_data=self._part)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Make all ranks read the same checkpoint: a job may finish another one meanwhile."""
        # A Part's first field is the checkpoint's number, so the newest is the largest.
        newest = max(plan.storage_data for plan in plans)
        self._open_part(newest)
        self._warn_of_lost_residuals({item.storage_index.fqn for p in plans for item in p.items})
        return [replace(plan, storage_data=newest) for plan in plans]

    def _open_part(self, part: Part) -> None:
        if part != self._part:
            self._part, self._values = part, self._read(part)

    def _warn_of_lost_residuals(self, requested: Collection[str]) -> None:
        """Warn of optimizers that are loaded without part of their residuals.

        requested: the names that any rank loads.
        """
        optimizers = [name.removesuffix(_STEPS) for name in self._values if name.endswith(_STEPS)]
        for optimizer in optimizers:
            if not any(name.startswith(f"{optimizer}.") for name in requested):
                continue
            prefix = f"{optimizer}.{KEY}.held."
            lost = {
                n: v for n, v in self._values.items() if n.startswith(prefix) and n not in requested
            }
            if any(map(torch.any, lost.values())):
                _log.warning(
                    "%s has the ranks' residuals of '%s', but the state to load into lacks some of "
                    "their entries, as before an optimizer's first step: these are lost (its "
                    "norm: %.3g); load with gtopk.load_latest",
                    self.path,
                    optimizer,
                    norm_of({name.rpartition(".")[2]: part} for name, part in lost.items()),
                )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._open_part(plan.storage_data)
        for item in plan.items:
            value = self._values[item.storage_index.fqn]
            if item.type == LoadItemType.BYTE_IO:
                # DCP's planners accept objects only as bytes of torch.save. These bytes are created
                # here, not read from a file.
                stream = io.BytesIO()
                torch.save(value, stream)
                stream.seek(0)
                planner.load_bytes(item, stream)
                continue
            for dimension, (start, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                value = value.narrow(dimension, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(value)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class Writer(StorageWriter):
    """Writes a checkpoint into a folder, which all ranks must share; older checkpoints stay.

    step: the training step, an integer of 0 or more.
    """

    def __init__(self, folder: str | os.PathLike[str], step: SupportsIndex = 0) -> None:
        self._folder = path_of(folder)
        self._step = whole_number("step", step, least=0)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._folder = path_of(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self._folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assign every rank a file in a checkpoint with a new number.

        Raises ValueError if several ranks save an optimizer with a different state on each rank.
        """
        if len(plans) > 1:
            _refuse_per_rank_states(item.index.fqn for plan in plans for item in plan.items)
        number = 1 + max((part.number for part in list_parts(self._folder)), default=0)
        return [
            replace(plan, storage_data=Part(number, self._step, len(plans), f"shard-{rank}"))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items into its file."""
        if not isinstance(planner, DefaultSavePlanner):
            raise TypeError(f"the planner must be a DefaultSavePlanner, got {type(planner)}")
        pieces, results = [], []
        for item in plan.items:
            value: Any
            if item.type == WriteItemType.BYTE_IO:
                value, at, size = planner.lookup_object(item.index), None, 0
            else:
                assert item.tensor_data is not None
                value = planner.resolve_data(item)
                assert isinstance(value, torch.Tensor)
                value = value.detach().cpu()
                at = list(item.tensor_data.chunk.offsets), list(item.tensor_data.size)
                size = value.nbytes
            pieces.append((item.index.fqn, at, value))
            results.append(WriteResult(item.index, size, plan.storage_data))
        # A shard's name is not that of a part, so no reader takes an unfinished save for a
        # checkpoint.
        write_part(self._folder, plan.storage_data, Content("", flatten(pieces)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Join the files of all ranks into one whole checkpoint."""
        shards = sorted({result.storage_data for each in results for result in each})
        if not shards:
            raise ValueError("there is nothing to save: the state is empty on every rank")
        values: dict[str, Any] = {}
        for shard in shards:
            state = read_part(self._folder, shard).state
            for name, at, value in unflatten(state.tree, state.tensors):
                if at is None:
                    values[name] = value
                    continue
                offsets, size = at
                if name not in values:
                    values[name] = torch.empty(size, dtype=value.dtype, device="cpu")
                target = values[name]
                for dimension, start in enumerate(offsets):
                    target = target.narrow(dimension, start, value.shape[dimension])
                target.copy_(value)
        # A planner that does not flatten has no planner_data; its names are top-level keys.
        paths: dict[str, tuple[str | int, ...]] = metadata.planner_data or {}
        top = _nested({paths.get(name, (name,)): value for name, value in values.items()})
        saved = {name: value for name, value in top.items() if name in _STANDARD}
        saved["others"] = {name: value for name, value in top.items() if name not in _STANDARD}
        attempt = secrets.token_hex(8)
        before = next((part.number for part in complete_checkpoints(list_parts(self._folder))), 0)
        whole = Part(shards[0].number, self._step, 1, ALL)
        own = Content(attempt, flatten(NOTHING_OWN), before)
        write_part(self._folder, whole._replace(name=name_of(0)), own)
        # Written last: the part "all" completes the checkpoint, and any reader may then use it.
        write_part(self._folder, whole, Content(attempt, flatten(saved), before))
        # Only after the joined files are on the disk: until then the shards are the only copy.
        for path in (self._folder / whole.folder).glob("shard-*"):
            path.unlink()


def _refuse_per_rank_states(names: Iterable[str]) -> None:
    """Raise ValueError for state that differs between ranks: DCP would mix the ranks' tensors."""
    for name in names:
        if kind := _PER_RANK_STATES.get(".".join(name.split(".")[-2:])):
            raise ValueError(
                f"'{name}' belongs to the state of {kind}, whose inner optimizer's state differs "
                "between ranks, and dcp.save would mix it; use gtopk.save_checkpoint, or "
                "dcp.save(..., no_dist=True) on one rank to save only that rank's"
            )


def _nested(values: dict[tuple[str | int, ...], Any]) -> dict[str, Any]:
    """Rebuild nested dicts and lists from the paths of their values."""
    top: dict[Any, Any] = {}
    for path, value in values.items():
        inner = top
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return {name: _with_lists(part) for name, part in top.items()}


def _with_lists(part: Any) -> Any:
    """Turn dicts with integer keys into lists: DCP writes every key of a real dict as text.

    DCP omits empty dicts, also within a list.
    """
    if type(part) is not dict:
        return part
    inner = {key: _with_lists(value) for key, value in part.items()}
    if inner and all(type(key) is int for key in inner):
        return [inner.get(place, {}) for place in range(max(inner) + 1)]
    return inner
