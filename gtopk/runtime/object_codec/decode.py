"""The reader: puts an object together again, trusting nothing about its bytes."""

from __future__ import annotations

import zlib
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from .composites import COMPOSITES, Composite, import_module_of
from .format import (
    HAS_PICKLE,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_DEPTH,
    VERSION,
    Buffer,
    Code,
    ObjectFormatError,
    Plain,
    malformed,
    pickle_allowed,
    type_name,
)
from .leaves import LEAVES


def decode(
    data: Buffer | NDArray[np.uint8],
    *,
    allow_pickle: bool | None = None,
    imports: bool = False,
) -> Any:
    """Return the object in bytes made by `encode`; tensors land on the CPU, contiguous.

    allow_pickle: whether pickles are executed; None: as GTOPK_ALLOW_PICKLE says.
    imports: whether the modules of dataclasses are imported: from who may execute code here anyway.
    Raises ObjectFormatError when the bytes are anything else, or when they hold a pickle that is
    not allowed here. Without a pickle, nothing the sender chose is executed.
    """
    message = data.data if isinstance(data, np.ndarray) else memoryview(data)
    flags, head, bulk = _open(message)
    if flags and not (pickle_allowed() if allow_pickle is None else allow_pickle):
        raise ObjectFormatError(
            "the object holds a pickle, which can execute anything; set GTOPK_ALLOW_PICKLE=1 on "
            "this rank too if you trust the sender"
        )
    try:
        reader = _Reader(head, bulk, may_unpickle=bool(flags), imports=imports)
        obj = reader.read()
        reader.finish()
    except ObjectFormatError:
        raise
    except Exception as error:  # constructors answer hostile parts with errors of many types
        raise malformed(f"{type(error).__name__}: {str(error)[:200]}") from error
    return obj


def holds_pickle(data: bytes) -> bool:
    """Return whether bytes made by `encode` can be decoded only where pickles are allowed."""
    return bool(HEADER.unpack_from(data)[2])


def _open(message: memoryview) -> tuple[int, memoryview, memoryview]:
    """Return the flags, head and bulk of a message whose header and checksum are right."""
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
    if crc != zlib.crc32(content):
        raise malformed("their checksum does not match their content")
    return flags, content[:head_bytes], content[head_bytes:]


class _Reader:
    """Puts one object together again from head and bulk."""

    def __init__(
        self, head: memoryview, bulk: memoryview, may_unpickle: bool, imports: bool
    ) -> None:
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
            raise malformed("they hold a pickle that their flags conceal")
        parts = [_plain(self._unpacker.unpack()) for _ in range(count)]
        return LEAVES[value.code].put_together(self._take(self._count()), *parts)

    def finish(self) -> None:
        """Raise unless the object took the whole message."""
        if self._unpacker.tell() != self._head_bytes or self._bulk.nbytes:
            raise malformed("something follows the object")

    def _read_composite(self, composite: Composite, count: int) -> Any:
        if self._depth == MAX_DEPTH:
            raise malformed(f"nested more than {MAX_DEPTH} deep")
        self._depth += 1
        parts = [self.read() for _ in range(count)]
        self._depth -= 1
        if self._imports and composite.code == Code.DATACLASS:
            import_module_of(parts[0])
        return composite.put_together(parts)

    def _count(self) -> int:
        value = self._unpacker.unpack()
        if type(value) is not int or value < 0:
            raise malformed("a count is missing")
        return value

    def _take(self, size: int) -> memoryview:
        if size > self._bulk.nbytes:
            raise malformed(f"{size} bytes are announced, {self._bulk.nbytes} are left")
        content, self._bulk = self._bulk[:size], self._bulk[size:]
        return content


def _plain(value: object) -> Plain:
    """Return an unpacked value that must be plain."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise malformed(f"a plain value is missing, got a msgpack {type_name(type(value))}")
