"""The compiled library: find it, check that it was built from the present sources, and load it.

Standard library only: setup.py runs this file before anything is installed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "core.so"

# -ffp-contract=off: a fused multiply-add rounds once, while NumPy rounds twice.
COMPILE_ARGUMENTS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-pthread",
]
LINK_ARGUMENTS = ["-pthread"]


def sources() -> list[Path]:
    """Return the translation units; none where the package was installed without them."""
    return sorted(FOLDER.glob("*.cpp"))


def headers() -> list[Path]:
    """Return the headers that the translation units include."""
    return sorted(FOLDER.glob("*.hpp"))


def fingerprint() -> str:
    """Return a digest of all sources; "" where there are none."""
    files = sources() + headers()
    if not files:
        return ""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library, or None if there is none that was built from its sources."""
    return _found()[0]


@functools.cache
def load_error() -> str:
    """Return why the library cannot be used; "" when it can."""
    return _found()[1]


def _found() -> tuple[ctypes.CDLL | None, str]:
    """Return the first library that fits; or None, and the problem with the one by the sources.

    A script in a clone imports the clone's sources. After `pip install .` their library is only in
    the installed package, so that is searched, too.
    """
    problems = []
    for path in (LIBRARY, *_installed()):
        loaded, problem = _load(path)
        if loaded is not None:
            return loaded, ""
        problems.append(problem)
    return None, problems[0]


def _installed() -> list[Path]:
    """Return the libraries of other copies of this package that could be imported."""
    if not fingerprint():  # this is itself an installed package, without sources
        return []
    found = (Path(folder, *__package__.split("."), LIBRARY.name) for folder in sys.path)
    return [path for path in found if path != LIBRARY and path.is_file()]


def _load(path: Path) -> tuple[ctypes.CDLL | None, str]:
    """Return a library, or None and why it cannot be used."""
    if not path.exists():
        return None, "the C++ core is not built"
    try:
        loaded = ctypes.CDLL(str(path))
        built_from = loaded.sources_fingerprint
    except (OSError, AttributeError) as error:
        return None, f"the C++ core cannot be loaded: {error}"
    built_from.restype = ctypes.c_char_p
    # An installed package has no sources to compare with.
    if fingerprint() not in ("", built_from().decode()):
        return None, "the C++ core is not built from the sources beside it"
    return loaded, ""


def instructions() -> str:
    """Return the name of the instruction set that the loaded library uses."""
    loaded = library()
    if loaded is None:
        raise RuntimeError(load_error())
    loaded.instructions_in_use.restype = ctypes.c_char_p
    name: bytes = loaded.instructions_in_use()
    return name.decode()


def use_instructions(name: str) -> bool:
    """Switch the library to "portable", "AVX2" or "AVX-512"; return False if it is missing."""
    loaded = library()
    return loaded is not None and bool(loaded.use_instructions(name.encode()))
