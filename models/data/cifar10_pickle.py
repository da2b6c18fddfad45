"""A file of CIFAR-10's Python version: a pickle, of which the few things needed are read, none run.

The published files are pickles of protocol 2, written by Python 2:

    {"batch_label": str, "labels": [int, ...], "data": uint8 [rows, 3072], "filenames": [str, ...]}

A pickle is a program for a small machine that may call anything. This machine here knows the steps
that those files take, and calls nothing: an array's bytes are what stands in the file, its shape
and type are compared with what they must be, and every other step is refused with its place.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from .malformed import MalformedFile

MOST_BYTES: Final = 64 << 20  # of a file; the published ones have 31 MB
_MAKE: Final = "numpy.core.multiarray _reconstruct"
_BYTES: Final = ("numpy dtype", "u1")


class _Called(NamedTuple):
    """What a pickle would call: compared, never called. state: what it would be told then."""

    name: Any
    arguments: Any
    state: Any = None


class _Mark:
    """Where the parts of a list, a tuple or a dictionary begin on the stack."""


def read_pickled_batch(
    path: str | Path, rows: int, row_bytes: int, classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the images, uint8 [rows, row_bytes], and labels, int64 [rows].

    Raises MalformedFile, a ValueError that names file, byte and reason; OSError.
    """
    path = Path(path)
    if (size := path.stat().st_size) > MOST_BYTES:
        raise MalformedFile(path, None, f"has {size} bytes; at most {MOST_BYTES} are read")
    content = path.read_bytes()
    batch = _run(path, content)
    try:
        labels, data = batch["labels"], batch["data"]
    except (TypeError, KeyError) as error:
        raise MalformedFile(path, None, f"holds no labels and data: {error}") from error
    images = _as_images(path, data, rows, row_bytes)
    if (
        not isinstance(labels, list)
        or len(labels) != rows
        or not all(isinstance(label, int) and 0 <= label < classes for label in labels)
    ):
        raise MalformedFile(
            path, None, f"labels must be a list of {rows} numbers in 0..{classes - 1}"
        )
    return images, np.array(labels, np.int64)


def _as_images(path: Path, data: Any, rows: int, row_bytes: int) -> np.ndarray:
    """Return the array that the pickle would have made by NumPy's own means.

    Its state there: version, shape, type, whether columns come first, bytes.
    """
    match data:
        case _Called(
            name=made,
            state=(
                1,
                (count, width),
                _Called(name=kind, arguments=(code, *_)),
                False,
                bytes(pixels),
            ),
        ) if (made, kind, code) == (_MAKE, *_BYTES) and (count, width) == (rows, row_bytes):
            if len(pixels) == rows * row_bytes:
                return np.frombuffer(pixels, np.uint8).reshape(rows, row_bytes)
    raise MalformedFile(path, None, f"data must be an array of bytes, {rows} rows of {row_bytes}")


def _run(path: Path, content: bytes) -> Any:
    """Return what the pickle says, as plain values and `_Called`."""
    program, stack = _Program(content), list[Any]()
    memo: dict[int, Any] = {}
    try:
        if program.take(1) + program.take(1) != pickle.PROTO + b"\x02":
            raise ValueError("it does not begin as a pickle of protocol 2")
        while (step := program.take(1)) != pickle.STOP:
            if step in _PUT:
                memo[program.number(_PUT[step])] = stack[-1]
            elif step in _GET:
                stack.append(memo[program.number(_GET[step])])
            elif step in _PUSH:
                stack.append(_PUSH[step](program))
            elif step in _COMBINE:
                _COMBINE[step](stack)
            else:
                raise ValueError(f"the step {step!r} is none that CIFAR-10's files take")
        (result,) = stack
        if left := len(content) - program.place:
            raise ValueError(f"{left} bytes follow its end")
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        reason = f"is no file of CIFAR-10's Python version: {error}"
        raise MalformedFile(path, None, reason, byte=program.place) from error
    return result


class _Program:
    """The bytes of a pickle; place: of those that come next."""

    def __init__(self, content: bytes) -> None:
        self.content, self.place = content, 0

    def take(self, count: int) -> bytes:
        """Return the next bytes; raise ValueError where there are fewer."""
        left = len(self.content) - self.place
        if not 0 <= count <= left:
            raise ValueError(f"{count} bytes should follow, and {left} are left")
        self.place += count
        return self.content[self.place - count : self.place]

    def number(self, kind: str) -> int:
        """Return a number in one of struct's formats."""
        (number,) = struct.unpack(kind, self.take(struct.calcsize(kind)))
        return int(number)

    def line(self) -> str:
        """Return a line without its end."""
        end = self.content.find(b"\n", self.place)
        if end < 0:
            raise ValueError("a line should follow, and has no end")
        return self.take(end + 1 - self.place)[:-1].decode("latin-1")


_PUT: Final = {pickle.BINPUT: "<B", pickle.LONG_BINPUT: "<I"}
_GET: Final = {pickle.BINGET: "<B", pickle.LONG_BINGET: "<I"}
_PUSH: Final[dict[bytes, Callable[[_Program], Any]]] = {
    pickle.MARK: lambda _: _Mark,
    pickle.EMPTY_DICT: lambda _: {},
    pickle.EMPTY_LIST: lambda _: [],
    pickle.NONE: lambda _: None,
    pickle.NEWFALSE: lambda _: False,
    pickle.BININT1: lambda program: program.number("<B"),
    pickle.BININT2: lambda program: program.number("<H"),
    pickle.BININT: lambda program: program.number("<i"),
    pickle.SHORT_BINSTRING: lambda program: program.take(program.number("<B")).decode("latin-1"),
    pickle.BINSTRING: lambda program: program.take(program.number("<i")),  # an array's bytes
    pickle.GLOBAL: lambda program: f"{program.line()} {program.line()}",
}


def _since_mark(stack: list[Any]) -> list[Any]:
    """Take what lies above the last mark off the stack, and the mark."""
    place = len(stack) - 1 - stack[::-1].index(_Mark)
    parts = stack[place + 1 :]
    del stack[place:]
    return parts


def _take(stack: list[Any], count: int) -> tuple[Any, ...]:
    if len(stack) < count:
        raise ValueError(f"{count} values should be there, and {len(stack)} are")
    parts = tuple(stack[-count:])
    del stack[-count:]
    return parts


def _append_all(stack: list[Any]) -> None:
    parts = _since_mark(stack)
    stack[-1].extend(parts)


def _set_all(stack: list[Any]) -> None:
    parts = _since_mark(stack)
    stack[-1].update(zip(parts[::2], parts[1::2], strict=True))


def _build(stack: list[Any]) -> None:
    called, state = _take(stack, 2)
    stack.append(called._replace(state=state))


_COMBINE: Final[dict[bytes, Callable[[list[Any]], None]]] = {
    pickle.APPENDS: _append_all,
    pickle.SETITEMS: _set_all,
    pickle.TUPLE: lambda stack: stack.append(tuple(_since_mark(stack))),
    pickle.TUPLE1: lambda stack: stack.append(_take(stack, 1)),
    pickle.TUPLE2: lambda stack: stack.append(_take(stack, 2)),
    pickle.TUPLE3: lambda stack: stack.append(_take(stack, 3)),
    pickle.REDUCE: lambda stack: stack.append(_Called(*_take(stack, 2))),
    pickle.BUILD: _build,
}
