"""GPU messages: whether NCCL may carry them, by what every rank saw when the ranks met.

    every rank sees a GPU             NCCL, where it turns out at their first array on one that each
                                      has one of its own, and that NCCL works (`device_choice`)
    some do, or GTOPK_TRANSPORT=...   the ranks' own transport, through the hosts' memory
    none does                         there are none

Rank 0 says which, once, and why.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

import torch

from collectives.transports import Transport
from collectives.transports.device_choice import Carrying, Choice
from collectives.transports.nccl import NcclTransport

from ... import settings
from ..logs import EVERYWHERE

_log = logging.getLogger("gtopk")


def gpus_in_sight() -> int:
    """Return how many GPUs torch can use here; opens none of them."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def over_gpus(
    transport: Transport, in_sight: Sequence[int], environ: Mapping[str, str] = os.environ
) -> Transport:
    """Return what carries the messages of hosts and GPUs; sends nothing.

    in_sight: how many GPUs each rank sees, the same on all ranks.
    """
    if transport.size == 1 or not any(in_sight):
        return transport
    choice = settled(transport, in_sight, environ)
    if choice is not None:
        _tell(transport, choice)
        return transport
    said: set[Choice] = set()

    def tell(choice: Choice) -> None:
        if choice not in said:
            said.add(choice)
            _tell(transport, choice)

    return NcclTransport(
        transport, timeout_seconds=transport.timeout_seconds, automatic=True, on_choice=tell
    )


def settled(
    transport: Transport, in_sight: Sequence[int], environ: Mapping[str, str] = os.environ
) -> Choice | None:
    """Return what is known to carry the messages of GPUs; None: it turns out at the first one."""
    if isinstance(transport, NcclTransport):
        return transport.choice
    if settings.LINK.text(environ):
        return Choice(Carrying.STAGED, f"those over NCCL are not paced ({settings.LINK.name})")
    if wanted := settings.TRANSPORT.read(environ):
        return Choice(Carrying.STAGED, f"GTOPK_TRANSPORT={wanted} asks for that")
    if lacking := [rank for rank, count in enumerate(in_sight) if not count]:
        who = f"rank{'s' * (len(lacking) > 1)} {', '.join(map(str, lacking))}"
        return Choice(Carrying.STAGED, f"{who} {'see' if len(lacking) > 1 else 'sees'} none")
    return None


def find_out(transport: Transport, environ: Mapping[str, str] = os.environ) -> str:
    """Return what carries the messages of GPUs, tried by all ranks together; "" where none has one.

    Each takes the GPU of its place on its host.
    """
    in_sight = transport.gather_object(gpus_in_sight())
    if transport.size == 1 or not any(in_sight):
        return ""
    choice = settled(transport, in_sight, environ)
    if choice is None:
        place = transport.neighbours().index(transport.rank)
        nccl = NcclTransport(transport, timeout_seconds=transport.timeout_seconds, automatic=True)
        nccl.connect(0 if in_sight[transport.rank] == 1 else place)
        choice = nccl.choice
        nccl.disconnect("it was tried")
    assert choice is not None
    return describe(choice, transport.name)


def _tell(transport: Transport, choice: Choice) -> None:
    if transport.rank == 0:
        _log.info("%s", describe(choice, transport.name), extra=EVERYWHERE)


def describe(choice: Choice, name: str) -> str:
    """Return the line; name: of the transport that carries the hosts' messages."""
    if choice.carrying is Carrying.STAGED:
        return f"messages of GPUs go through host memory, over {name}: {choice.reason}"
    return f"messages of GPUs go over NCCL: {choice.reason}"
