"""Healing: replicas that have parted become the same again, as most ranks have it.

    all ranks       checksums of the parameters that parted, each with the optimizer's state of it
    the lowest of most ranks       sends its own to those that have another

The state goes along: a momentum that has parted makes the parameter part again after that one alone
was mended. A rank's residual is its own, and stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from collectives.errors import MismatchError
from collectives.kernels.codes import checksum
from collectives.transports import Transport

from ...runtime.object_codec import decode, encode
from .replicas import compare


class Healing(NamedTuple):
    """What comes of it: the ranks that were mended, and what this one has to take over, by name."""

    ranks: list[int]
    mended: dict[str, bytes]


def pack(
    names: Mapping[torch.nn.Parameter, str],
    wanted: Iterable[str],
    state: Mapping[torch.Tensor, dict[str, Any]],
) -> dict[str, bytes]:
    """Return parameters of these names with the optimizer's state of them, as bytes, by name.

    Raises TypeError for a state that `the object codec` does not know.
    """
    wanted = set(wanted)
    return {
        name: encode([parameter.detach(), sorted(state.get(parameter, {}).items())])
        for parameter, name in names.items()
        if name in wanted
    }


def spread_majority(transport: Transport, own: Mapping[str, bytes]) -> Healing:
    """Send what most ranks have to those that have another; all ranks call it together.

    own: what each rank has of the same names, from `pack`.
    Raises MismatchError, on every rank alike, where no side has more than half of the ranks.
    """
    sums = np.array([checksum(np.frombuffer(each, np.uint8)) for each in own.values()], np.uint64)
    parted = [(each, each.majority()) for each in compare(transport, sums, list(own))]
    for each, most in parted:
        if most is None:
            raise MismatchError(
                f"the replicas are no longer the same, and cannot be healed: {each.describe()}, "
                "and no side has more than half of the ranks; go on from a checkpoint"
            )
    mended: dict[str, bytes] = {}
    sick: set[int] = set()
    for each, most in parted:
        healthy = [transport.ranks.index(rank) for rank in most or []]
        others = [place for place in range(transport.size) if place not in healthy]
        sick.update(transport.ranks[place] for place in others)
        if transport.rank == healthy[0]:
            content = np.frombuffer(own[each.name], np.uint8)
            for sent in [transport.send(content, place) for place in others]:
                sent()
        elif transport.rank in others:
            mended[each.name] = transport.receive(healthy[0]).tobytes()
    return Healing(sorted(sick), mended)


@torch.no_grad()
def put_in(
    names: Mapping[torch.nn.Parameter, str],
    mended: Mapping[str, bytes],
    state: Mapping[torch.Tensor, dict[str, Any]],
) -> None:
    """Take over parameters, and the optimizer's state of them, from `spread_majority`."""
    for parameter, name in names.items():
        if name not in mended:
            continue
        bits, items = decode(mended[name])
        parameter.copy_(bits)
        own, theirs = state[parameter], dict(items)
        for key in own.keys() - theirs.keys():
            del own[key]
        for key, value in theirs.items():
            here = own.get(key)
            if isinstance(here, torch.Tensor) and _are_alike(here, value):
                here.copy_(value)  # in place: others may hold it
            elif isinstance(value, torch.Tensor) and value.dim():
                own[key] = value.to(parameter.device)
            else:
                own[key] = value


def _are_alike(here: torch.Tensor, value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return (here.shape, here.dtype) == (value.shape, value.dtype)
