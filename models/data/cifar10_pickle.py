"""A file of CIFAR-10's Python version: a pickle, of which the few things needed are read, none run.

The published files are pickles of protocol 2, written by Python 2:

    {"batch_label": str, "labels": [int, ...], "data": uint8 [rows, 3072], "filenames": [str, ...]}

A pickle is a program for a small machine that may call anything. This machine here knows the steps
that those files take, and calls nothing: an array's bytes are what stands in the file, its shape
and type are compared with what they must be, and every other step is refused with its place.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from .malformed import MalformedFile

MOST_BYTES: Final = 64 << 20  # of a file; the published ones have 31 MB
_MADE: Final = ("numpy.core.multiarray _reconstruct", ("numpy ndarray", (0,), "b"))
_TYPE: Final = ("numpy dtype", ("u1", 0, 1))
_TYPE_STATE: Final = (3, "|", None, None, None, -1, -1, 0)


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
    """Return the array that a pickle would have made by NumPy's own means."""
    wanted = (1, (rows, row_bytes), _Called(*_TYPE, _TYPE_STATE), False)
    if (
        not isinstance(data, _Called)
        or data[:2] != _MADE
        or not isinstance(data.state, tuple)
        or data.state[:-1] != wanted
        or not isinstance(data.state[-1], bytes)
        or len(data.state[-1]) != rows * row_bytes
    ):
        raise MalformedFile(
            path, None, f"data must be an array of bytes, {rows} rows of {row_bytes}"
        )
    return np.frombuffer(data.state[-1], np.uint8).reshape(rows, row_bytes)


def _run(path: Path, content: bytes) -> Any:
    """Return what the pickle says, as plain values and `_Called`."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    place = 0
    try:
        for name, argument, place in _steps(content):
            if name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name in _PUSHED:
                stack.append(_PUSHED[name](argument))
            elif name in _COMBINED:
                _COMBINED[name](stack)
            elif name == "STOP":
                (result,) = stack
                if place + 1 != len(content):
                    raise ValueError(f"{len(content) - place - 1} bytes follow its end")
                return result
            elif name != "PROTO" or place:
                raise ValueError(f"the step {name} is none that CIFAR-10's files take")
        raise ValueError("it has no end")
    except (ValueError, TypeError, AttributeError, LookupError, UnicodeError) as error:
        reason = f"is no file of CIFAR-10's Python version: {error}"
        raise MalformedFile(path, None, reason, byte=place) from error


def _steps(content: bytes) -> Iterator[tuple[str, Any, int]]:
    for step, argument, place in pickletools.genops(content):
        yield step.name, argument, place or 0


_PUSHED: Final[dict[str, Callable[[Any], Any]]] = {
    "MARK": lambda _: _Mark,
    "EMPTY_DICT": lambda _: {},
    "EMPTY_LIST": lambda _: [],
    "NONE": lambda _: None,
    "NEWFALSE": lambda _: False,
    **dict.fromkeys(("BININT", "BININT1", "BININT2"), lambda number: number),
    "SHORT_BINSTRING": lambda text: text,
    "BINSTRING": lambda text: text.encode("latin-1"),  # long ones are arrays' bytes
    "GLOBAL": lambda name: name,
}


def _since_mark(stack: list[Any]) -> list[Any]:
    """Take what lies above the last mark off the stack, and the mark."""
    place = len(stack) - 1 - stack[::-1].index(_Mark)
    parts = stack[place + 1 :]
    del stack[place:]
    return parts


def _take(stack: list[Any], count: int) -> tuple[Any, ...]:
    if len(stack) < count:
        raise ValueError(f"{len(stack)} values where {count} are taken")
    parts = tuple(stack[-count:])
    del stack[-count:]
    return parts


def _append_all(stack: list[Any]) -> None:
    parts = _since_mark(stack)
    stack[-1].extend(parts)


def _set_all(stack: list[Any]) -> None:
    parts = _since_mark(stack)
    stack[-1].update(zip(parts[::2], parts[1::2], strict=True))


def _call(stack: list[Any]) -> None:
    stack.append(_Called(*_take(stack, 2)))


def _build(stack: list[Any]) -> None:
    called, state = _take(stack, 2)
    stack.append(called._replace(state=state))


_COMBINED: Final[dict[str, Callable[[list[Any]], None]]] = {
    "APPENDS": _append_all,
    "SETITEMS": _set_all,
    "TUPLE": lambda stack: stack.append(tuple(_since_mark(stack))),
    "TUPLE1": lambda stack: stack.append(_take(stack, 1)),
    "TUPLE2": lambda stack: stack.append(_take(stack, 2)),
    "TUPLE3": lambda stack: stack.append(_take(stack, 3)),
    "REDUCE": _call,
    "BUILD": _build,
}
