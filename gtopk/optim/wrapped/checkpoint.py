"""A distributed optimizer's part of a checkpoint, besides the wrapped optimizer's state.

    state_dict()[KEY] = {
        "format":  1,
        "ranks":   how many there were,
        "steps":   how many were taken: a density that warms up goes on from there,
        "lanes":   [{"names": [...], "regions": ...}], the buckets: a resumed run has the same,
        "held":    {rank: {name: {"residual": tensor, "velocity": tensor}}}, shaped as parameters;
                   with adam_correction "first_moment", "second_moment", and "age", a number;
                   also "row_squares", one a row, of AdamW whose steps are made before the exchange,
        "of":      only in a sum of parts: [the ranks that saved them, the number of all ranks],
        "holds":   "gradients", or "changes" of the model as LocalSGD's; missing in older ones
    }

`state_dict()` holds this rank's residual; `gather_state` all ranks', which any number of ranks can
load: the residuals of ranks that are gone go to others.

    saved by rank   0  1  2  3  4        each rank takes those that are equal to its own, modulo the
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
from ..reducer import Reducer

_log = logging.getLogger("gtopk")
KEY: Final = "gtopk"
FORMAT: Final = 1
GRADIENTS, CHANGES = "gradients", "changes"
# Names of the file format: older checkpoints have them, whatever the code calls things now.
_FIELDS: Final = {"format", "ranks", "steps", "lanes", "held"}


class ResidualOwner(Protocol):
    """An object that has a residual; see `Reducer` and `OuterExchange`.

    holds: what the residual is of: GRADIENTS, or CHANGES of the model.
    """

    residual_of: ClassVar[str]

    @property
    def ranks(self) -> Sequence[int]: ...
    @property
    def rank(self) -> int: ...
    @property
    def steps(self) -> int: ...
    def known_names(self) -> Collection[str]: ...
    def export_state(self) -> tuple[dict[str, ResidualState], list[dict[str, Any]]]: ...
    def import_state(
        self, residuals: Mapping[str, ResidualState], records: list[dict[str, Any]], steps: int
    ) -> None: ...


def undo_step(whole: dict[str, Any], optimizer: torch.optim.Optimizer, reducer: Reducer) -> None:
    """Make a state_dict() what it was before a step that is exchanged and not taken yet."""
    before = state_before(reducer.planned.bucket_exchanges)
    state = whole["state"]
    ordered = {  # by number: buckets make states from the last parameter on
        number: {**state.pop(number), **before.get(parameter, {})}
        for number, parameter in enumerate(parameters_of(optimizer))
        if number in state
    }
    whole["state"] = {**ordered, **state}


def save(holder: ResidualOwner) -> dict[str, Any]:
    """Return this rank's part of a checkpoint."""
    residuals, bucket_exchanges = holder.export_state()
    return {
        "format": FORMAT,
        "ranks": len(holder.ranks),
        "steps": holder.steps,
        "lanes": bucket_exchanges,
        "held": {holder.rank: residuals},
        "holds": holder.residual_of,
    }


def save_all(reducer: Reducer, root: int) -> dict[str, Any] | None:
    """Return all ranks' parts as one on the root, None elsewhere; all ranks call it together.

    root: a rank of the world.
    """
    own, peers = save(reducer), reducer.peers
    if root not in peers.ranks:
        raise ValueError(f"root_rank must be one of {list(peers.ranks)}, got {root}")
    rank, place = peers.rank, peers.ranks.index(root)

    def work(transport: Transport, all_flags: list[int]) -> dict[str, Any] | None:
        gather_held(own, rank, place, transport)
        return own if rank == place else None

    gathered: dict[str, Any] | None = peers.run("state", [f"root={root}"], work)
    return gathered


def gather_held(own: dict[str, Any], rank: int, place: int, transport: Transport) -> None:
    """Add all ranks' residuals to the part of the rank at this place; all call it together."""
    if rank != place:
        transport.send(np.frombuffer(encode(own["held"][rank]), np.uint8), place)()
        return
    # One after the other: the root has room for one message more at a time.
    for source in range(transport.size):
        if source != place:
            own["held"][source] = decode(transport.receive(source).tobytes())
    own["held"] = dict(sorted(own["held"].items()))


def load(holder: ResidualOwner, part: Mapping[str, Any]) -> None:
    """Take over this rank's residual, and log whose it was.

    A residual of another kind, gradients or changes of the model, is not loaded, and a warning says
    so. Raises ValueError for a part in another format.
    """
    if (of := part.get("holds", GRADIENTS)) != holder.residual_of:
        # Where all are zeros, nothing is lost.
        if any(map(nonzero_names, part["held"].values())):
            _log.warning(
                "rank %d of %d has no residual: that of the state is of %s, and this optimizer "
                "exchanges %s; it is lost (its norm: %.3g)",
                holder.rank,
                len(holder.ranks),
                of,
                holder.residual_of,
                _norm_of(part["held"]),
            )
        return
    residuals = _residuals_for(part, holder.rank, len(holder.ranks))
    known = holder.known_names()
    holder.import_state(
        under_known_names(residuals, known), buckets_here(part, known), int(part["steps"])
    )


def _norm_of(held: Mapping[Any, Mapping[str, ResidualState]]) -> float:
    """Return the norm of several ranks' residuals."""
    return norm_of(state for residuals in held.values() for state in residuals.values())


def buckets_here(part: Mapping[str, Any], known: Collection[str]) -> list[dict[str, Any]]:
    """Return the buckets' records, with the names that are known here."""
    records: list[dict[str, Any]] = part["lanes"]
    here = translate({name for record in records for name in record["names"]}, known)
    return [{**record, "names": [here[name] for name in record["names"]]} for record in records]


def residuals_for(part: Mapping[str, Any], rank: int, ranks: int) -> dict[str, ResidualState]:
    """Return the residual of a rank's hook by parameter name, and log whose it was.

    After a step every hook has a residual of all its parameters: where the first rank's part has
    none, a warning says that it is lost. Raises ValueError for a part in another format.
    """
    residuals = _residuals_for(part, rank, ranks)
    if rank == 0 and part["steps"] and not any(part["held"].values()):
        _log.warning(
            "rank %d of %d has no residual: the state is of a run after %d steps, and says "
            "nothing of the residual, which is lost; load it by gtopk.load_latest: "
            "torch.distributed.checkpoint loads only what is in a state already, and a new one has "
            "nothing of it",
            rank,
            ranks,
            part["steps"],
        )
    return residuals


def _residuals_for(part: Mapping[str, Any], rank: int, ranks: int) -> dict[str, ResidualState]:
    """Do what `residuals_for` does for an optimizer, which may have had no residual."""
    if part.get("format") != FORMAT:
        raise ValueError(
            f"the checkpoint's 'gtopk' part must be of format {FORMAT}, got "
            f"{part.get('format')!r}; load it with the version of gtopk that saved it"
        )
    residuals: dict[str, ResidualState]
    if "of" in part:
        sources, saved = part["of"]
        (residuals,), what = part["held"].values(), _takeover_message(sources, saved, rank, ranks)
        # Here, not in `summed`: only the optimizer knows how many ranks share it now; a process
        # set's are fewer than the job's.
        residuals = _rescaled(residuals, len(sources), saved, ranks)
    else:
        parts = {
            int(saver): residuals for saver, residuals in part["held"].items()
        }  # torch.distributed.checkpoint turns keys into strings
        residuals, what = _divide(parts, int(part["ranks"]), rank, ranks)
    if what:
        level = logging.WARNING if "lost" in what else logging.INFO
        _log.log(level, "rank %d %s", rank, what)
    return residuals


def is_part(value: object) -> bool:
    """Tell whether a value is a part from `save`, or the state of a hook."""
    # At least: parts of later versions have more.
    return isinstance(value, dict) and value.keys() >= _FIELDS


def check_part(part: Any) -> None:
    """Raise ValueError, or another error, for a value that is no such part."""
    if not is_part(part):
        raise ValueError(f"the residual of a rank must have {', '.join(sorted(_FIELDS))}")
    for name, least in (("format", 1), ("ranks", 1), ("steps", 0)):
        # By the exact type, as True is an int, too.
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
    """Return the part of one rank, of `ranks` in all, whose residual is the sum of the given ones.

    parts: by the rank that saved each; the number of ranks may have been another. One that a hook's
        gather_state returned on the first rank has all ranks' residuals; only its own is taken, as
        the others saved theirs themselves.
    """
    residuals = _sum([part["held"][min(part["held"])] for part in parts.values()])
    of = [list(parts), frame["ranks"]]
    return {**frame, "ranks": ranks, "held": {rank: residuals}, "of": of}


def _divide(
    parts: Mapping[int, Mapping[str, ResidualState]], saved: int, rank: int, ranks: int
) -> tuple[dict[str, ResidualState], str]:
    """Return this rank's residual, and a message on whose it was.

    parts: of the ranks that a checkpoint has, by rank; saved: how many ranks there were.
    The message is "" where no rank has a residual, or each goes on with its own.
    """
    if not any(parts.values()):
        return {}, ""
    if len(parts) == saved:
        mine = [source for source in range(saved) if source % ranks == rank]
        residuals = _sum([parts[source] for source in mine])
        residuals = _rescaled(residuals, len(mine), saved, ranks)
        return residuals, _takeover_message(mine, saved, rank, ranks)
    # Each rank has saved its own alone, and goes on with that.
    if rank in parts and saved == ranks:
        return _sum([parts[rank]]), ""
    there = ", ".join(map(str, parts))
    return {}, (
        f"of {ranks} has no residual: the checkpoint has the residual of rank {there} of {saved}, "
        f"whose norm is {_norm_of(parts):.3g}, and those of the others are lost; "
        "gtopk.load_latest reads those of all; else save what gather_state returns, or let every "
        "rank save its own"
    )


def _takeover_message(sources: Sequence[int], saved: int, rank: int, ranks: int) -> str:
    """Return a message on whose residuals a rank has now; "" where it has just its own."""
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
    """Return the sum of so many of the residuals that `saved` ranks had, for one of `ranks` now.

    Mean squares of gradients carry the share of a rank: they are scaled to the new share.
    """
    if saved == ranks * parts:
        return {**total}
    return {
        name: {
            what: tensor * (saved / (ranks * parts)) if what in (SECOND_MOMENT, ROWS) else tensor
            for what, tensor in tensors.items()
        }
        for name, tensors in total.items()
    }


def _sum(parts: list[Mapping[str, ResidualState]]) -> dict[str, ResidualState]:
    total: dict[str, ResidualState] = {}
    for part in parts:
        for name, tensors in part.items():
            own = total.setdefault(name, {})
            for what, tensor in tensors.items():
                if what not in own:
                    # A copy: the state that is loaded stays the caller's.
                    own[what] = tensor.clone()
                # Ages are of the same training: the oldest tells how many steps there were.
                elif what == AGE:
                    own[what] = torch.maximum(own[what], tensor)
                else:  # gathered parts lie on the host, except the root's own
                    own[what] = own[what] + tensor.to(own[what].device)
    return total
