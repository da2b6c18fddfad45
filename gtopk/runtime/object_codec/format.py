"""The bytes of an encoded object: its header, its type codes, its limits, and its error.

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

Leaves: the types made of plain values and bytes, how each is taken apart and put together.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import pickle
import re
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ... import settings

MAGIC: Final = b"GTKO"
VERSION: Final = 1
HEADER: Final = struct.Struct("<4sHHQQ")
HEADER_BYTES: Final = HEADER.size
HAS_PICKLE: Final = 1  # the one flag

MAX_DEPTH: Final = 100  # of nested parts; a larger one comes near Python's recursion limit
MAX_DIMENSIONS: Final = 64  # of an array or a tensor: NumPy's own limit

Plain: TypeAlias = bool | int | float | str | None
Buffer: TypeAlias = bytes | bytearray | memoryview


class ObjectFormatError(ValueError):
    """Raised for bytes that are not a valid encoded object."""


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
    """Return a type's name with its module, as in an import."""
    where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{where}{kind.__qualname__}"


def pickle_allowed() -> bool:
    """Return whether this process writes and executes pickles: GTOPK_ALLOW_PICKLE=1."""
    return settings.ALLOW_PICKLE.read()


def pickler() -> Any:
    """Return cloudpickle, which can pickle lambdas and local classes, if installed, else pickle."""
    found = importlib.util.find_spec("cloudpickle")
    return importlib.import_module("cloudpickle") if found else pickle


class Leaf(NamedTuple):
    """The codec of a type made of plain parts and bytes: it takes it apart and puts it together."""

    code: Code
    take_apart: Callable[[Any], tuple[Sequence[Plain], Buffer]]
    put_together: Callable[..., Any]  # of the bytes and the parts


class UnsupportedError(Exception):
    """Raised for an object of a known type that cannot be encoded; its text says why."""


def leaf_of(obj: object) -> Leaf:
    """Return the leaf for an object, or raise UnsupportedError."""
    leaf = _LEAF_OF.get(type(obj))
    if leaf is not None:
        return leaf
    if isinstance(obj, np.generic):
        return _LEAF_OF[np.generic]
    raise UnsupportedError


def _big_int_parts(number: int) -> tuple[Sequence[Plain], Buffer]:
    # One bit more than the number has, for its sign.
    return (), number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)


def _big_int(content: memoryview) -> int:
    return int.from_bytes(content, "little", signed=True)


def _bytes_parts(content: bytes | bytearray) -> tuple[Sequence[Plain], Buffer]:
    return (), content


def dimension(value: object) -> int:
    """Return an unpacked value that must be a dimension of an array."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise malformed("a dimension is missing")
    return value


def _shape(dimensions: Sequence[object], itemsize: int, content: memoryview) -> tuple[int, ...]:
    """Return the shape of an array whose elements take exactly these bytes."""
    shape = tuple(dimension(size) for size in dimensions)
    if len(shape) > MAX_DIMENSIONS:
        raise malformed(f"an array has {len(shape)} dimensions")
    if math.prod(shape) * itemsize != content.nbytes:
        raise malformed(f"an array's shape does not go with its {content.nbytes} bytes")
    return shape


# Not objects, whose bytes are addresses, nor records.
_NUMPY_DTYPE: Final = re.compile(
    r"[<>|](b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[mM]8(\[\w+(/\w+)?\])?|[SU]\d{1,9})"
)


def _array_parts(obj: NDArray[Any] | np.generic) -> tuple[Sequence[Plain], Buffer]:
    array = np.asarray(obj, order="C")
    name = array.dtype.str
    if not _NUMPY_DTYPE.fullmatch(name) or np.dtype(name) != array.dtype:
        raise UnsupportedError(f"of dtype {array.dtype}")
    content = array.reshape(-1).view(np.uint8).data if array.nbytes else b""
    return (name, *array.shape), content


def _array(content: memoryview, name: str, *dimensions: object) -> NDArray[Any]:
    if not _NUMPY_DTYPE.fullmatch(name):
        raise malformed("an array's dtype is unknown")
    dtype = np.dtype(name)
    shape = _shape(dimensions, dtype.itemsize, content)
    # A copy: it can be written to, and does not keep the whole message in memory.
    array: NDArray[Any] = np.ndarray(shape, dtype, bytearray(content))
    if dtype.kind == "b":
        _check_bools(array.view(np.uint8))
    if dtype.kind == "U" and content.nbytes:
        points = array.reshape(-1).view(np.dtype("u4").newbyteorder(dtype.byteorder))
        if (points > 0x10FFFF).any():
            raise malformed("a character lies beyond Unicode")
    return array


def _scalar(content: memoryview, name: str) -> Any:
    return _array(content, name)[()]


def _check_bools(elements: NDArray[np.uint8]) -> None:
    if (elements > 1).any():  # NumPy and torch use bools' bytes unchecked, to count and index
        raise malformed("a bool is neither 0 nor 1")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


TORCH_DTYPES: Final = {
    dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


def _tensor_parts(tensor: torch.Tensor) -> tuple[Sequence[Plain], Buffer]:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise UnsupportedError("not dense")
    if tensor.device.type == "meta":
        raise UnsupportedError("on the meta device, where nothing has content")
    if tensor.dim() > MAX_DIMENSIONS:
        raise UnsupportedError(f"of {tensor.dim()} dimensions")
    # A tensor may be negated or conjugated by a mark alone: its values must travel.
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # Not view(-1): tensors of one or no element may keep odd strides, which other dtypes refuse.
    content = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data
    return (dtype_name(tensor.dtype), tensor.requires_grad, *tensor.shape), content


def _tensor(
    content: memoryview, name: str, requires_grad: bool, *dimensions: object
) -> torch.Tensor:
    dtype = TORCH_DTYPES[name]
    if name.startswith("q"):
        raise malformed("a tensor is quantized")
    shape = _shape(dimensions, dtype.itemsize, content)
    # Filled by a copy: made of the message's bytes it would share them.
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    elements = tensor.view(-1).view(torch.uint8).numpy()
    elements[:] = content
    if dtype is torch.bool:
        _check_bools(elements)
    return tensor.requires_grad_(requires_grad)


def _parameter(
    content: memoryview, name: str, requires_grad: bool, *dimensions: object
) -> torch.nn.Parameter:
    return torch.nn.Parameter(_tensor(content, name, False, *dimensions), requires_grad)


_LEAF_OF: Final[dict[type, Leaf]] = {
    int: Leaf(Code.BIG_INT, _big_int_parts, _big_int),
    bytes: Leaf(Code.BYTES, _bytes_parts, bytes),
    bytearray: Leaf(Code.BYTEARRAY, _bytes_parts, bytearray),
    np.ndarray: Leaf(Code.NUMPY_ARRAY, _array_parts, _array),
    np.generic: Leaf(Code.NUMPY_SCALAR, _array_parts, _scalar),
    np.bytes_: Leaf(Code.NUMPY_BYTES, _bytes_parts, lambda content: np.bytes_(bytes(content))),
    torch.Tensor: Leaf(Code.TENSOR, _tensor_parts, _tensor),
    torch.nn.Parameter: Leaf(Code.PARAMETER, _tensor_parts, _parameter),
}
LEAVES: Final = {int(row.code): row for row in _LEAF_OF.values()} | {
    int(Code.PICKLE): Leaf(Code.PICKLE, _bytes_parts, pickle.loads)
}
