"""Machines for the tests of the CUDA kernels: the host, and a GPU if there is one."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives.kernels.device.cuda import CudaMachine
from collectives.kernels.device.machine import Scratch


def load(name: str) -> Any:
    """Import a file of this folder: tests are no package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


class Gpu(CudaMachine):
    """The machine of the library, which counts how often the host waited for it."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched = 0

    def fetch(self, array: Any) -> np.ndarray:
        self.fetched += 1
        return super().fetch(array)


def has_gpu() -> bool:
    """Tell whether there is a GPU, and a cupy to reach it."""
    try:
        return bool(importlib.import_module("cupy").cuda.is_available())
    except ImportError:
        return False


MACHINES = ["host", "host, shuffled", "host, wide"]
MACHINES += [pytest.param("gpu", marks=pytest.mark.gpu)] if has_gpu() else []


@pytest.fixture(scope="session")
def beside() -> Callable[[str], Any]:
    """Return a function that imports a file of this folder."""
    return load


@pytest.fixture(scope="session")
def on_gpu() -> Gpu:
    """The GPU; without one the test is skipped."""
    if not has_gpu():
        pytest.skip("no GPU here, or no cupy to reach it")
    return Gpu()


@pytest.fixture(scope="session")
def on_host(shared_folder: Path) -> Callable[..., Any]:
    """Return a function that makes a machine on the host."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here to compile the kernels for the host with")
    module = load("machine_on_host")

    @functools.cache
    def library(threads: int) -> ctypes.CDLL:
        return module.build(shared_folder / "kernels", threads)

    def make(threads: int = 64, blocks: int = 5, seed: int = 0) -> Any:
        return module.HostMachine(library(threads), threads, blocks, seed)

    return make


@pytest.fixture(scope="session", params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Any:
    """A machine: on the host with blocks of 64 threads in order, and shuffled; of 256; a GPU."""
    if request.param == "gpu":
        return request.getfixturevalue("on_gpu")
    make = request.getfixturevalue("on_host")
    return {
        "host": lambda: make(),
        "host, shuffled": lambda: make(seed=1),
        "host, wide": lambda: make(threads=256, blocks=3, seed=1),
    }[request.param]()


@pytest.fixture(scope="session")
def scratch(machine: Any) -> Scratch:
    """Scratch memory that goes through all tests, and is as dirty as they leave it."""
    return Scratch(machine)
