"""The compiled library: finds it, checks it against the C++ sources, and loads it once.

A fingerprint of the sources tells whether a library was made from them.

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

# No contraction: a fused multiply-add rounds once where NumPy rounds twice.
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
    """Return the library, or None where there is none that fits its sources."""
    return _found()[0]


@functools.cache
def absence() -> str:
    """Return why the library cannot be used; "" when it can."""
    return _found()[1]


def _found() -> tuple[ctypes.CDLL | None, str]:
    """Return the first library that fits; or None, and the problem with the one by the sources.

    A script in a clone imports the clone's sources, whose core may be built only in an installed
    package (`pip install .`): that is searched, too, so that both run the same kernels.
    """
    amiss = []
    for path in (LIBRARY, *_installed()):
        loaded, reason = _load(path)
        if loaded is not None:
            return loaded, ""
        amiss.append(reason)
    return None, amiss[0]


def _installed() -> list[Path]:
    """Return the libraries of other copies of this package that could be imported."""
    if not fingerprint():  # an installed package has no sources to compare another library with
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
    """Return which instructions of the processor the loaded library uses."""
    loaded = library()
    if loaded is None:
        raise RuntimeError(absence())
    loaded.instructions_in_use.restype = ctypes.c_char_p
    name: bytes = loaded.instructions_in_use()
    return name.decode()


def use_instructions(name: str) -> bool:
    """Make the library use "portable", "AVX2" or "AVX-512"; tell whether the processor has it."""
    loaded = library()
    return loaded is not None and bool(loaded.use_instructions(name.encode()))
