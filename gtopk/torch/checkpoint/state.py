"""The state of a training run: collects it from models, optimizers and loaders, and restores it.

    replicated   rank 0's model, optimizer, loader, others, and number of steps
    own          each rank's optimizer residual, its generators (torch's, NumPy's and Python's),
                 and any of the above state that differs from rank 0's (running means, a loader's
                 position in its own data)

On the same number of ranks everything is restored. On another number every rank gets rank 0's
state, and the residuals are redistributed so that their sum stays the same.

torch.distributed.checkpoint writes all keys of dicts as text, and omits empty dicts:

    {"milestones": Counter({3: 1, 5: 1}), "state": {}}    as saved
    {"milestones": {"3": 1, "5": 1}}                      as written

The original keys are taken from the present state of the object to load into, if it has them; for
an optimizer's state also from its parameters' names, and for residuals from the ranks' numbers.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import random
from collections.abc import Iterable, Mapping
from itertools import islice, zip_longest
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from ...errors import DamagedError
from ...exchange.buckets.parameters import require_module, require_optimizer
from ...optim.wrapped import checkpoint as optimizer_checkpoint
from ...optim.wrapped.tree import lay_out_as_parameters
from ...optim.wrapped.wrapping import Wrapping
from ...runtime.world import world
from ..functions import allgather_object, broadcast_object
from ..mpi_ops import rank, size
from .archive import Found, Snapshot
from .files import bits_of, whole_number
from .tree import Flattened, flatten, unflatten
from .validation import (
    broadcast_tensors,
    check_alike,
    check_model,
    check_optimizer,
    check_residual,
    run_on_all,
)

_log = logging.getLogger("gtopk")


def residual_share(
    parts_of: Mapping[str, Mapping[int, Any]], saved: int, is_missing: bool = False
) -> dict[str, Any | None]:
    """Return, by optimizer name, the residual state that this rank loads; None for no residual.

    parts_of: by optimizer name, then by saving rank, the residual states that this rank takes over.
        Ranks may have different names.
    saved: the number of saving ranks.
    is_missing: whether this rank's part is lost. Its residual is then zero, in the others' buckets.
    All ranks call it together: a rank without a part learns the buckets from the others.
    """
    # Drop the residual; the rest is equal on every rank.
    own_frames = {
        name: {**part, "held": {}}
        for name, parts in parts_of.items()
        for part in islice(parts.values(), 1)
    }
    # One operation for all names, before any sum: a sum may fail on this rank alone, and the others
    # would then wait for it in the next operation.
    frames = [own_frames, *allgather_object(own_frames, "checkpoint.frames")]
    shares: dict[str, Any | None] = {}
    for name, parts in parts_of.items():
        frame = next((frame[name] for frame in frames if name in frame), None)
        if frame is None or (not parts and saved == size() and not is_missing):
            shares[name] = None  # a plain optimizer, or one of a process set without this rank
        else:
            shares[name] = optimizer_checkpoint.summed(frame, parts, rank(), size())
    return shares


def restore_keys(written: Any, like: Any) -> Any:
    """Return a state from DCP with the original keys, dict types, and empty dicts.

    like: the present state of the object to load into; anything else if it has none.
    A key that `like` lacks becomes an integer if all keys of `like` are integers, or stays text.
    """
    if type(written) is list:
        items = like if isinstance(like, list) else []
        return [
            restore_keys(item, each) for item, each in zip_longest(written, items[: len(written)])
        ]
    if type(written) is not dict:
        return written
    state: dict[Any, Any] = copy.copy(like) if isinstance(like, dict) else {}
    remaining = dict(state)
    state.clear()
    written = _add_known_keys(written, remaining)
    keys = {str(key): key for key in remaining}
    are_integers = bool(remaining) and all(type(key) is int for key in remaining)
    for text, value in written.items():
        key = keys.get(text, _integer(text) if are_integers else text)
        state[key] = restore_keys(value, remaining.pop(key, None))
    state |= {key: each for key, each in remaining.items() if isinstance(each, dict) and not each}
    return state


def _add_known_keys(written: dict[Any, Any], like: dict[Any, Any]) -> dict[Any, Any]:
    """Add the empty dicts that DCP omitted to an optimizer's state, or to a part of residuals.

    Adds to `like` the keys that must have been in the saved state.
    """
    groups = written.get("param_groups")
    if isinstance(groups, list) and all(isinstance(g, dict) and "params" in g for g in groups):
        names = [name for group in groups for name in group["params"]]
        like["state"] = dict.fromkeys(names) | like.get("state", {})
        return {"state": {}, **written}
    if optimizer_checkpoint.is_part({"held": {}, **written}):
        ranks = range(written["ranks"])
        like["held"] = dict.fromkeys(ranks) | like.get("held", {})
        return {"held": {rank: {} for rank in ranks}, **written}  # no rank has a residual
    return written


def _integer(text: Any) -> Any:
    try:
        return int(text)
    except ValueError:
        return text


def take_generators() -> dict[str, Any]:
    """Return the state of this rank's generators; for GPUs, only the current one's."""
    # The 625 words as an array, not a tuple: it is stored with the tensors, not in the JSON.
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": (version, np.array(words, np.uint32), gauss),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def check_generators(state: dict[str, Any]) -> None:
    """Raise an error for a state that `put_generators` could not set; change nothing."""
    # Use temporary generators, so that a bad state raises before the process's are changed.
    torch.Generator().set_state(state["torch"])
    np.random.RandomState().set_state(state["numpy"])
    version, words, gauss = state["python"]
    random.Random().setstate((version, tuple(words.tolist()), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.Generator("cuda").set_state(state["cuda"])


def put_generators(state: dict[str, Any]) -> None:
    """Restore the generators from a state."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# A loader's residuals (mode "abs") differ between ranks and are summed like the optimizer's.
_LOADER_RESIDUALS: Final = ("loader.residual", "loader.velocity")

# The own part of a rank without any state of its own.
NOTHING_OWN: Final[dict[str, Any]] = {
    "generators": None,
    "held": {},
    "tree": None,
    "differing": {},
}


class Parts(NamedTuple):
    """The objects of a training run to save and load; None for absent ones."""

    model: torch.nn.Module | None
    optimizer: torch.optim.Optimizer | None
    loader: Any
    others: Mapping[str, Any]


def take_state(parts: Parts, *, copy: bool) -> tuple[Flattened, dict[str, Any]]:
    """Return this rank's state, and the part that always differs between ranks; send nothing.

    copy: copy tensors, so that training may go on before they are written.
    Raises TypeError for an object without a state that can be saved.
    """
    model, optimizer, loader, others = parts
    state: dict[str, Any] = {}
    own: dict[str, Any] = {**NOTHING_OWN, "held": {}, "generators": take_generators()}
    if model is not None:
        require_module(model)
        state["model"] = model.state_dict()
    if optimizer is not None:
        require_optimizer(optimizer)
        state["optimizer"] = optimizer.state_dict()
        # Stored separately: the residual differs on every rank, and is summed if the number of
        # ranks changes.
        own["held"]["optimizer"] = state["optimizer"].pop(optimizer_checkpoint.KEY, None)
    if loader is not None:
        if not hasattr(loader, "state_dict"):
            raise TypeError(
                f"the loader must have state_dict() and load_state_dict(), as gtopk.torch.adapt's "
                f"and ElasticSampler have, got {type(loader).__name__}; pass None to "
                "restart its epoch"
            )
        state["loader"] = loader.state_dict()
    state["others"] = {}
    for name, value in others.items():
        saved = _state_of(value)
        if optimizer_checkpoint.is_part(saved):
            own["held"][name] = saved
            continue
        if isinstance(value, torch.optim.Optimizer):  # even before its first step
            saved = dict(saved)
            own["held"][name] = saved.pop(optimizer_checkpoint.KEY, None)
        state["others"][name] = saved
    state["held"] = ["optimizer", *(name for name in own["held"] if name != "optimizer")]
    state["steps"] = world.current().step  # the script's own `step` may count epochs
    return flatten(state, copy=copy), own


def should_agree(parts: Parts) -> dict[str, bool]:
    """Return, by name in a checkpoint, whether a parameter should be equal on all ranks.

    gtopk's optimizers list the parameters that may differ between ranks.
    """
    diverging = {
        p
        for each in (parts.optimizer, *parts.others.values())
        if isinstance(each, Wrapping)
        for p in each.diverging_parameters
    }
    named = () if parts.model is None else parts.model.named_parameters()
    return {f"model.{name}": parameter not in diverging for name, parameter in named}


def snapshot(
    step: int, state: Flattened, own: dict[str, Any], alike: dict[str, bool], copy: bool
) -> Snapshot:
    """Return this rank's Snapshot to write; all ranks call it together.

    alike: for each parameter, whether it should be equal on all ranks; a warning names it if not.
    Raises ValueError, on every rank, if the ranks are at different steps: their parts would never
    form a whole checkpoint.
    """
    # Sent as text, because the tree may be nested deeper than the object codec allows.
    tree = json.dumps(state.tree)
    # Send only hashes: each rank then writes only the tensors that differ from rank 0's.
    digests = {name: _digest(tensor) for name, tensor in state.tensors.items()}
    first_tree, first, first_alike = broadcast_object(
        (tree, digests, alike), 0, "checkpoint.digests"
    )
    differing = {n: t for n, t in state.tensors.items() if digests[n] != first.get(n)}
    diverged = sorted(n for n in differing if alike.get(n) and first_alike.get(n, True))[:3]
    steps, named = zip(*allgather_object((step, diverged), "checkpoint.differing"), strict=True)
    if len(set(steps)) > 1:
        raise ValueError(
            f"step must be the same on all ranks, got {list(steps)} by rank; pass a "
            "count that is equal on all ranks"
        )
    if any(named) and rank() == 0:
        where = "; ".join(f"rank {r}: {', '.join(each)}" for r, each in enumerate(named) if each)
        _log.warning("parameters differ between ranks, so each rank saves its own: %s", where)
    own = {**own, "tree": None if tree == first_tree else tree, "differing": differing}
    # The copy may fail for lack of memory: then fail on all ranks.
    return run_on_all(
        lambda: Snapshot(step, state, flatten(own, copy=copy)),
        f"the own part of a rank cannot be collected at step {step}",
    )


def _digest(tensor: torch.Tensor) -> bytes:
    """Return a hash of a tensor's bits, dtype and shape; the bits alone do not tell these apart."""
    digest = hashlib.sha256(repr((tensor.dtype, [*tensor.shape])).encode())
    digest.update(bits_of(tensor))
    # 128 bits exclude chance collisions, and halve the bytes to send.
    return digest.digest()[:16]


class Assembled(NamedTuple):
    """The state that this rank loads from a checkpoint; own: this rank's own part."""

    found: Found
    state: dict[str, Any]
    own: dict[str, Any] | None


def assemble(found: Found) -> Assembled:
    """Return the state that this rank loads; all ranks call it together.

    Raises DamagedError for a state that `snapshot` cannot have written.
    """
    tensors = broadcast_tensors(found.tensors, 0)
    own = next((each.state for each in found.owned if each.rank == rank()), None)
    try:
        for each in found.owned:
            _check_own(each.state)
        tree = found.tree
        residuals = {
            name: _loader_residual(found, name, tensors[name])
            for name in tensors.keys() & set(_LOADER_RESIDUALS)
        }
        if own is not None and found.ranks == size():
            tree = tree if own["tree"] is None else json.loads(own["tree"])
            # Overlay this rank's tensors on rank 0's: only those that differ are in its own part.
            tensors |= own["differing"]
        # A rank may have read several ranks' parts: if each host has its own folder, its ranks read
        # all parts in it, even if they are fewer than before.
        tensors |= residuals
        state = unflatten(tree, tensors)
        _check(state)
    except Exception as error:  # of any kind: anything may have written the files
        what = str(error) if isinstance(error, DamagedError) else repr(error)[:200]
        raise DamagedError(f"{found.path.name} is not a gtopk checkpoint: {what}") from error
    return Assembled(found, state, own)


def _check(state: Any) -> None:
    """Raise an error for a state that `take_state` cannot have returned."""
    if not isinstance(state["others"], dict):
        raise DamagedError("its 'others' is not a dict")
    if not all(type(name) is str for name in state.get("held", [])):
        raise DamagedError("the names in its 'held' are not strings")
    whole_number("steps", state.get("steps", 0), least=0)


def _check_own(own: Any) -> None:
    """Raise an error unless this is a valid own part of a rank."""
    if lacking := NOTHING_OWN.keys() - own.keys():
        raise DamagedError(f"a rank's own part lacks {', '.join(sorted(lacking))}")
    if own["tree"] is not None:
        json.loads(own["tree"])
    if not all(isinstance(tensor, torch.Tensor) for tensor in own["differing"].values()):
        raise DamagedError("a rank's own part has values in 'differing' that are not tensors")
    for part in own["held"].values():
        if part is not None:
            optimizer_checkpoint.check_part(part)
            for residuals in part["held"].values():
                check_residual(residuals, is_of_shards="shards" in part)
    if own["generators"] is not None:
        check_generators(own["generators"])


def check(assembled: Assembled, parts: Parts) -> Assembled:
    """Return `assembled`; raise DamagedError if a state does not fit its object.

    A script's own objects and data are not checked: only the script knows what they hold.
    """
    state = assembled.state
    if "held" not in state:  # torch.distributed.checkpoint wrote it, without gtopk's checks
        return assembled
    model, optimizer, loader, others = parts
    if model is not None and "model" in state:
        check_model(state["model"], model.state_dict())
    saved = {**state["others"], **{n: state[n] for n in ("optimizer", "loader") if n in state}}
    for name, target in {**others, "optimizer": optimizer, "loader": loader}.items():
        known_to = type(target).__module__.partition(".")[0]
        if name not in saved or known_to not in (__name__.partition(".")[0], "torch"):
            continue
        if isinstance(target, torch.optim.Optimizer):
            check_optimizer(name, saved[name], target.state_dict())
        elif hasattr(target, "state_dict"):
            check_alike(name, saved[name], target.state_dict())
    return assembled


def put_state(assembled: Assembled, parts: Parts, generators: bool) -> dict[str, Any]:
    """Restore a checkpoint's state, and return its plain data; all ranks call it together.

    Raises ValueError for an object that the checkpoint lacks, and load_state_dict's errors.
    """
    found, state, own = assembled
    model, optimizer, loader, others = parts
    # A collective, so it comes before anything that may raise on this rank alone.
    residuals = _residuals_of(found, state.get("held", ["optimizer"]))
    if "held" not in state:  # torch.distributed.checkpoint wrote it
        targets = {"model": model, "optimizer": optimizer, "loader": loader}
        like = {name: _state_of(target) for name, target in targets.items()}
        like["others"] = {name: _state_of(other) for name, other in others.items()}
        state = restore_keys(state, like)
    if model is not None:
        saved = _entry(state, "model", found)
        try:
            model.load_state_dict(saved)
        except RuntimeError as error:
            differing = saved.keys() ^ model.state_dict().keys()
            wrapped = any(name.startswith("module.") for name in differing)
            advice = "save and load model.module of a DistributedDataParallel, " if wrapped else ""
            raise RuntimeError(
                f"{found.path}: this checkpoint is of another model; {advice}load it into one "
                f"like that, or use another folder: {error}"
            ) from error
    if optimizer is not None:
        saved = _entry(state, "optimizer", found)
        optimizer.load_state_dict(_merge(residuals["optimizer"], saved))
    if loader is not None:
        loader.load_state_dict(_entry(state, "loader", found))
    handled = {"optimizer", *state["others"]}
    values = {name: part for name, part in residuals.items() if name not in handled}
    # The loop below pops all that a load_state_dict takes; the rest is plain data.
    values |= {name: _merge(residuals.get(name), other) for name, other in state["others"].items()}
    for name, target in others.items():
        if hasattr(target, "load_state_dict") and values.get(name) is not None:
            target.load_state_dict(values.pop(name))
    for name in others.keys() - state["others"].keys() - residuals.keys():
        _entry(state["others"], name, found)
    for each in (optimizer, *others.values()):
        if isinstance(each, torch.optim.Optimizer):
            lay_out_as_parameters(each)
    # Generators last: loading may have drawn random numbers.
    if generators and own is not None and own["generators"] is not None:
        put_generators(own["generators"])
    if "steps" in state:  # absent if DCP or an earlier version wrote the checkpoint
        world.current().resume(state["steps"])
    return values


def _state_of(target: Any) -> Any:
    return target.state_dict() if hasattr(target, "state_dict") else target


def _residuals_of(found: Found, names: Iterable[str]) -> dict[str, Any | None]:
    """Return the residuals for this rank's optimizers, or hooks, with these names."""
    parts_of = {
        name: {
            each.rank: part
            for each in found.owned
            if (part := each.state["held"].get(name)) is not None
        }
        for name in names
    }
    return residual_share(parts_of, found.ranks, is_missing=rank() in found.missing)


def _merge(residuals: Any | None, saved: Any) -> Any:
    return saved if residuals is None else {**saved, optimizer_checkpoint.KEY: residuals}


def _entry(state: Mapping[str, Any], name: str, found: Found) -> Any:
    if name not in state:
        raise ValueError(
            f"{found.path} holds no '{name}', only {', '.join(state) or 'nothing'}; load the "
            "objects that were saved, under the same names"
        )
    return state[name]


def _loader_residual(found: Found, name: str, rank_0_residual: torch.Tensor) -> torch.Tensor:
    """Return the residual for this rank's loader: the sum of the residuals that it takes over."""
    parts: list[torch.Tensor] = [
        each.state["differing"].get(name, rank_0_residual) for each in found.owned
    ]
    if not parts:
        return torch.zeros_like(rank_0_residual)
    total = parts[0].clone()  # a sum that starts with zero would turn -0.0 into 0.0
    for part in parts[1:]:
        total += part
    return total
