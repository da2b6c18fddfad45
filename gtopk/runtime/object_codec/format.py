"""The bytes of an encoded object: its header, its type codes, its limits, and what breaks them.

    byte 0        4     6       8            16      24
         +--------+-----+-------+------------+-------+------+------+
         | "GTKO" | ver | flags | head bytes | crc32 | head | bulk |
         +--------+-----+-------+------------+-------+------+------+
    flags   1 when a pickle is among the content, else 0
    crc32   of everything behind the header
    head    the object in prefix notation, one msgpack value after the other
    bulk    the content of bytes, arrays and tensors, in the order in which the head announces them

None, bool, int, float and str are msgpack's own. Everything else is an empty msgpack extension
whose code names the type, then the number of its parts, then the parts. The parts of a leaf are
plain values, and the number of its bytes in the bulk follows them:

    {"lr": (0.5, zeros(3))}    head   DICT 2 "lr" TUPLE 2 0.5 TENSOR 3 "float32" False 3 12
                               bulk   the 12 bytes of the tensor

Objects of other types are pickled, only where GTOPK_ALLOW_PICKLE is 1, since pickles execute.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import struct
from enum import IntEnum
from typing import Any, Final, TypeAlias

from ... import settings

MAGIC: Final = b"GTKO"
VERSION: Final = 1
HEADER: Final = struct.Struct("<4sHHQQ")
HEADER_BYTES: Final = HEADER.size
HAS_PICKLE: Final = 1  # the one flag

MAX_DEPTH: Final = 100  # parts inside parts; more => nearer to Python's recursion limit
MAX_DIMENSIONS: Final = 64  # of an array or a tensor: NumPy's own limit

Plain: TypeAlias = bool | int | float | str | None
Buffer: TypeAlias = bytes | bytearray | memoryview


class ObjectFormatError(ValueError):
    """Bytes that should hold an encoded object do not."""


class Code(IntEnum):
    """The msgpack extension code of each type; part of the format, never renumbered."""

    LIST = 1
    TUPLE = 2
    SET = 3
    FROZENSET = 4
    DICT = 5
    ORDERED_DICT = 6
    DEFAULT_DICT = 7
    SLICE = 8
    RANGE = 9
    TORCH_SIZE = 10
    COUNTER = 11
    NAMESPACE = 12
    SIMPLE_NAMESPACE = 13
    DATACLASS = 14
    COMPLEX = 20
    BIG_INT = 21
    BYTES = 22
    BYTEARRAY = 23
    NUMPY_ARRAY = 24
    NUMPY_SCALAR = 25
    NUMPY_STR = 26
    NUMPY_BYTES = 27
    TENSOR = 28
    PARAMETER = 29
    TORCH_DTYPE = 30
    TORCH_DEVICE = 31
    PICKLE = 32


def malformed(reason: str) -> ObjectFormatError:
    """Return the error for bytes that break the format."""
    return ObjectFormatError(f"the object's bytes are malformed: {reason}")


def type_name(kind: type) -> str:
    """Return a type's name as one would import it."""
    where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{where}{kind.__qualname__}"


def pickle_allowed() -> bool:
    """Return whether this process writes and executes pickles: GTOPK_ALLOW_PICKLE=1."""
    return settings.ALLOW_PICKLE.read()


def pickler() -> Any:
    """Return cloudpickle, which knows lambdas and local classes, where it is installed."""
    found = importlib.util.find_spec("cloudpickle")
    return importlib.import_module("cloudpickle") if found else pickle
