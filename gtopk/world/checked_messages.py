"""Checked messages: whether all that ranks send each other travels with a checksum."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from collectives.transports import Transport

VARIABLE: Final = "GTOPK_CHECK_MESSAGES"


def wanted_on(transport: Transport, environ: Mapping[str, str] = os.environ) -> bool:
    """Return what the environment says; raise ValueError where that is nothing, or cannot be."""
    text = environ.get(VARIABLE) or "0"
    if text not in ("0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, got {text!r}")
    if text == "1" and transport.name == "nccl":
        raise ValueError(
            f"{VARIABLE}=1 cannot have NCCL's messages checked: unset it, or let the GPUs' "
            "messages go through the hosts (GTOPK_TRANSPORT=staged)"
        )
    return text == "1"
