"""Transfer header: the host message that says how a message from a GPU's memory will follow.

    byte 0            8        16              24
         +------------+--------+---------------+
         | "GTKDEV/1" | method | message_bytes |     little-endian
         +------------+--------+---------------+

A host message gets a header of its own only if its bytes look like a transfer header.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

from ..errors import MismatchError
from ..vector import Array
from .transport import Transport

_FIELDS: Final = struct.Struct("<8sqq")
_MAGIC: Final = b"GTKDEV/1"
TRANSFER_HEADER_BYTES: Final = _FIELDS.size


class TransferMethod(IntEnum):
    """How the message is sent, and in which memory it ends."""

    NCCL = 0  # from GPU to GPU
    STAGED = 1  # as the next host message, into the receiver's GPU
    HOST = 2  # as the next host message, which stays one
    MPI = 3  # from GPU to GPU, as the next message of an MPI that is CUDA-aware


class TransferHeader(NamedTuple):
    """The method and size of the message that will follow."""

    method: TransferMethod
    message_bytes: int

    def encode(self) -> Array:
        """Return the host message, uint8 [TRANSFER_HEADER_BYTES]."""
        return np.frombuffer(_FIELDS.pack(_MAGIC, self.method, self.message_bytes), np.uint8)

    @classmethod
    def read(cls, message: Array) -> TransferHeader | None:
        """Parse a host message; None when it is no transfer header."""
        if message.size != TRANSFER_HEADER_BYTES:
            return None
        magic, method, message_bytes = _FIELDS.unpack(message.data)
        # In a tuple: before Python 3.12 an enum raises where it is asked for a number that it
        # lacks.
        if magic != _MAGIC or method not in tuple(TransferMethod) or message_bytes < 0:
            return None
        return cls(TransferMethod(method), message_bytes)


def require_same(host: Transport, own: str) -> None:
    """Compare the ranks' texts about the operation that they are about to do together.

    Raises MismatchError, on all of them alike, where they differ.
    """
    texts = host.gather_object(own)
    for rank, text in zip(host.ranks, texts, strict=True):
        if text != texts[0]:
            raise MismatchError(
                f"rank {rank} asks for {text} where rank {host.ranks[0]} asks for {texts[0]}; "
                "all ranks must ask for the same"
            )
