"""Checked messages: whether all that ranks send each other travels with a checksum."""

from __future__ import annotations

import os
from collections.abc import Mapping

from collectives.transports import Transport

from .. import settings


def wanted_on(transport: Transport, environ: Mapping[str, str] = os.environ) -> bool:
    """Return what the environment says; raise ValueError where that is nothing, or cannot be."""
    is_wanted = settings.CHECK_MESSAGES.read(environ)
    if is_wanted and transport.name == "nccl":
        raise ValueError(
            f"{settings.CHECK_MESSAGES.name}=1 cannot have NCCL's messages checked: unset it, or "
            "let the GPUs' messages go through the hosts (GTOPK_TRANSPORT=staged)"
        )
    return is_wanted
