"""Python objects as bytes that only ever decode to data: typed msgpack, no pickle unless allowed.

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

So one loop reads the head, a tensor is copied once, and nothing is allocated that the message does
not hold the bytes of. `decode` trusts nothing: whatever is wrong with a message ends in one
ObjectFormatError.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import pickle
import re
import reprlib
import struct
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack
import numpy as np
import torch
from numpy.typing import NDArray

MAGIC: Final = b"GTKO"
VERSION: Final = 1
_HEADER: Final = struct.Struct("<4sHHQQ")
HEADER_BYTES: Final = _HEADER.size
_HAS_PICKLE: Final = 1  # the one flag

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


def pickle_allowed() -> bool:
    """Return whether this process writes and executes pickles: GTOPK_ALLOW_PICKLE=1."""
    return os.environ.get("GTOPK_ALLOW_PICKLE") == "1"


def encode(obj: object) -> bytes:
    """Return the object as bytes.

    These types come back exactly: None, bool, int of any size, float, complex, str, bytes,
    bytearray, list, tuple, set, frozenset, dict, OrderedDict, defaultdict (of list, dict, set, int,
    float or None), slice, range; NumPy scalars and arrays of numbers, dates and strings;
    torch.Tensor and torch.nn.Parameter (dense, from any device), torch.dtype, torch.device and
    torch.Size. What sits in two places of the object comes back as two.

    Raises TypeError, naming the place in the object, for anything else: subclasses of these types,
    enums and named tuples among them. Where GTOPK_ALLOW_PICKLE is 1, it is pickled instead.
    """
    writer = _Writer()
    writer.write(obj)
    return writer.message()


def decode(data: Buffer | NDArray[np.uint8]) -> Any:
    """Return the object in bytes made by `encode`; tensors land on the CPU, contiguous.

    Raises ObjectFormatError when the bytes are anything else, or when they hold a pickle and
    GTOPK_ALLOW_PICKLE is not 1 here. Without a pickle, nothing the sender chose is executed.
    """
    message = data.data if isinstance(data, np.ndarray) else memoryview(data)
    flags, head, bulk = _open(message)
    if flags and not pickle_allowed():
        raise ObjectFormatError(
            "the object holds a pickle, which can execute anything; set GTOPK_ALLOW_PICKLE=1 on "
            "this rank too if you trust the sender"
        )
    try:
        reader = _Reader(head, bulk, may_unpickle=bool(flags))
        obj = reader.read()
        reader.finish()
    except ObjectFormatError:
        raise
    except Exception as error:  # constructors answer hostile parts with errors of many types
        raise _malformed(f"{type(error).__name__}: {str(error)[:200]}") from error
    return obj


def holds_pickle(data: bytes) -> bool:
    """Return whether bytes made by `encode` can be decoded only where pickles are allowed."""
    return bool(_HEADER.unpack_from(data)[2])


def _malformed(reason: str) -> ObjectFormatError:
    return ObjectFormatError(f"the object's bytes are malformed: {reason}")


def _open(message: memoryview) -> tuple[int, memoryview, memoryview]:
    """Return the flags, head and bulk of a message whose header and checksum are right."""
    if message.itemsize != 1 or not message.c_contiguous:
        raise TypeError("decode needs contiguous bytes, or an array of uint8")
    if message.nbytes < HEADER_BYTES:
        raise _malformed(f"{message.nbytes} are fewer than their header's {HEADER_BYTES}")
    message = message.cast("B")
    magic, version, flags, head_bytes, crc = _HEADER.unpack_from(message)
    if magic != MAGIC:
        raise _malformed(f"they begin with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise _malformed(f"their format version is {version}; this rank speaks {VERSION}")
    if flags not in (0, _HAS_PICKLE):
        raise _malformed(f"their flags are {flags}")
    content = message[HEADER_BYTES:]
    if head_bytes > content.nbytes:
        raise _malformed(f"a head of {head_bytes} bytes does not fit into {content.nbytes}")
    if crc != zlib.crc32(content):
        raise _malformed("their checksum does not match their content")
    return flags, content[:head_bytes], content[head_bytes:]


class _Writer:
    """Takes one object apart into head and bulk."""

    def __init__(self) -> None:
        self._packer = msgpack.Packer(unicode_errors="surrogatepass")
        self._head = bytearray()
        self._bulk: list[Buffer] = []
        self._path: list[_Step] = []
        self._flags = 0

    def write(self, obj: object) -> None:
        """Append an object of any type."""
        if _is_plain(obj):
            self._head += self._packer.pack(obj)
            return
        try:
            composite = _COMPOSITE_OF.get(type(obj))
            if composite:
                self._write_composite(composite.code, list(composite.take_apart(obj)))
            else:
                leaf = _leaf_of(obj)
                self._write_leaf(leaf.code, *leaf.take_apart(obj))
        except _UnsupportedError as error:
            self._write_pickle(obj, str(error))

    def message(self) -> bytes:
        """Return header, head and bulk in one piece."""
        crc = zlib.crc32(self._head)
        for content in self._bulk:
            crc = zlib.crc32(content, crc)
        header = _HEADER.pack(MAGIC, VERSION, self._flags, len(self._head), crc)
        return b"".join([header, self._head, *self._bulk])

    def _announce(self, code: Code, parts: int) -> None:
        self._head += self._packer.pack_ext_type(code, b"")
        self._head += self._packer.pack(parts)

    def _write_composite(self, code: Code, steps: Sequence[_Step]) -> None:
        if len(self._path) == MAX_DEPTH:
            raise TypeError(
                f"objects between ranks may be nested {MAX_DEPTH} deep; this one goes deeper, or "
                f"contains itself, at {self._place()}"
            )
        self._announce(code, len(steps))
        for step in steps:
            self._path.append(step)
            self.write(step.part)
            self._path.pop()

    def _write_leaf(self, code: Code, parts: Sequence[Plain], content: Buffer) -> None:
        self._announce(code, len(parts))
        for value in (*parts, len(content)):
            self._head += self._packer.pack(value)
        self._bulk.append(content)

    def _write_pickle(self, obj: object, trait: str) -> None:
        """Append what has no code of its own: a pickle where allowed, else raise TypeError.

        trait: what about this object of a known type is unknown, or "".
        """
        what = f"{_name(type(obj))}{trait and f' ({trait})'} at {self._place()}"
        if not pickle_allowed():
            raise TypeError(
                f"objects between ranks must consist of plain values, lists, dicts, NumPy arrays, "
                f"torch tensors and the like, got a {what}; to send it as a pickle, which can "
                f"execute anything where it is received, set GTOPK_ALLOW_PICKLE=1 on every rank"
            )
        try:
            content: bytes = _pickler().dumps(obj)
        except Exception as error:  # any class can raise anything when it is pickled
            raise TypeError(f"cannot pickle the {what}: {error}") from error
        self._flags |= _HAS_PICKLE
        self._write_leaf(Code.PICKLE, (), content)

    def _place(self) -> str:
        """Return where in the object the current part sits, as one would write it in Python."""
        return "".join(step.text.format(reprlib.repr(step.key)) for step in self._path) or "its top"


class _Reader:
    """Puts one object together again from head and bulk."""

    def __init__(self, head: memoryview, bulk: memoryview, may_unpickle: bool) -> None:
        self._unpacker = msgpack.Unpacker(
            max_buffer_size=max(head.nbytes, 1),  # 0 would stand for 2 GiB
            max_array_len=0,
            max_map_len=0,
            unicode_errors="surrogatepass",
        )
        self._unpacker.feed(head)
        self._head_bytes = head.nbytes
        self._bulk = bulk
        self._may_unpickle = may_unpickle
        self._depth = 0

    def read(self) -> Any:
        """Return the next object."""
        value = self._unpacker.unpack()
        if not isinstance(value, msgpack.ExtType):
            return _plain(value)
        if value.data:
            raise _malformed("an extension holds data")
        count = self._count()
        if value.code in _COMPOSITES:
            return self._read_composite(_COMPOSITES[value.code], count)
        if value.code not in _LEAVES:
            raise _malformed(f"extension {value.code} is unknown")
        if value.code == Code.PICKLE and not self._may_unpickle:
            raise _malformed("they hold a pickle that their flags conceal")
        parts = [_plain(self._unpacker.unpack()) for _ in range(count)]
        return _LEAVES[value.code].put_together(self._take(self._count()), *parts)

    def finish(self) -> None:
        """Raise unless the object took the whole message."""
        if self._unpacker.tell() != self._head_bytes or self._bulk.nbytes:
            raise _malformed("something follows the object")

    def _read_composite(self, composite: _Composite, count: int) -> Any:
        if self._depth == MAX_DEPTH:
            raise _malformed(f"nested more than {MAX_DEPTH} deep")
        self._depth += 1
        parts = [self.read() for _ in range(count)]
        self._depth -= 1
        return composite.put_together(parts)

    def _count(self) -> int:
        value = self._unpacker.unpack()
        if type(value) is not int or value < 0:
            raise _malformed("a count is missing")
        return value

    def _take(self, size: int) -> memoryview:
        if size > self._bulk.nbytes:
            raise _malformed(f"{size} bytes are announced, {self._bulk.nbytes} are left")
        content, self._bulk = self._bulk[:size], self._bulk[size:]
        return content


class _UnsupportedError(Exception):
    """This object of a known type cannot be sent as that type; its text says why."""


def _is_plain(obj: Any) -> bool:
    """Return whether this is one of msgpack's own types, ints up to 64 bits among them."""
    kind = type(obj)
    return obj is None or kind in (bool, float, str) or (kind is int and -(2**63) <= obj < 2**64)


def _plain(value: object) -> Plain:
    """Return an unpacked value that must be plain."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise _malformed(f"a plain value is missing, got a msgpack {_name(type(value))}")


def _name(kind: type) -> str:
    """Return a type's name as one would import it."""
    where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{where}{kind.__qualname__}"


# Composites: their parts are objects of any type.


class _Step(NamedTuple):
    """One part of a composite; text.format(repr(key)) tells its place there."""

    text: str
    key: object
    part: object


class _Composite(NamedTuple):
    """How a type made of objects is taken apart and put together."""

    code: Code
    take_apart: Callable[[Any], Iterable[_Step]]
    put_together: Callable[[list[Any]], Any]


def _items(sequence: Iterable[object]) -> Iterator[_Step]:
    return (_Step("[{}]", index, item) for index, item in enumerate(sequence))


def _members(members: Iterable[object]) -> Iterator[_Step]:
    return (_Step(" (member {})", member, member) for member in members)


def _pairs(mapping: dict[Any, Any]) -> Iterator[_Step]:
    for key, value in mapping.items():
        yield _Step(" (key {})", key, key)
        yield _Step("[{}]", key, value)


def _attributes(*names: str) -> Callable[[object], Iterator[_Step]]:
    return lambda obj: (_Step(f".{name}", None, getattr(obj, name)) for name in names)


def _ordered_dict_parts(mapping: OrderedDict[Any, Any]) -> Iterator[_Step]:
    """Yield `_metadata` as well, where a module's state_dict keeps its version numbers."""
    attributes = vars(mapping)
    if attributes.keys() - {"_metadata"}:
        raise _UnsupportedError(f"with attributes {sorted(attributes)}")
    yield _Step("._metadata", None, attributes.get("_metadata"))
    yield from _pairs(mapping)


def _default_dict_parts(mapping: defaultdict[Any, Any]) -> Iterator[_Step]:
    if mapping.default_factory not in _FACTORY_NAMES:
        raise _UnsupportedError(f"of {mapping.default_factory}")
    yield _Step(".default_factory", None, _FACTORY_NAMES[mapping.default_factory])
    yield from _pairs(mapping)


def _set(parts: list[Any]) -> set[Any]:
    members = set(parts)
    if len(members) != len(parts):
        raise _malformed("a set has a member twice")
    return members


def _dict(parts: list[Any]) -> dict[Any, Any]:
    mapping = dict(zip(parts[::2], parts[1::2], strict=True))
    if 2 * len(mapping) != len(parts):
        raise _malformed("a dict has a key twice")
    return mapping


def _ordered_dict(parts: list[Any]) -> OrderedDict[Any, Any]:
    mapping = OrderedDict(_dict(parts[1:]))
    if parts[0] is not None:
        vars(mapping)["_metadata"] = parts[0]
    return mapping


def _default_dict(parts: list[Any]) -> defaultdict[Any, Any]:
    return defaultdict(_FACTORIES[parts[0]], _dict(parts[1:]))


def _complex(parts: list[Any]) -> complex:
    real, imaginary = parts
    return complex(real, imaginary)


def _numpy_str(parts: list[Any]) -> np.str_:
    (text,) = parts
    value: np.str_ = np.str_(text)
    return value


def _torch_size(parts: list[Any]) -> torch.Size:
    return torch.Size(_dimension(part) for part in parts)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _torch_dtype(parts: list[Any]) -> torch.dtype:
    (name,) = parts
    return _TORCH_DTYPES[name]


def _torch_device(parts: list[Any]) -> torch.device:
    (name,) = parts
    return torch.device(name)


_FACTORIES: Final[dict[str | None, Callable[[], Any] | None]] = {
    None: None,
    "list": list,
    "dict": dict,
    "set": set,
    "int": int,
    "float": float,
}
_FACTORY_NAMES: Final = {factory: name for name, factory in _FACTORIES.items()}
_TORCH_DTYPES: Final = {
    _dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}

_COMPOSITE_OF: Final[dict[type, _Composite]] = {
    list: _Composite(Code.LIST, _items, list),
    tuple: _Composite(Code.TUPLE, _items, tuple),
    set: _Composite(Code.SET, _members, _set),
    frozenset: _Composite(Code.FROZENSET, _members, lambda parts: frozenset(_set(parts))),
    dict: _Composite(Code.DICT, _pairs, _dict),
    OrderedDict: _Composite(Code.ORDERED_DICT, _ordered_dict_parts, _ordered_dict),
    defaultdict: _Composite(Code.DEFAULT_DICT, _default_dict_parts, _default_dict),
    slice: _Composite(
        Code.SLICE, _attributes("start", "stop", "step"), lambda parts: slice(*parts)
    ),
    range: _Composite(
        Code.RANGE, _attributes("start", "stop", "step"), lambda parts: range(*parts)
    ),
    complex: _Composite(Code.COMPLEX, _attributes("real", "imag"), _complex),
    np.str_: _Composite(Code.NUMPY_STR, lambda text: _items([str.__str__(text)]), _numpy_str),
    torch.Size: _Composite(Code.TORCH_SIZE, _items, _torch_size),
    torch.dtype: _Composite(
        Code.TORCH_DTYPE, lambda dtype: _items([_dtype_name(dtype)]), _torch_dtype
    ),
    torch.device: _Composite(
        Code.TORCH_DEVICE, lambda device: _items([str(device)]), _torch_device
    ),
}
_COMPOSITES: Final = {int(row.code): row for row in _COMPOSITE_OF.values()}


# Leaves: their parts are plain values, and they have bytes in the bulk.


class _Leaf(NamedTuple):
    """How a type made of plain parts and bytes is taken apart and put together."""

    code: Code
    take_apart: Callable[[Any], tuple[Sequence[Plain], Buffer]]
    put_together: Callable[..., Any]  # of the bytes and the parts


def _leaf_of(obj: object) -> _Leaf:
    """Return the leaf for an object, or raise _UnsupportedError."""
    leaf = _LEAF_OF.get(type(obj))
    if leaf is not None:
        return leaf
    if isinstance(obj, np.generic):
        return _LEAF_OF[np.generic]
    raise _UnsupportedError


def _big_int_parts(number: int) -> tuple[Sequence[Plain], Buffer]:
    return (), number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)


def _big_int(content: memoryview) -> int:
    return int.from_bytes(content, "little", signed=True)


def _bytes_parts(content: bytes | bytearray) -> tuple[Sequence[Plain], Buffer]:
    return (), content


def _dimension(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise _malformed("a dimension is missing")
    return value


def _shape(dimensions: Sequence[object], itemsize: int, content: memoryview) -> tuple[int, ...]:
    """Return the shape of an array whose elements take exactly these bytes."""
    shape = tuple(_dimension(dimension) for dimension in dimensions)
    if len(shape) > MAX_DIMENSIONS:
        raise _malformed(f"an array has {len(shape)} dimensions")
    if math.prod(shape) * itemsize != content.nbytes:
        raise _malformed(f"an array's shape does not go with its {content.nbytes} bytes")
    return shape


_NUMPY_DTYPE: Final = re.compile(
    r"[<>|](b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[mM]8(\[\w+(/\w+)?\])?|[SU]\d{1,9})"
)


def _array_parts(obj: NDArray[Any] | np.generic) -> tuple[Sequence[Plain], Buffer]:
    array = np.asarray(obj, order="C")
    name = array.dtype.str
    if not _NUMPY_DTYPE.fullmatch(name) or np.dtype(name) != array.dtype:
        raise _UnsupportedError(f"of dtype {array.dtype}")
    content = array.reshape(-1).view(np.uint8).data if array.nbytes else b""
    return (name, *array.shape), content


def _array(content: memoryview, name: str, *dimensions: object) -> NDArray[Any]:
    if not _NUMPY_DTYPE.fullmatch(name):
        raise _malformed("an array's dtype is unknown")
    dtype = np.dtype(name)
    shape = _shape(dimensions, dtype.itemsize, content)
    array: NDArray[Any] = np.ndarray(shape, dtype, bytearray(content))
    if dtype.kind == "b":
        _check_bools(array.view(np.uint8))
    if dtype.kind == "U" and content.nbytes:
        points = array.reshape(-1).view(np.dtype("u4").newbyteorder(dtype.byteorder))
        if (points > 0x10FFFF).any():
            raise _malformed("a character lies beyond Unicode")
    return array


def _scalar(content: memoryview, name: str) -> Any:
    return _array(content, name)[()]


def _check_bools(elements: NDArray[np.uint8]) -> None:
    if (elements > 1).any():  # NumPy and torch count and index by such bytes unchecked
        raise _malformed("a bool is neither 0 nor 1")


def _tensor_parts(tensor: torch.Tensor) -> tuple[Sequence[Plain], Buffer]:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise _UnsupportedError("not dense")
    if tensor.device.type == "meta":
        raise _UnsupportedError("on the meta device, where nothing has content")
    if tensor.dim() > MAX_DIMENSIONS:
        raise _UnsupportedError(f"of {tensor.dim()} dimensions")
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # Not view(-1): tensors of one or no element may keep odd strides, which other dtypes refuse.
    content = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data
    return (_dtype_name(tensor.dtype), tensor.requires_grad, *tensor.shape), content


def _tensor(
    content: memoryview, name: str, requires_grad: bool, *dimensions: object
) -> torch.Tensor:
    dtype = _TORCH_DTYPES[name]
    if name.startswith("q"):
        raise _malformed("a tensor is quantized")
    shape = _shape(dimensions, dtype.itemsize, content)
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


def _pickler() -> Any:
    """Return cloudpickle, which knows lambdas and local classes, where it is installed."""
    found = importlib.util.find_spec("cloudpickle")
    return importlib.import_module("cloudpickle") if found else pickle


_LEAF_OF: Final[dict[type, _Leaf]] = {
    int: _Leaf(Code.BIG_INT, _big_int_parts, _big_int),
    bytes: _Leaf(Code.BYTES, _bytes_parts, bytes),
    bytearray: _Leaf(Code.BYTEARRAY, _bytes_parts, bytearray),
    np.ndarray: _Leaf(Code.NUMPY_ARRAY, _array_parts, _array),
    np.generic: _Leaf(Code.NUMPY_SCALAR, _array_parts, _scalar),
    np.bytes_: _Leaf(Code.NUMPY_BYTES, _bytes_parts, lambda content: np.bytes_(bytes(content))),
    torch.Tensor: _Leaf(Code.TENSOR, _tensor_parts, _tensor),
    torch.nn.Parameter: _Leaf(Code.PARAMETER, _tensor_parts, _parameter),
}
_LEAVES: Final = {int(row.code): row for row in _LEAF_OF.values()} | {
    int(Code.PICKLE): _Leaf(Code.PICKLE, _bytes_parts, pickle.loads)
}
