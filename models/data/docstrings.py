"""Real text without a download: the docstrings or the code of Python's standard library, by byte.

They differ between versions of Python. The origin names the version, and figures of different
versions must not be compared.
"""

from __future__ import annotations

import inspect
import os
import platform
import re
from pathlib import Path
from typing import Final

import numpy as np
import torch

from .lanes import Text
from .malformed import MalformedFile

TEST_EVERY: Final = 10
VOCABULARY: Final = 256
_DOCSTRING: Final = re.compile(r'^[ \t]*[rR]?"""(.+?)"""', re.MULTILINE | re.DOTALL)


def load_docstrings(library: Path | None = None) -> Text:
    """Return the docstrings of the library's modules, in the order of the modules' names.

    library: the folder of the standard library; None: this interpreter's.
    Every tenth is held out for testing.
    Raises FileNotFoundError if the interpreter came without its sources, MalformedFile for a module
    that is not UTF-8.
    """
    sources = _sources(library)
    texts = [inspect.cleandoc(text) for source in sources for text in _DOCSTRING.findall(source)]
    return _split(texts, "docstrings")


def load_code(library: Path | None = None) -> Text:
    """Return the code of the library's modules without docstrings; see `load_docstrings`."""
    return _split([_DOCSTRING.sub("", source) for source in _sources(library)], "code")


def _split(texts: list[str], name: str) -> Text:
    """Hold every tenth text out."""
    train = [text for number, text in enumerate(texts, 1) if number % TEST_EVERY]
    test = texts[TEST_EVERY - 1 :: TEST_EVERY]
    if not test:
        raise FileNotFoundError(f"no {name}: the sources of Python's standard library are needed")
    origin = f"{name} of Python {platform.python_version()}'s standard library"
    return Text(_as_bytes(train), _as_bytes(test), VOCABULARY, origin)


def _sources(library: Path | None) -> list[str]:
    """Return the modules' texts."""
    folder = library or Path(os.__file__).parent
    return [_source(path) for path in sorted(folder.glob("[a-z]*.py"))]


def _source(path: Path) -> str:
    """Return a module's text, without a byte-order mark, which Python allows."""
    try:
        return path.read_text(encoding="utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8: {error.reason}"
        raise MalformedFile(path, None, reason, byte=error.start) from error


def _as_bytes(texts: list[str]) -> torch.Tensor:
    joined = "\n\n".join(texts).encode()
    return torch.from_numpy(np.frombuffer(joined, np.uint8).astype(np.int64))
