"""Reads files of CIFAR-10's Python version, which are pickles, without running anything in them.

The published files are pickles of protocol 2, written by Python 2:

    {"batch_label": str, "labels": [int, ...], "data": uint8 [rows, 3072], "filenames": [str, ...]}

A pickle is a program for a small machine that may call anything. The machine here knows only the
steps in those files, and calls nothing: an array's bytes are taken from the file, its shape and
type are compared with the expected ones, and every other step is refused with its place.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from .malformed import MalformedFile

MOST_BYTES: Final = 64 << 20  # in a file; the published ones have 31 MB
_MAKE: Final = "numpy.core.multiarray _reconstruct"
_BYTES: Final = ("numpy dtype", "u1")


class _Called(NamedTuple):
    """A call in a pickle, which is compared and never made. state: the state set afterwards."""

    name: Any
    arguments: Any
    state: Any = None


class _Stack:
    """The machine's stack; marks: where the parts of a list, tuple or dictionary begin."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.marks: list[int] = []

    def take(self, count: int) -> tuple[Any, ...]:
        """Pop the last `count` values; raise ValueError where there are fewer."""
        if len(self.values) < count:
            raise ValueError(f"{count} values should be there, and {len(self.values)} are")
        parts = tuple(self.values[-count:])
        del self.values[-count:]
        return parts

    def take_marked(self) -> list[Any]:
        """Pop the values above the last mark, and the mark."""
        place = self.marks.pop()
        parts = self.values[place:]
        del self.values[place:]
        return parts


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
    """Return the array that unpickling with NumPy would make.

    Its state in the pickle: version, shape, type, whether columns come first, bytes.
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
    """Return the pickle's content, as plain values and `_Called`."""
    program, stack, memo = _Program(content), _Stack(), dict[int, Any]()
    try:
        if program.take(1) + program.take(1) != pickle.PROTO + b"\x02":
            raise ValueError("it does not begin as a pickle of protocol 2")
        while (step := program.take(1)) != pickle.STOP:
            if step in _PUT:
                memo[program.number(_PUT[step])] = stack.values[-1]
            elif step in _GET:
                stack.values.append(memo[program.number(_GET[step])])
            elif step == pickle.MARK:
                stack.marks.append(len(stack.values))
            elif step in _PUSH:
                stack.values.append(_PUSH[step](program))
            elif step in _COMBINE:
                _COMBINE[step](stack)
            else:
                raise ValueError(f"the step {step!r} is none that CIFAR-10's files take")
        (result,) = stack.values
        if left := len(content) - program.place:
            raise ValueError(f"{left} bytes follow its end")
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        reason = f"is no file of CIFAR-10's Python version: {error}"
        raise MalformedFile(path, None, reason, byte=program.place) from error
    return result


class _Program:
    """The bytes of a pickle; place: the index of the next byte."""

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


def _append_all(stack: _Stack) -> None:
    parts = stack.take_marked()
    stack.values[-1].extend(parts)


def _set_all(stack: _Stack) -> None:
    parts = stack.take_marked()
    keys = parts[::2]
    # Hashing a tuple of tuples of tuples, each twice the same, would take for ever.
    if not all(isinstance(key, str) for key in keys):
        raise ValueError("a key is no text")
    stack.values[-1].update(zip(keys, parts[1::2], strict=True))


def _build(stack: _Stack) -> None:
    called, state = stack.take(2)
    stack.values.append(called._replace(state=state))


_COMBINE: Final[dict[bytes, Callable[[_Stack], None]]] = {
    pickle.APPENDS: _append_all,
    pickle.SETITEMS: _set_all,
    pickle.TUPLE: lambda stack: stack.values.append(tuple(stack.take_marked())),
    pickle.TUPLE1: lambda stack: stack.values.append(stack.take(1)),
    pickle.TUPLE2: lambda stack: stack.values.append(stack.take(2)),
    pickle.TUPLE3: lambda stack: stack.values.append(stack.take(3)),
    pickle.REDUCE: lambda stack: stack.values.append(_Called(*stack.take(2))),
    pickle.BUILD: _build,
}
