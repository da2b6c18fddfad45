"""Compile every kernel for every architecture without a GPU, and report its registers.

python tests/collectives/kernels/device/compile_kernels.py [architecture ...]
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np

from collectives.kernels.device.source import FILES, FOLDER, OPTIONS, instance, text

# Turing, Ampere (A100, then its small sisters), Ada, Hopper, Blackwell (B200, then its sisters).
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)

# What CuPy 14 adds to the options: subnormal float32 are zeros, to operators of C++.
FLUSHING: Final = "-ftz=true"
OF_CUPY: Final = (FLUSHING, "--device-as-default-execution-space")


class Resources(NamedTuple):
    """The registers and spilled bytes of one kernel on one architecture."""

    kernel: str
    registers: int
    spilled_bytes: int


def instances() -> list[str]:
    """Return every kernel in every type that the library launches."""
    reals: list[np.dtype[Any]] = [np.dtype(np.float32), np.dtype(np.float64)]
    indices: list[np.dtype[Any]] = [np.dtype(np.int32), np.dtype(np.int64)]
    narrow: list[np.dtype[Any]] = [np.dtype(np.float16), np.dtype(np.uint16)]
    names = [
        instance("mark", real, gradient, sources)
        for real, gradients in ((reals[0], [*narrow, reals[0]]), (reals[1], [reals[1]]))
        for gradient in gradients
        for sources in (0, 1, 2)
        # Without a gradient its dtype says nothing: one kernel serves all.
        if sources or gradient == real
    ]
    names += [
        instance("put_at", real, index, element)
        for real, elements in ((reals[0], [*narrow, reals[0]]), (reals[1], [reals[1]]))
        for element in elements
        for index in indices
    ]
    for kernel in ("begin", "count", "find_largest", "remark", "search_level"):
        names += [instance(kernel, real) for real in reals]
    for kernel in ("find_nonfinite", "sum_squares"):
        names += [instance(kernel, dtype) for dtype in (*narrow, *reals)]
    for kernel in (
        "add_at",
        "clear_at",
        "collect",
        "expand",
        "interleave",
        "split",
        "sum_runs",
    ):
        names += [instance(kernel, real, index) for real in reals for index in indices]
    for kernel in ("contains", "count_blocks", "find_disorder", "pack_offsets", "unpack_offsets"):
        names += [instance(kernel, index) for index in indices]
    for kernel in ("round_values", "widen_values"):
        names += [instance(kernel, dtype, real) for dtype in narrow for real in reals]
    for kernel in ("pack_few_bits", "unpack_few_bits"):
        names += [instance(kernel, real, bits) for real in reals for bits in (4, 3, 2)]
    return sorted([*names, "checksum"])


def nvcc(architecture: int) -> list[Resources]:
    """Compile all kernels at once; return what the assembler reports of each."""
    _, assembler_report = _compile_all(architecture, "-cubin", "-Xptxas", "-v")
    resources = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers",
        assembler_report,
        re.DOTALL,
    )
    filt = subprocess.run(
        ["c++filt"], input="\n".join(name for name, *_ in resources), capture_output=True, text=True
    )
    readable = filt.stdout.split("\n")
    return [
        Resources(re.sub(r"^void |\(.*", "", name), int(registers), int(spilled))
        for name, (_, spilled, registers) in zip(readable, resources, strict=True)
    ]


def ptx(architecture: int) -> str:
    """Compile all kernels at once to PTX, with subnormal numbers as CuPy has them."""
    return _compile_all(architecture, "-ptx", FLUSHING)[0].decode()


def _compile_all(architecture: int, *options: str) -> tuple[bytes, str]:
    """Return nvcc's output file and its messages."""
    # A kernel whose address is taken is instantiated.
    lines = [f'#include "{file}"' for file in sorted(set(FILES.values()))]
    lines += ["void* kernels[] = {", *(f"  (void*){name}," for name in instances()), "};"]
    with TemporaryDirectory() as folder:
        source, output = Path(folder, "kernels.cu"), Path(folder, "out")
        source.write_text("\n".join(lines) + "\n")
        command = ["nvcc", *OPTIONS, f"-arch=sm_{architecture}", *options]
        command += ["-Werror", "all-warnings", f"-I{FOLDER}", "-o", str(output), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"nvcc for sm_{architecture}: {done.stderr}")
        return output.read_bytes(), done.stderr


def nvrtc(architecture: int) -> str:
    """Compile one file after the other, as CuPy does for each of its kernels; return all PTX."""
    path = nvrtc_library()
    assert path is not None
    for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))  # NVRTC opens it by its bare name
    library = ctypes.CDLL(str(path))
    options = [option.encode() for option in (*OPTIONS, *OF_CUPY, f"-arch=sm_{architecture}")]
    written = []
    for file in sorted(set(FILES.values())):
        names = [name for name in instances() if FILES[name.partition("<")[0]] == file]
        program = ctypes.c_void_p()
        source = text(file).encode()
        library.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.cu", 0, None, None)
        for name in names:
            library.nvrtcAddNameExpression(program, name.encode())
        failed = library.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*options)
        )
        size = ctypes.c_size_t()
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        library.nvrtcGetPTXSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        library.nvrtcGetPTX(program, code)
        library.nvrtcDestroyProgram(ctypes.byref(program))
        if failed:
            raise RuntimeError(f"nvrtc for sm_{architecture}, {file}: {log.value.decode()}")
        written.append(code.value.decode())
    return "".join(written)


def nvrtc_library() -> Path | None:
    """Return the NVRTC of the wheel nvidia-cuda-nvrtc; None without one."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else None
    found = [path for folder in folders or () for path in Path(folder).rglob("libnvrtc.so.*[0-9]")]
    return min(found, default=None, key=lambda path: len(path.name))


def available() -> dict[str, object]:
    """Return the installed compilers, by name."""
    compilers: dict[str, object] = {}
    if shutil.which("nvcc"):
        compilers["nvcc"] = nvcc
    if nvrtc_library():
        compilers["nvrtc"] = nvrtc
    return compilers


def table(architectures: tuple[int, ...]) -> Iterator[str]:
    """Return the registers of each kernel, a column an architecture; + for spilled bytes."""
    columns = {
        architecture: {resources.kernel: resources for resources in nvcc(architecture)}
        for architecture in architectures
    }
    yield f"{'registers':42}" + "".join(f"{f'sm_{column}':>8}" for column in columns)
    for kernel in sorted(next(iter(columns.values()))):
        cells = [
            f"{column[kernel].registers}{'+' * bool(column[kernel].spilled_bytes)}"
            for column in columns.values()
        ]
        yield f"{kernel:42}" + "".join(f"{cell:>8}" for cell in cells)


if __name__ == "__main__":
    print("\n".join(table(tuple(map(int, sys.argv[1:])) or ARCHITECTURES)))
