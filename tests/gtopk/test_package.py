"""The package as a whole: what importing it costs, and what it offers by its own name."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import gtopk

ROOT = Path(__file__).parents[2]

FRESH = """
import sys, gtopk
print(*{"torch", "lightning", "accelerate", "horovod", "mpi4py", "cupy"} & set(sys.modules))
print(gtopk.ddp.GTopKState.__name__, gtopk.ddp.gtopk_hook.__name__)
sys.modules["lightning"] = None  # not installed
try:
    gtopk.lightning
except ImportError as error:
    print(error)
"""


def test_its_submodules_are_imported_where_they_are_named_and_not_before() -> None:
    job = subprocess.run(
        [sys.executable, "-c", FRESH], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert job.stdout.splitlines() == [
        "",
        "GTopKState gtopk_hook",
        "gtopk.lightning needs Lightning: pip install lightning",
    ]


@pytest.mark.parametrize("name", ["accelerate", "ddp", "horovod", "local_sgd", "torch"])
def test_a_submodule_needs_no_import_of_its_own(name: str) -> None:
    assert gtopk.__getattr__(name) is importlib.import_module(f"gtopk.{name}")


def test_what_it_does_not_have_it_does_not_import() -> None:
    with pytest.raises(AttributeError, match="module 'gtopk' has no attribute 'keras'"):
        gtopk.__getattr__("keras")
