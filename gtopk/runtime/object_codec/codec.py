"""The codec: the writer flattens an object into bytes, the reader validates and rebuilds it.

    byte 0        4     6       8            16      24
         +--------+-----+-------+------------+-------+------+------+
         | "GTKO" | ver | flags | head bytes | crc32 | head | bulk |
         +--------+-----+-------+------------+-------+------+------+
    flags   1 if the content includes a pickle, else 0
    crc32   of everything after the header
    head    the object in prefix notation, as consecutive msgpack values
    bulk    the contents of bytes, arrays and tensors, in the order in which the head lists them

None, bool, int, float and str are msgpack's own types. Everything else is an empty msgpack
extension with the type's code, then the number of its parts, then the parts. The parts of a leaf
are plain values, followed by the number of its bytes in the bulk:

    {"lr": (0.5, zeros(3))}    head   DICT 2 "lr" TUPLE 2 0.5 TENSOR 3 "float32" False 3 12
                               bulk   the 12 bytes of the tensor

Objects of other types are pickled only if GTOPK_ALLOW_PICKLE is 1, since pickles execute code.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import reprlib
import struct
import zlib
from collections.abc import Sequence
from typing import Any, Final

import msgpack
import numpy as np
from numpy.typing import NDArray

from ... import settings
from .types import (
    COMPOSITES,
    LEAVES,
    Buffer,
    Code,
    Composite,
    ObjectFormatError,
    Plain,
    Step,
    UnsupportedError,
    composite_of,
    leaf_of,
    malformed,
    type_name,
)

MAGIC: Final = b"GTKO"
VERSION: Final = 1
HEADER: Final = struct.Struct("<4sHHQQ")
HEADER_BYTES: Final = HEADER.size
HAS_PICKLE: Final = 1  # the only flag
MAX_DEPTH: Final = 100  # of nested parts, to stay clear of Python's recursion limit


def pickle_allowed() -> bool:
    """Return whether this process may write and execute pickles: GTOPK_ALLOW_PICKLE=1."""
    return settings.ALLOW_PICKLE.read()


def encode(obj: object, *, allow_pickle: bool | None = None) -> bytes:
    """Return the object as bytes.

    allow_pickle: whether to pickle objects of other types; None: as GTOPK_ALLOW_PICKLE says.

    These types round-trip exactly: None, bool, int of any size, float, complex, str, bytes,
    bytearray, list, tuple, set, frozenset, dict, OrderedDict, Counter, defaultdict (of list, dict,
    set, int, float or None), deque, slice, range, pathlib.Path, argparse.Namespace,
    SimpleNamespace; NumPy scalars and arrays of numbers, dates and strings; torch.Tensor and
    torch.nn.Parameter (dense, from any device), torch.dtype, torch.device and torch.Size. So do
    dataclass objects, field by field and without calling __init__, if their class is defined at the
    top of a module that the receiver has imported as well. An object that occurs in two places
    comes back as two objects.

    Raises TypeError, naming the place in the object, for anything else, including subclasses of
    these types, enums and named tuples. Where pickles are allowed, it is pickled instead.
    """
    writer = _Writer(pickle_allowed() if allow_pickle is None else allow_pickle)
    writer.write(obj)
    return writer.message()


class _Writer:
    """Flattens one object into head and bulk."""

    def __init__(self, may_pickle: bool) -> None:
        self._may_pickle = may_pickle
        # File names may contain lone surrogates, which stand for bytes that are not valid UTF-8.
        self._packer = msgpack.Packer(unicode_errors="surrogatepass")
        self._head = bytearray()
        self._bulk: list[Buffer] = []
        self._path: list[Step] = []
        self._flags = 0

    def write(self, obj: object) -> None:
        """Append an object of any type."""
        if _is_plain(obj):
            self._head += self._packer.pack(obj)
            return
        try:
            composite = composite_of(obj)
            if composite:
                # As a list, because the number of parts precedes them.
                self._write_composite(composite.code, list(composite.to_parts(obj)))
            else:
                leaf = leaf_of(obj)
                self._write_leaf(leaf.code, *leaf.to_parts(obj))
        except UnsupportedError as error:
            self._write_pickle(obj, str(error))

    def message(self) -> bytes:
        """Return header, head and bulk in one piece."""
        # Collect the pieces first, so that the content is copied only once.
        crc = zlib.crc32(self._head)
        for content in self._bulk:
            crc = zlib.crc32(content, crc)
        header = HEADER.pack(MAGIC, VERSION, self._flags, len(self._head), crc)
        return b"".join([header, self._head, *self._bulk])

    def _write_code(self, code: Code, parts: int) -> None:
        self._head += self._packer.pack_ext_type(code, b"")
        self._head += self._packer.pack(parts)

    def _write_composite(self, code: Code, steps: Sequence[Step]) -> None:
        if len(self._path) == MAX_DEPTH:
            raise TypeError(
                f"objects between ranks may be nested {MAX_DEPTH} deep; this one goes deeper, or "
                f"contains itself, at {self._place()}"
            )
        self._write_code(code, len(steps))
        for step in steps:
            self._path.append(step)
            self.write(step.part)
            self._path.pop()

    def _write_leaf(self, code: Code, parts: Sequence[Plain], content: Buffer) -> None:
        self._write_code(code, len(parts))
        for value in (*parts, len(content)):
            self._head += self._packer.pack(value)
        self._bulk.append(content)

    def _write_pickle(self, obj: object, trait: str) -> None:
        """Append an object that has no type code: pickle it if allowed, else raise TypeError.

        trait: the unsupported trait of an object of a known type; "": its type is unknown.
        """
        what = f"{type_name(type(obj))}{trait and f' ({trait})'} at {self._place()}"
        if not self._may_pickle:
            raise TypeError(
                f"objects between ranks must consist of plain values, lists, dicts, NumPy arrays, "
                f"torch tensors and the like, got a {what}; to send it as a pickle, which can "
                f"execute any code on the receiver, set GTOPK_ALLOW_PICKLE=1 on every rank"
            )
        # cloudpickle, if installed, can pickle lambdas and local classes.
        found = importlib.util.find_spec("cloudpickle")
        module: Any = importlib.import_module("cloudpickle") if found else pickle
        try:
            content: bytes = module.dumps(obj)
        except Exception as error:  # pickling may call any code and raise anything
            hint = "; pip install cloudpickle to send functions" if module is pickle else ""
            raise TypeError(f"cannot pickle the {what}: {error}{hint}") from error
        self._flags |= HAS_PICKLE
        self._write_leaf(Code.PICKLE, (), content)

    def _place(self) -> str:
        """Return the current part's place in the object, as a Python expression."""
        return "".join(step.text.format(reprlib.repr(step.key)) for step in self._path) or "its top"


def _is_plain(obj: Any) -> bool:
    """Return whether the type is one of msgpack's own, including ints of up to 64 bits."""
    # Compare exact types: a subclass would come back as its base.
    kind = type(obj)
    return obj is None or kind in (bool, float, str) or (kind is int and -(2**63) <= obj < 2**64)


def decode(
    data: Buffer | NDArray[np.uint8],
    *,
    allow_pickle: bool | None = None,
    imports: bool = False,
) -> Any:
    """Return the object in bytes made by `encode`; tensors land on the CPU, contiguous.

    allow_pickle: whether to execute pickles; None: as GTOPK_ALLOW_PICKLE says.
    imports: whether to import the modules of dataclasses; only for a sender that may run code
        here.
    Raises ObjectFormatError for any other bytes, and for a pickle that is not allowed here. Without
    a pickle, nothing that the sender chose is executed.
    """
    message = data.data if isinstance(data, np.ndarray) else memoryview(data)
    flags, head, bulk = _parse_message(message)
    # Check before reading any content.
    if flags and not (pickle_allowed() if allow_pickle is None else allow_pickle):
        raise ObjectFormatError(
            "the object holds a pickle, which can execute any code; set GTOPK_ALLOW_PICKLE=1 on "
            "this rank too if you trust the sender"
        )
    try:
        reader = _Reader(head, bulk, may_unpickle=bool(flags), imports=imports)
        obj = reader.read()
        reader.finish()
    except ObjectFormatError:
        raise
    except Exception as error:  # hostile parts make constructors raise errors of many types
        raise malformed(f"{type(error).__name__}: {str(error)[:200]}") from error
    return obj


def holds_pickle(data: bytes) -> bool:
    """Return whether bytes made by `encode` need pickles to be allowed."""
    return bool(HEADER.unpack_from(data)[2])


def _parse_message(message: memoryview) -> tuple[int, memoryview, memoryview]:
    """Return flags, head and bulk of a message, after checking its header and checksum."""
    if message.itemsize != 1 or not message.c_contiguous:
        raise TypeError("decode needs contiguous bytes, or an array of uint8")
    if message.nbytes < HEADER_BYTES:
        raise malformed(f"{message.nbytes} are fewer than their header's {HEADER_BYTES}")
    message = message.cast("B")
    magic, version, flags, head_bytes, crc = HEADER.unpack_from(message)
    if magic != MAGIC:
        raise malformed(f"they begin with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise malformed(f"their format version is {version}; this rank speaks {VERSION}")
    if flags not in (0, HAS_PICKLE):
        raise malformed(f"their flags are {flags}")
    content = message[HEADER_BYTES:]
    if head_bytes > content.nbytes:
        raise malformed(f"a head of {head_bytes} bytes does not fit into {content.nbytes}")
    # Detects damage, not forgery: a forger can compute the checksum, too.
    if crc != zlib.crc32(content):
        raise malformed("their checksum does not match their content")
    return flags, content[:head_bytes], content[head_bytes:]


class _Reader:
    """Rebuilds one object from head and bulk."""

    def __init__(
        self, head: memoryview, bulk: memoryview, may_unpickle: bool, imports: bool
    ) -> None:
        self._unpacker = msgpack.Unpacker(
            # Lists and dicts are extensions here; msgpack's own types would allocate memory
            # according to a length that anyone can write.
            max_buffer_size=max(head.nbytes, 1),  # 0 would mean 2 GiB
            max_array_len=0,
            max_map_len=0,
            unicode_errors="surrogatepass",
        )
        self._unpacker.feed(head)
        self._head_bytes = head.nbytes
        self._bulk = bulk
        self._may_unpickle = may_unpickle
        self._imports = imports
        self._depth = 0

    def read(self) -> Any:
        """Return the next object."""
        value = self._unpacker.unpack()
        if not isinstance(value, msgpack.ExtType):
            return _plain(value)
        if value.data:
            raise malformed("an extension holds data")
        count = self._count()
        if value.code in COMPOSITES:
            return self._read_composite(COMPOSITES[value.code], count)
        if value.code not in LEAVES:
            raise malformed(f"extension {value.code} is unknown")
        if value.code == Code.PICKLE and not self._may_unpickle:
            raise malformed("they hold a pickle, but their flags do not say so")
        parts = [_plain(self._unpacker.unpack()) for _ in range(count)]
        return LEAVES[value.code].from_parts(self._next_content(self._count()), *parts)

    def finish(self) -> None:
        """Raise unless the object used up the whole message."""
        if self._unpacker.tell() != self._head_bytes or self._bulk.nbytes:
            raise malformed("something follows the object")

    def _read_composite(self, composite: Composite, count: int) -> Any:
        if self._depth == MAX_DEPTH:
            raise malformed(f"nested more than {MAX_DEPTH} deep")
        self._depth += 1
        parts = [self.read() for _ in range(count)]
        self._depth -= 1
        if self._imports and composite.code == Code.DATACLASS:
            importlib.import_module(parts[0].partition(":")[0])
        return composite.from_parts(parts)

    def _count(self) -> int:
        value = self._unpacker.unpack()
        if type(value) is not int or value < 0:
            raise malformed("a count is missing")
        return value

    def _next_content(self, size: int) -> memoryview:
        if size > self._bulk.nbytes:
            raise malformed(f"{size} bytes are announced, {self._bulk.nbytes} are left")
        content, self._bulk = self._bulk[:size], self._bulk[size:]
        return content


def _plain(value: object) -> Plain:
    """Return an unpacked value; raise unless it is plain."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise malformed(f"a plain value is missing, got a msgpack {type_name(type(value))}")
