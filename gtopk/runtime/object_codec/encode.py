"""The writer: takes an object apart into head and bulk."""

from __future__ import annotations

import pickle
import reprlib
import zlib
from collections.abc import Sequence
from typing import Any

import msgpack

from .composites import Step, composite_of
from .format import (
    HAS_PICKLE,
    HEADER,
    MAGIC,
    MAX_DEPTH,
    VERSION,
    Buffer,
    Code,
    Plain,
    pickle_allowed,
    pickler,
    type_name,
)
from .leaves import UnsupportedError, leaf_of


def encode(obj: object, *, allow_pickle: bool | None = None) -> bytes:
    """Return the object as bytes.

    allow_pickle: whether what has no code of its own is pickled; None: as GTOPK_ALLOW_PICKLE says.

    These types come back exactly: None, bool, int of any size, float, complex, str, bytes,
    bytearray, list, tuple, set, frozenset, dict, OrderedDict, Counter, defaultdict (of list, dict,
    set, int, float or None), slice, range, argparse.Namespace, SimpleNamespace; NumPy scalars and
    arrays of numbers, dates and strings; torch.Tensor and torch.nn.Parameter (dense, from any
    device), torch.dtype, torch.device and torch.Size. So do objects of dataclasses that are defined
    at the top of a module which the receiver has imported, too; field by field, without a call of
    __init__. What sits in two places of the object comes back as two.

    Raises TypeError, naming the place in the object, for anything else: subclasses of these types,
    enums and named tuples among them. Where pickles are allowed, it is pickled instead.
    """
    writer = _Writer(pickle_allowed() if allow_pickle is None else allow_pickle)
    writer.write(obj)
    return writer.message()


class _Writer:
    """Takes one object apart into head and bulk."""

    def __init__(self, may_pickle: bool) -> None:
        self._may_pickle = may_pickle
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
                self._write_composite(composite.code, list(composite.take_apart(obj)))
            else:
                leaf = leaf_of(obj)
                self._write_leaf(leaf.code, *leaf.take_apart(obj))
        except UnsupportedError as error:
            self._write_pickle(obj, str(error))

    def message(self) -> bytes:
        """Return header, head and bulk in one piece."""
        crc = zlib.crc32(self._head)
        for content in self._bulk:
            crc = zlib.crc32(content, crc)
        header = HEADER.pack(MAGIC, VERSION, self._flags, len(self._head), crc)
        return b"".join([header, self._head, *self._bulk])

    def _announce(self, code: Code, parts: int) -> None:
        self._head += self._packer.pack_ext_type(code, b"")
        self._head += self._packer.pack(parts)

    def _write_composite(self, code: Code, steps: Sequence[Step]) -> None:
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
        what = f"{type_name(type(obj))}{trait and f' ({trait})'} at {self._place()}"
        if not self._may_pickle:
            raise TypeError(
                f"objects between ranks must consist of plain values, lists, dicts, NumPy arrays, "
                f"torch tensors and the like, got a {what}; to send it as a pickle, which can "
                f"execute anything where it is received, set GTOPK_ALLOW_PICKLE=1 on every rank"
            )
        module = pickler()
        try:
            content: bytes = module.dumps(obj)
        except Exception as error:  # any class can raise anything when it is pickled
            hint = "; pip install cloudpickle to send functions" if module is pickle else ""
            raise TypeError(f"cannot pickle the {what}: {error}{hint}") from error
        self._flags |= HAS_PICKLE
        self._write_leaf(Code.PICKLE, (), content)

    def _place(self) -> str:
        """Return where in the object the current part sits, as one would write it in Python."""
        return "".join(step.text.format(reprlib.repr(step.key)) for step in self._path) or "its top"


def _is_plain(obj: Any) -> bool:
    """Return whether this is one of msgpack's own types, ints up to 64 bits among them."""
    kind = type(obj)
    return obj is None or kind in (bool, float, str) or (kind is int and -(2**63) <= obj < 2**64)
