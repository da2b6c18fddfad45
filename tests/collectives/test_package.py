"""The package as a whole: the cost of importing it, and its names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import collectives

ROOT = Path(__file__).parents[2]


def test_importing_collectives_loads_no_torch_mpi4py_cupy_or_gtopk() -> None:
    code = (
        "import sys, collectives; "
        "assert 'numpy' in sys.modules; "
        "print(*{'torch', 'gtopk', 'models', 'mpi4py', 'cupy'} & set(sys.modules))"
    )
    job = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert job.stdout.strip() == ""


def test_every_exported_name_exists_and_is_sorted() -> None:
    missing = [name for name in collectives.__all__ if not hasattr(collectives, name)]
    assert missing == []
    # In the linter's order: constants, classes, functions.
    assert collectives.__all__ == sorted(
        collectives.__all__, key=lambda name: (not name.isupper(), name)
    )


def test_every_error_between_ranks_is_a_collective_error() -> None:
    between_ranks = [
        collectives.MessageError,
        collectives.MismatchError,
        collectives.PeerError,
        collectives.PeerTimeoutError,
    ]
    assert all(issubclass(kind, collectives.CollectiveError) for kind in between_ranks)
    assert issubclass(collectives.CollectiveError, RuntimeError)
    # A job can go on after a malformed message or a mismatch, but not without a peer.
    assert [issubclass(kind, collectives.PeerError) for kind in between_ranks] == [
        False,
        False,
        True,
        True,
    ]
