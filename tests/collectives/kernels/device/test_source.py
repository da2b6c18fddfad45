"""The CUDA sources compile for every supported GPU, within limits of registers and memory."""

from __future__ import annotations

import re
from typing import Any

import pytest

from collectives.kernels.device import source
from collectives.kernels.device.source import FILES, FOLDER, THREADS, text
from tests.collectives.kernels.device.compile_kernels import instances
from tests.matrix import some_of

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
REGISTERS = 65_536  # of a multiprocessor, for all its threads


@pytest.fixture(scope="module")
def compilers(beside: Any) -> Any:
    """The module that compiles without a GPU."""
    return beside("compile_kernels")


@pytest.mark.matrix
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvcc_compiles_every_kernel_without_register_spills(
    compilers: Any, architecture: int
) -> None:
    if "nvcc" not in compilers.available():
        pytest.skip("no nvcc here")
    resources = compilers.nvcc(architecture)
    assert len(resources) == len(instances())
    assert [kernel for kernel in resources if kernel.spilled_bytes] == []
    # Two blocks on a multiprocessor at least: else nothing hides the latency of a barrier.
    assert [kernel for kernel in resources if kernel.registers * THREADS * 2 > REGISTERS] == []


@pytest.mark.parametrize("architecture", some_of(ARCHITECTURES, 120))
def test_nvrtc_compiles_every_kernel_with_cupys_options(compilers: Any, architecture: int) -> None:
    if "nvrtc" not in compilers.available():
        pytest.skip("no NVRTC here: pip install nvidia-cuda-nvrtc")
    ptx = compilers.nvrtc(architecture)
    assert ptx.count(".entry ") == len(instances())
    assert flushing(ptx) == set()


@pytest.mark.matrix  # the suite reads the PTX of NVRTC, above
def test_kernels_do_not_flush_subnormal_numbers(compilers: Any) -> None:
    if "nvcc" not in compilers.available():
        pytest.skip("no nvcc here")
    assert flushing(compilers.ptx(90)) == set()


def flushing(ptx: str) -> set[str]:
    """Return the instructions that flush subnormal numbers to zero, where that matters.

    It does not when |x| is compared with infinity, as sm_120's compiler does for two keys.
    """
    assert ".entry" in ptx
    infinite = r"abs\.ftz\.f32\s+(%\w+), %\w+;\s+setp\.\w+\.ftz\.f32\s+%p\d+, \1, 0f7F800000;"
    return set(re.findall(r"\S+\.ftz\S*", re.sub(infinite, "", ptx)))


def test_files_table_lists_every_kernel_and_every_cu_file() -> None:
    assert {path.name for path in FOLDER.glob("*.cu")} == set(FILES.values())
    for kernel, file in FILES.items():
        assert re.search(rf"\bvoid {kernel}\(", (FOLDER / file).read_text(encoding="utf-8"))
    assert {name.partition("<")[0] for name in instances()} == set(FILES)
    assert len(set(instances())) == len(instances())


@pytest.mark.parametrize("file", sorted(set(FILES.values())))
def test_kernel_source_contains_each_include_once(file: str) -> None:
    whole = text(file)
    assert "#include" not in whole
    assert whole.count("struct Keys<float>") == 1


@pytest.mark.parametrize("file", sorted(set(FILES.values())))
def test_cu_files_open_with_their_idea_and_launch_shape(file: str) -> None:
    opening = (FOLDER / file).read_text(encoding="utf-8").partition("#include")[0]
    assert re.match(r"// [A-Z].*[.,:]", opening)
    assert "// launch: " in opening


def test_constants_shared_by_python_and_cuda_are_equal() -> None:
    from collectives.kernels.device import codes, selection

    assert f"#define THREADS {THREADS}\n" in text("mark.cu")
    assert 1 << int(re.search(r"BIN_BITS = (\d+)", text("search.cu"))[1]) == selection.BINS
    words = re.search(r"struct Search \{(.*?)\n\};", text("search.cu"), re.DOTALL)[1]
    fields = re.findall(r"^  (u64|u32) ([\w, ]+);", words, re.MULTILINE)
    halves = sum((2 if kind == "u64" else 1) * len(names.split(",")) for kind, names in fields)
    assert halves == 2 * selection.SEARCH_WORDS
    assert [name.strip() for name in fields[0][1].split(",")] == ["kept", "next"]
    assert codes.BLOCK == 1 << 16
    assert source.OPTIONS[1] == "--fmad=false"
