"""The machine of the tests: the CUDA kernels, compiled for the host, on NumPy arrays.

Its memory begins as garbage and has red zones on both sides.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from collectives.kernels.device.machine import require_packed
from collectives.kernels.device.source import FILES, FOLDER
from tests.collectives.kernels.device.compile_kernels import instances
from tests.sharing import locked

HERE = Path(__file__).parent
ZONE, GARBAGE = 64, 0xCD  # bytes


LAUNCH = """
extern "C" __attribute__((visibility("default")))
const char* launch(const char* name, unsigned blocks, unsigned threads, void** arguments,
                   const size_t* sizes, unsigned count, uint64_t seed) {
  return host::launch(name, blocks, threads, arguments, sizes, count, seed);
}
"""


def build(folder: Path, threads: int) -> ctypes.CDLL:
    """Return the kernels as a library of the host, for blocks of so many threads.

    It is compiled once for all that have the folder.
    """
    lines = ["#include <algorithm>", '#include "cuda_on_host.hpp"']
    lines += [f'#include "{file}"' for file in sorted(set(FILES.values()))]
    lines += ["std::map<std::string, host::Entry> host::kernels = {"]
    lines += [f'  {{"{name}", host::kernel_of({name})}},' for name in instances()]
    path = folder / f"kernels_{threads}.so"
    with locked(folder):
        if not path.exists():
            compile_for_host(path, "\n".join([*lines, "};"]), threads)
    return loaded(path)


def compile_for_host(path: Path, source: str, threads: int) -> None:
    """Write a source with its table of kernels as a library."""
    path.with_suffix(".cpp").write_text(source + LAUNCH)
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wno-unknown-pragmas", "-Werror"]
    command += ["-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared"]
    # Libraries with the same names in one process must not share their statics.
    command += ["-fvisibility=hidden", "-fno-gnu-unique", f"-DTHREADS={threads}"]
    command += [f"-I{HERE}", f"-I{FOLDER}"]
    command += ["-o", str(path), str(path.with_suffix(".cpp"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def loaded(path: Path) -> ctypes.CDLL:
    """Return a library of kernels."""
    library = ctypes.CDLL(str(path))
    library.launch.restype = ctypes.c_char_p
    return library


class HostMachine:
    """A machine as the launch sequences know it. A seed shuffles threads, blocks and atomics."""

    def __init__(self, library: ctypes.CDLL, threads: int, blocks: int, seed: int = 0) -> None:
        self.library = library
        self.threads = threads
        self.blocks = blocks
        self.seeds = itertools.repeat(0) if seed == 0 else itertools.count(seed)
        self.launched: list[str] = []
        self.fetched = 0
        self._buffers: list[weakref.ref[np.ndarray]] = []
        self._captured: list[tuple[Any, ...]] | None = None  # the launches of a graph in the making

    def empty(self, size: int, dtype: Any) -> np.ndarray:
        assert self._captured is None, "a graph keeps its addresses, so no memory may be new"
        count = size * np.dtype(dtype).itemsize
        buffer = np.full(count + 2 * ZONE, GARBAGE, np.uint8)
        self._buffers.append(weakref.ref(buffer))
        return buffer[ZONE : ZONE + count].view(dtype)

    def zeros(self, size: int, dtype: Any) -> np.ndarray:
        array = self.empty(size, dtype)
        array.view(np.uint8)[:] = 0
        return array

    def put(self, array: np.ndarray) -> np.ndarray:
        """Return a copy in this machine's memory."""
        copy = self.empty(array.size, array.dtype)
        copy[:] = array
        return copy

    def write(self, array: np.ndarray, content: np.ndarray) -> None:
        assert self._captured is None, "a graph would write what it was captured with"
        array[:] = content

    def capture(self, launches: Callable[[], None]) -> Callable[[], None]:
        """Return what replays the launches with the arguments that they have now."""
        captured = self._captured = []
        try:
            launches()
        finally:
            self._captured = None
        return lambda: [self.launch(*one) for one in captured]

    def packed(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array)

    def address(self, array: np.ndarray) -> int:
        return array.ctypes.data

    def launch(self, kernel: str, blocks: int, *arguments: np.ndarray | np.generic | None) -> None:
        assert 1 <= blocks <= self.blocks
        require_packed(*arguments)
        if self._captured is not None:
            assert kernel in self.launched, f"{kernel} would be compiled in the midst of a capture"
            self._captured.append((kernel, blocks, *arguments))
            return
        given = [np.uint64(0) if argument is None else argument for argument in arguments]
        held = [
            ctypes.c_void_p(argument.ctypes.data)
            if isinstance(argument, np.ndarray)
            else (ctypes.c_char * argument.nbytes).from_buffer_copy(argument.tobytes())
            for argument in given
        ]
        pointers = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        sizes = (ctypes.c_size_t * len(held))(*map(ctypes.sizeof, held))
        error = self.library.launch(
            kernel.encode(),
            blocks,
            self.threads,
            pointers,
            sizes,
            len(held),
            ctypes.c_uint64(next(self.seeds)),
        )
        assert error is None, f"{kernel}: {error.decode()}"
        self.launched.append(kernel)
        self.check_red_zones(kernel)

    def fetch(self, array: np.ndarray) -> np.ndarray:
        self.fetched += 1
        return array.copy()

    def check_red_zones(self, kernel: str) -> None:
        """Fail when something was written beside the memory that was asked for."""
        self._buffers = [buffer for buffer in self._buffers if buffer() is not None]
        for reference in self._buffers:
            buffer = reference()
            if buffer is not None:
                zones = np.concatenate([buffer[:ZONE], buffer[-ZONE:]])
                assert (zones == GARBAGE).all(), f"{kernel} wrote beside its memory"
