"""Emulated link: whether the ranks of one host are to talk as if a slow network joined them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from collectives.cost import Link
from collectives.transports import Transport

from ... import settings
from ..logs import EVERYWHERE

_log = logging.getLogger("gtopk")


def emulate_on(transport: Transport, environ: Mapping[str, str] = os.environ) -> None:
    """Pace the messages of a transport as GTOPK_LINK asks for; every rank calls it.

    Raises ValueError, on every rank, for a text that is none, or another on some ranks, for ranks
    on several hosts, and for NCCL, whose messages cannot be paced.
    """
    if transport.size == 1:
        settings.LINK.read(environ)
        return
    texts = transport.gather_object(settings.LINK.text(environ))
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise ValueError(
                f"{settings.LINK.name} must be the same on all ranks, got {texts[0]!r} on rank 0 "
                f"and {text!r} on rank {rank}"
            )
    asked = settings.LINK.read(environ)
    if asked is None:
        return
    if transport.name == "nccl":
        raise ValueError(
            f"{settings.LINK.name} cannot have NCCL's messages paced: unset it, or let the GPUs' "
            "messages go through the hosts (GTOPK_TRANSPORT=staged)"
        )
    try:
        transport.emulate(Link.of(*asked))
    except ValueError as error:
        raise ValueError(f"{settings.LINK.name}={texts[0]}: {error}") from None
    if transport.rank == 0:
        _log.info(
            "%s, for each rank: messages of gtopk wait as they would there, and every time that "
            "follows is emulated. A process group of torch.distributed is not paced",
            transport.link_text,
            extra=EVERYWHERE,
        )
