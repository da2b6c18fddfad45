"""A distributed optimizer's part of a checkpoint, besides the wrapped optimizer's state.

    state_dict()[KEY] = {
        "format":  1,
        "ranks":   the number of ranks,
        "steps":   the number of steps taken, from which a density warm-up continues,
        "lanes":   [{"names": [...], "regions": ...}], the buckets: a resumed run uses the same,
        "held":    {rank: {name: {"residual": tensor, "velocity": tensor}}}, in parameter shapes;
                   with adam_correction "first_moment", "second_moment", and "age", a number;
                   with AdamW steps before the exchange also "row_squares", one number per row,
        "of":      only in a sum of parts: [the ranks that saved them, the number of all ranks],
        "holds":   "gradients", or "changes" of the model, as in LocalSGD; missing in older files
    }

`state_dict()` holds this rank's residual; `gather_state` those of all ranks, which any number of
ranks can load: the residuals of ranks that no longer exist go to others.

    saved by rank   0  1  2  3  4        each rank takes those equal to its own, modulo the
    loaded by rank  0  1  2  0  1        number of ranks: summed over ranks, nothing is lost
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol

import numpy as np
import torch

from collectives.transports import Transport

from ...exchange.buckets.parameters import parameters_of
from ...exchange.residual import AGE, ROWS, SECOND_MOMENT
from ...exchange.residual_state import (
    ResidualState,
    nonzero_names,
    norm_of,
    state_before,
    translate,
    under_known_names,
)
from ...runtime.object_codec import decode, encode
from ...units import counted
from ..reducer import Reducer

_log = logging.getLogger("gtopk")
KEY: Final = "gtopk"
FORMAT: Final = 1
GRADIENTS, CHANGES = "gradients", "changes"
# Names in the file format, which existing checkpoints use; the code now has other names for some.
_FIELDS: Final = {"format", "ranks", "steps", "lanes", "held"}


class ResidualOwner(Protocol):
    """An object that has a residual; see `Reducer` and `OuterExchange`.

    residual_of: GRADIENTS, or CHANGES of the model.
    """

    residual_of: ClassVar[str]

    @property
    def ranks(self) -> Sequence[int]: ...
    @property
    def rank(self) -> int: ...
    @property
    def steps(self) -> int: ...
    def parameter_names(self) -> Collection[str]: ...
    def export_state(self) -> tuple[dict[str, ResidualState], list[dict[str, Any]]]: ...
    def import_state(
        self, residuals: Mapping[str, ResidualState], records: list[dict[str, Any]], steps: int
    ) -> None: ...


def undo_step(whole: dict[str, Any], optimizer: torch.optim.Optimizer, reducer: Reducer) -> None:
    """Revert a state_dict() to before a step that is exchanged but not taken yet."""
    before = state_before(reducer.planned.bucket_exchanges)
    state = whole["state"]
    ordered = {  # by number: buckets create states from the last parameter on
        number: {**state.pop(number), **before.get(parameter, {})}
        for number, parameter in enumerate(parameters_of(optimizer))
        if number in state
    }
    whole["state"] = {**ordered, **state}


def require_state(state: object) -> None:
    """Raise TypeError for a state that is no mapping, such as None."""
    if not isinstance(state, Mapping):
        raise TypeError(
            "load_state_dict() takes the dict that an optimizer's state_dict() returned, got "
            f"{state!r:.99}; gather_state() returns one on its root only: let every rank load that "
            "from a file, or send it with hvd.broadcast_object"
        )


def save(owner: ResidualOwner) -> dict[str, Any]:
    """Return this rank's part of a checkpoint."""
    residuals, bucket_exchanges = owner.export_state()
    return {
        "format": FORMAT,
        "ranks": len(owner.ranks),
        "steps": owner.steps,
        "lanes": bucket_exchanges,
        "held": {owner.rank: residuals},
        "holds": owner.residual_of,
    }


def save_all(reducer: Reducer, root: int) -> dict[str, Any] | None:
    """Return all ranks' parts as one on the root, None elsewhere; a collective.

    root: a rank of the world.
    """
    own, peers = save(reducer), reducer.peers
    if root not in peers.ranks:
        raise ValueError(f"root_rank must be one of {list(peers.ranks)}, got {root}")
    rank, place = peers.rank, peers.ranks.index(root)

    def work(transport: Transport, all_flags: list[int]) -> dict[str, Any] | None:
        gather_residuals(own, rank, place, transport)
        return own if rank == place else None

    gathered: dict[str, Any] | None = peers.run("state", [f"root={root}"], work)
    return gathered


def gather_residuals(own: dict[str, Any], rank: int, place: int, transport: Transport) -> None:
    """Add all ranks' residuals to the part of the rank at this place; a collective."""
    if rank != place:
        transport.send(np.frombuffer(encode(own["held"][rank]), np.uint8), place)()
        return
    # One at a time: the root needs memory for only one more message.
    for source in range(transport.size):
        if source != place:
            own["held"][source] = decode(transport.receive(source).tobytes())
    own["held"] = dict(sorted(own["held"].items()))


def load(owner: ResidualOwner, part: Mapping[str, Any]) -> None:
    """Load this rank's residual, and log where it came from.

    A residual of the other kind (gradients, or changes of the model) is not loaded, and a warning
    says so. Raises ValueError for a part in another format.
    """
    if (kind := part.get("holds", GRADIENTS)) != owner.residual_of:
        # If all are zeros, nothing is lost.
        if any(map(nonzero_names, part["held"].values())):
            _log.warning(
                "rank %d of %d has no residual: that of the state holds %s, but this optimizer "
                "exchanges %s; it is lost (its norm: %.3g)",
                owner.rank,
                len(owner.ranks),
                kind,
                owner.residual_of,
                _norm_of(part["held"]),
            )
        return
    residuals = _residuals_for(part, owner.rank, len(owner.ranks))
    own_names = owner.parameter_names()
    owner.import_state(
        under_known_names(residuals, own_names), rename_buckets(part, own_names), int(part["steps"])
    )


def _norm_of(held: Mapping[Any, Mapping[str, ResidualState]]) -> float:
    """Return the norm of several ranks' residuals."""
    return norm_of(state for residuals in held.values() for state in residuals.values())


def rename_buckets(part: Mapping[str, Any], own_names: Collection[str]) -> list[dict[str, Any]]:
    """Return the buckets' records, under this run's names."""
    records: list[dict[str, Any]] = part["lanes"]
    new_names = translate({name for record in records for name in record["names"]}, own_names)
    return [
        {**record, "names": [new_names[name] for name in record["names"]]} for record in records
    ]


def residuals_for(part: Mapping[str, Any], rank: int, ranks: int) -> dict[str, ResidualState]:
    """Return a rank's residuals for its hook, by parameter name, and log where they came from.

    After a step every hook has residuals of all its parameters: if the first rank's part has none,
    warn that they are lost. Raises ValueError for a part in another format.
    """
    residuals = _residuals_for(part, rank, ranks)
    if rank == 0 and part["steps"] and not any(part["held"].values()):
        _log.warning(
            "rank %d of %d has no residual: the state was saved after %s, but contains no "
            "residual: it is lost; load it with gtopk.load_latest: torch.distributed.checkpoint "
            "only loads keys that a state already has, and a new state has no residual",
            rank,
            ranks,
            counted(part["steps"], "step"),
        )
    return residuals


def _residuals_for(part: Mapping[str, Any], rank: int, ranks: int) -> dict[str, ResidualState]:
    """Do as `residuals_for`, for an optimizer, which may never have had a residual."""
    if isinstance(part, Mapping) and part.get("format", FORMAT) != FORMAT:
        raise ValueError(
            f"the checkpoint's 'gtopk' part must be of format {FORMAT}, got "
            f"{part['format']!r}; load it with the version of gtopk that saved it"
        )
    check_part(part)
    residuals: dict[str, ResidualState]
    if "of" in part:
        sources, saved = part["of"]
        (residuals,), text = (
            part["held"].values(),
            _takeover_message(sources, saved, rank, ranks),
        )
        # Here, not in `summed`: only the optimizer knows how many ranks now share it. A process
        # set has fewer than the job.
        residuals = _rescaled(residuals, len(sources), saved, ranks)
    else:
        parts = {
            int(saver): residuals for saver, residuals in part["held"].items()
        }  # torch.distributed.checkpoint turns keys into strings
        residuals, text = _divide(parts, int(part["ranks"]), rank, ranks)
    if text:
        level = logging.WARNING if "lost" in text else logging.INFO
        _log.log(level, "rank %d %s", rank, text)
    return residuals


def is_part(value: object) -> bool:
    """Return whether a value is a part from `save`, or a hook's state."""
    # A superset, because parts of later versions have more fields.
    return isinstance(value, dict) and value.keys() >= _FIELDS


def check_part(part: Any) -> None:
    """Raise an error, usually ValueError, unless a value is such a part."""
    if not is_part(part):
        raise ValueError(
            f"the residual of a rank must be a dict with {', '.join(sorted(_FIELDS))}, as "
            f"state_dict() returns it, got {part!r:.99}"
        )
    for name, least in (("format", 1), ("ranks", 1), ("steps", 0)):
        # Compare the exact type: True is an int, too.
        if type(part[name]) is not int or part[name] < least:
            raise ValueError(f"the {name} of a rank's residual is {part[name]!r}")
    if part.get("holds", GRADIENTS) not in (GRADIENTS, CHANGES):
        raise ValueError(f"the residual of a rank is of {part['holds']!r}")
    for bucket in part["lanes"]:
        if not all(type(name) is str for name in bucket["names"]) or "regions" not in bucket:
            raise ValueError("a bucket of a rank's residual must have its names and regions")
    for residuals in part["held"].values():
        for tensors in residuals.values():
            if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
                raise ValueError("the residual of a rank must be tensors")


def summed(
    frame: Mapping[str, Any], parts: Mapping[int, Mapping[str, Any]], rank: int, ranks: int
) -> dict[str, Any]:
    """Return the part of one rank, out of `ranks`, with the sum of the given parts' residuals.

    parts: by the rank that saved each; the number of ranks may have been different. A part that a
        hook's gather_state returned on the first rank has all ranks' residuals; use only its own,
        because the other ranks saved theirs themselves.
    """
    residuals = _sum([part["held"][min(part["held"])] for part in parts.values()])
    saved_as = [list(parts), frame["ranks"]]
    return {**frame, "ranks": ranks, "held": {rank: residuals}, "of": saved_as}


def _divide(
    parts: Mapping[int, Mapping[str, ResidualState]], saved: int, rank: int, ranks: int
) -> tuple[dict[str, ResidualState], str]:
    """Return this rank's residuals, and a message about where they came from.

    parts: by rank, those in the checkpoint; saved: how many ranks there were.
    The message is "" if no rank has a residual, or if each continues with its own.
    """
    if not any(parts.values()):
        return {}, ""
    if len(parts) == saved:
        sources = [source for source in range(saved) if source % ranks == rank]
        residuals = _sum([parts[source] for source in sources])
        residuals = _rescaled(residuals, len(sources), saved, ranks)
        return residuals, _takeover_message(sources, saved, rank, ranks)
    # Each rank has saved only its own part, and continues with it.
    if rank in parts and saved == ranks:
        return _sum([parts[rank]]), ""
    ranks_here = ", ".join(map(str, parts))
    return {}, (
        f"of {ranks} has no residual: the checkpoint has the residual of rank {ranks_here} of "
        f"{saved}, whose norm is {_norm_of(parts):.3g}, and those of the others are lost; "
        "gtopk.load_latest reads those of all; without it, save the result of gather_state(), or "
        "let every rank save its own"
    )


def _takeover_message(sources: Sequence[int], saved: int, rank: int, ranks: int) -> str:
    """Return a message on the origin of a rank's residuals; "" if it has exactly its own."""
    if saved == ranks and [*sources] == [rank]:
        return ""
    if not sources:
        return f"begins without a residual: other ranks have those of the {saved} old ones"
    *others, last = map(str, sources)
    if not others:
        return f"takes over the residual of old rank {last}"
    return f"takes over the residuals of old ranks {', '.join(others)} and {last}"


def _rescaled(
    total: Mapping[str, ResidualState], parts: int, saved: int, ranks: int
) -> dict[str, ResidualState]:
    """Return the sum of `parts` of the residuals of `saved` ranks, for one of `ranks` ranks.

    Second moments and row sums include a rank's share, so they are scaled to the new share.
    """
    if saved == ranks * parts:
        return {**total}
    return {
        name: {
            kind: tensor * (saved / (ranks * parts)) if kind in (SECOND_MOMENT, ROWS) else tensor
            for kind, tensor in tensors.items()
        }
        for name, tensors in total.items()
    }


def _sum(parts: list[Mapping[str, ResidualState]]) -> dict[str, ResidualState]:
    total: dict[str, ResidualState] = {}
    for part in parts:
        for name, tensors in part.items():
            own = total.setdefault(name, {})
            for kind, tensor in tensors.items():
                if kind not in own:
                    # A copy, because the loaded state belongs to the caller.
                    own[kind] = tensor.clone()
                # Ages count steps of the same training, so the oldest is right.
                elif kind == AGE:
                    own[kind] = torch.maximum(own[kind], tensor)
                else:  # gathered parts are on the host, except for the root's own
                    own[kind] = own[kind] + tensor.to(own[kind].device)
    return total
