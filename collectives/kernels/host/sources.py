"""The C++ sources of the core, and a fingerprint that tells whether a library is made of them.

Standard library only: setup.py runs this file before anything is installed.
"""

from __future__ import annotations

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
