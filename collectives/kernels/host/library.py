"""The compiled library: found, checked against its sources, and loaded once.

The C++ sources of the core, and a fingerprint that tells whether a library is made of them.

Standard library only: setup.py runs this file before anything is installed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
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
    """Return what the translation units include."""
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
    return None if absence() else ctypes.CDLL(str(LIBRARY))


@functools.cache
def absence() -> str:
    """Return why the library cannot be used; "" when it can."""
    if not LIBRARY.exists():
        return "the C++ core is not built"
    try:
        built_from = ctypes.CDLL(str(LIBRARY)).sources_fingerprint
    except (OSError, AttributeError) as error:
        return f"the C++ core cannot be loaded: {error}"
    built_from.restype = ctypes.c_char_p
    # An installed package has no sources to compare with.
    if fingerprint() not in ("", built_from().decode()):
        return "the C++ core is not built from the sources beside it"
    return ""


def instructions() -> str:
    """Return which instructions of the processor the loaded library uses."""
    loaded = library()
    if loaded is None:
        raise RuntimeError(absence())
    loaded.instructions_in_use.restype = ctypes.c_char_p
    name: bytes = loaded.instructions_in_use()
    return name.decode()


def use_instructions(name: str) -> bool:
    """Have the library use "portable", "AVX2" or "AVX-512", and tell whether the processor can."""
    loaded = library()
    return loaded is not None and bool(loaded.use_instructions(name.encode()))
