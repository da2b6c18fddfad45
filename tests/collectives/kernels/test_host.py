"""Specific to the C++ core: instruction sets, threads, forks, foreign memory, and the build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from collectives import SparseVector
from collectives.cores import default_threads, use_threads
from collectives.kernels import Momentum, host, reference
from collectives.kernels.host import library, threads
from collectives.vector import check

ROOT = Path(__file__).parents[3]
PROGRAMS = ROOT / "tests" / "programs"
LARGE = 900_000  # elements enough for three threads
INSTRUCTIONS = ["portable", "AVX2", "AVX-512"]

pytestmark = pytest.mark.skipif(bool(library.load_error()), reason=library.load_error())


@pytest.fixture(params=INSTRUCTIONS)
def _instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    best = host.instructions()
    if not library.use_instructions(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield
    library.use_instructions(best)


def vectors(random: np.random.Generator, size: int, dtype: type) -> dict[str, np.ndarray]:
    """Return vectors that are difficult for a search, each in another way."""
    normal = random.standard_normal(size)
    few = np.zeros(size)
    few[random.integers(0, size, 3)] = 1
    holes = np.where(random.random(size) < 0.1, np.nan, normal)
    holes[random.integers(0, size, 3)] = -np.inf
    subnormal = np.finfo(dtype).smallest_subnormal * random.integers(-9, 9, size)
    everything = {
        "normal": normal,
        "ascending": np.sort(normal),
        "descending": np.sort(np.abs(normal))[::-1],
        "layered": normal * np.repeat(2.0 ** np.arange(-20, 21), size // 41 + 1)[:size],
        "equal": np.full(size, -3.0),
        "tied": np.round(normal),
        "zeros": np.zeros(size),
        "few": few,
        "not finite": holes,
        "subnormal": subnormal,
    }
    return {name: values.astype(dtype) for name, values in everything.items()}


def assert_same(a: SparseVector, b: SparseVector) -> None:
    assert a.indices.tolist() == b.indices.tolist()
    assert np.array_equal(a.values, b.values, equal_nan=True)
    assert a.indices.dtype == b.indices.dtype
    assert a.length == b.length


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 7, 31, 33, 95, 2047, 2049, 30_011])
def test_every_instruction_set_selects_as_the_reference(
    size: int, dtype: type, random: np.random.Generator
) -> None:
    for values in vectors(random, size, dtype).values():
        for k in sorted({1, size // 1000 + 1, size // 3 + 1, size}):
            expected, following = reference.select(values, k)
            for threshold in (0.0, following, 1e-3, 5.0, np.inf):
                assert_same(host.select(values, k, threshold)[0], expected)
        added = values[::-1].copy()
        with np.errstate(invalid="ignore"):
            expected, _ = reference.select(values + added, size // 3 + 1)
        residual = values.copy()
        assert_same(host.accumulate_and_select(residual, added, size // 3 + 1, 0.5)[0], expected)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_selection_does_not_depend_on_the_number_of_threads(
    count: int, dtype: type, random: np.random.Generator
) -> None:
    for values in vectors(random, LARGE, dtype).values():
        for k in (5, 900, LARGE // 10):
            expected, following = reference.select(values, k)
            for threshold in (0.0, following, 5.0):
                with use_threads(count):
                    assert_same(host.select(values, k, threshold)[0], expected)


@pytest.mark.parametrize("count", [1, 3])
def test_gradient_parts_and_velocity_equal_the_reference_on_any_threads(
    count: int, random: np.random.Generator
) -> None:
    gradient = random.standard_normal(LARGE).astype(np.float16)
    parts = np.split(gradient, np.sort(random.integers(0, LARGE, 40)))
    results_of_twins = []
    for twin in (reference, host):
        residual, velocity = np.ones((2, LARGE), np.float32)
        momentum = Momentum(velocity, 0.9)
        with use_threads(count):
            picked, guess = twin.accumulate_and_select(residual, parts, 1000, 0.0, momentum)
            again, _ = twin.accumulate_and_select(residual, parts, 1000, guess, momentum)
        results_of_twins.append((residual, velocity, picked, again))
    for a, b in zip(results_of_twins[0][:2], results_of_twins[1][:2], strict=True):
        assert a.tobytes() == b.tobytes()
    for a, b in zip(results_of_twins[0][2:], results_of_twins[1][2:], strict=True):
        assert_same(a, b)


def test_squared_norm_does_not_depend_on_the_number_of_threads(
    random: np.random.Generator,
) -> None:
    values = random.standard_normal(LARGE).astype(np.float32)
    for count in (1, 2, 3):
        with use_threads(count):
            assert host.squared_norm(values) == reference.squared_norm(values)


def test_concurrent_selections_do_not_disturb_each_other(random: np.random.Generator) -> None:
    inputs = [random.standard_normal(LARGE).astype(np.float32) for _ in range(4)]
    expected = [reference.select(values, 900)[0] for values in inputs]
    found: list[list[SparseVector]] = [[] for _ in inputs]

    def search(number: int) -> None:
        with use_threads(3):
            found[number].extend(host.select(inputs[number], 900)[0] for _ in range(10))

    callers = [threading.Thread(target=search, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for results, right in zip(found, expected, strict=True):
        assert len(results) == 10
        for result in results:
            assert_same(result, right)


def test_threads_start_for_long_vectors_and_again_in_forked_children() -> None:
    program = str(PROGRAMS / "kernels_threads.py")
    environment = {**os.environ, "GTOPK_THREADS": "3", "PYTHONPATH": str(ROOT)}
    job = subprocess.run(
        [sys.executable, "-W", "ignore", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (job.returncode, job.stdout) == (0, "the child searched\n"), job.stderr


# ---- how often the vector is read


def scans(dense: np.ndarray, k: int, threshold: float) -> int:
    zeros = np.zeros_like(dense)
    return host.search(dense.copy(), zeros, k, threshold)[1].scans


def test_previous_threshold_makes_one_scan_enough(random: np.random.Generator) -> None:
    residual = np.zeros(100_000, np.float32)
    threshold = 0.0
    for _ in range(20):
        gradient = random.standard_normal(residual.size).astype(np.float32)
        picked, report = host.search(residual, gradient, 100, threshold)
        assert report.scans == 1
        threshold = report.next_threshold
        host.clear_at(residual, picked.indices)


def test_misleading_threshold_costs_at_most_one_more_scan(random: np.random.Generator) -> None:
    values = vectors(random, 1_000_000, np.float32)
    for name, dense in values.items():
        assert scans(dense, 1000, 1e30) <= 2, name
    for name in ("normal", "equal", "tied", "not finite"):  # pruned on the way
        assert scans(values[name], 1000, 1e-30) == 1
    with use_threads(2):  # one thread, as on one core, has met large ones before these
        for name in ("ascending", "layered"):  # larger ones keep coming: given up, and sampled
            assert scans(values[name], 1000, 1e-30) == 2


@pytest.mark.parametrize("count", [1, 3])
def test_stopped_search_continues_where_it_stopped(count: int, random: np.random.Generator) -> None:
    # Larger and larger ones, behind a start that must not be forgotten; in one part, or in all.
    for begin in (0, 0.4, 0.9):
        dense = np.linspace(0, 1, 1_000_000, dtype=np.float32)
        dense[: int(begin * dense.size)] = 0
        dense[random.choice(dense.size, 700, replace=False)] *= -2
        gradient = random.standard_normal(dense.size).astype(np.float32) * 1e-7
        expected, _ = reference.select(dense + gradient, 1000)
        with use_threads(count):
            picked, report = host.search(dense, gradient, 1000, 0.5)
        assert report.scans == 2
        assert_same(picked, expected)


def test_vector_with_fewer_than_k_nonzeros_is_scanned_once() -> None:
    dense = np.zeros(100_000, np.float32)
    dense[:3] = 1
    assert scans(dense, 1000, 0.0) == 1
    assert host.select(dense, 1000)[1] == 0.0


# ---- arguments: index widths, alignment, dtypes, memory


def test_int64_indices_select_the_same_entries(
    random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As for vectors of 2^31 elements and more, which are too large for a test.
    values = vectors(random, 30_011, np.float32)
    expected = {name: host.select(dense, 300)[0] for name, dense in values.items()}
    monkeypatch.setattr(host, "index_dtype", lambda length: np.dtype(np.int64))
    for name, dense in values.items():
        found, _ = host.select(dense, 300)
        assert found.indices.dtype == np.int64
        assert found.indices.tolist() == expected[name].indices.tolist()


def test_short_lists_with_any_overlap_sum_as_in_the_reference() -> None:
    """All pairs of lists with indices below 6, including those that cancel."""
    lists = []
    for chosen in range(2**6):
        dense = np.array([index % 3 - 1.5 if chosen >> index & 1 else 0 for index in range(6)])
        lists.append(SparseVector.from_dense(dense.astype(np.float32)))
    for a in lists:
        for b in lists:
            for sign in (1, -1):
                other = b._replace(values=b.values * np.float32(sign))
                assert_same(host.sum_by_index([a, other]), reference.sum_by_index([a, other]))


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("length", [2**20, 2**31 - 1, 2**40])
def test_long_lists_merge_and_sum_as_in_the_reference(
    dtype: type, length: int, random: np.random.Generator
) -> None:
    index = np.int32 if length < 2**31 else np.int64
    lists = []
    for count in (3000, 5000, 1, 0, 2000):
        indices = np.unique(random.integers(0, min(length, 20_000), count)) * (length // 20_000)
        values = np.round(random.standard_normal(indices.size), 1).astype(dtype)
        lists.append(SparseVector(indices.astype(index), values, length))
    assert_same(host.sum_by_index(lists), reference.sum_by_index(lists))
    for a in lists:
        for b in lists:
            for k in (1, 100, 4000, 10_000):
                assert_same(check(host.merge(a, b, k)), reference.merge(a, b, k))
            found = host.contains(a.indices, b.indices)
            assert found.tolist() == reference.contains(a.indices, b.indices).tolist()


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_merges_of_difficult_values_equal_the_reference(
    dtype: type, random: np.random.Generator
) -> None:
    for name, dense in vectors(random, 9001, dtype).items():
        whole = SparseVector.from_dense(dense)
        for begin, end in ((0, 9001), (1, 6), (4500, 9001), (8990, 9001)):
            a, b = whole.take(slice(0, -1, 2)), whole.take(slice(begin, end))
            with np.errstate(invalid="ignore"):
                for k in (1, 40, 4000, 9001):
                    merged, expected = host.merge(a, b, k), reference.merge(a, b, k)
                    assert_same(merged, expected)
                    assert (
                        name == "not finite" or merged.values.tobytes() == expected.values.tobytes()
                    )


def test_kernels_accept_unaligned_entries() -> None:
    # As in a message whose header and indices are not a multiple of eight bytes long.
    message = np.zeros(4 + 3 * 8, np.uint8)
    values = message[4:].view(np.float64)
    values[:] = 1, -3, 2
    assert not values.flags.aligned
    vector = SparseVector(np.array([2, 5, 7], np.int32), values, 9)
    assert host.merge(vector, vector, 2).values.tolist() == [-6, 4]
    assert host.sum_by_index([vector, vector]).values.tolist() == [2, -6, 4]
    assert host.squared_norm(values) == 14
    dense = np.zeros(9)
    host.add_at(dense, vector)
    assert host.select(dense, 1)[0].indices.tolist() == [5]
    off = np.zeros(4 + 9 * 8, np.uint8)[4:].view(np.float64)
    host.add_at(off, vector)
    host.clear_at(off, np.array([5], np.int32))
    assert off.tolist() == [0, 0, 1, 0, 0, 0, 0, 2, 0]


@pytest.mark.parametrize("indices", [[-1, 2], [2, 9]])
def test_indices_outside_the_vector_are_refused_and_nothing_is_written(indices: list[int]) -> None:
    dense = np.zeros(9)
    outside = SparseVector(np.array(indices, np.int32), np.ones(2), 9)
    for call in (
        lambda: host.add_at(dense, outside),
        lambda: host.clear_at(dense, outside.indices),
    ):
        with pytest.raises(IndexError, match=r"indices must lie in 0\.\.8, got"):
            call()
    assert not dense.any()


def test_other_dtypes_are_converted_or_refused() -> None:
    narrow = SparseVector(np.array([1, 3], np.int32), np.array([1, 2], np.float32), 9)
    wide = np.array([1, 4], np.int64)
    dense = np.zeros(9)
    host.add_at(dense, narrow)
    assert dense.tolist() == [0, 1, 0, 2, 0, 0, 0, 0, 0]
    assert host.contains(narrow.indices, wide).tolist() == [True, False]
    half = np.ones(9, np.float16)
    for call, dtypes in (
        (lambda: host.squared_norm(half), "float16"),
        (lambda: host.all_finite(wide), "int64"),
        (lambda: host.clear_at(half, narrow.indices), "float16 at int32"),
        (lambda: host.clear_at(dense, narrow.indices.astype(np.uint32)), "float64 at uint32"),
    ):
        with pytest.raises(ValueError, match=f"has no kernel for {dtypes}: convert"):
            call()


def test_clear_zeroes_only_its_array_and_refuses_read_only_arrays() -> None:
    beside = np.ones(12, np.float32)
    host.clear(beside[::2])
    assert beside.tolist() == [0, 1] * 6
    fixed = np.frombuffer(b"\1" * 8, np.float32)
    with pytest.raises(ValueError, match="read-only"):
        host.clear(fixed)
    assert fixed.all()


def test_foreign_byte_orders_are_refused() -> None:
    foreign = np.arange(5).astype(np.dtype(np.float32).newbyteorder())
    indices = np.arange(5, dtype=np.int32)
    vector = SparseVector(indices, foreign, 5)
    for call in (
        lambda: host.all_finite(foreign),
        lambda: host.squared_norm(foreign),
        lambda: host.sum_by_index([vector, vector]),
        lambda: host.add_at(foreign, vector),
        lambda: host.clear_at(np.ones(5, np.float32), indices.astype(indices.dtype.newbyteorder())),
    ):
        with pytest.raises(ValueError, match=r"no kernel for .*[<>][fi]4.*: convert values with "):
            call()
    assert foreign.tolist() == [0, 1, 2, 3, 4]


def test_failed_allocation_in_the_core_raises_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_merge", defaultdict(lambda: lambda *_: -1))
    vector = SparseVector.empty(4)
    with pytest.raises(MemoryError, match=r"C\+\+ core"):
        host.merge(vector, vector, 1)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here to make `new` fail with")
def test_failed_allocation_leaves_arrays_whole_and_the_core_usable(
    tmp_path: Path,
) -> None:
    preloaded = tmp_path / "failing_new.so"
    source = PROGRAMS / "failing_new.cpp"
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", "-o", preloaded, source], check=True)
    job = subprocess.run(
        [sys.executable, str(PROGRAMS / "kernels_out_of_memory.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(preloaded)},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert (job.returncode, job.stdout) == (0, "it works after each failure\n"), job.stderr


# ---- which kernels are in use


def kernels_in_use(folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    code = "from collectives import kernels as k; print(k.in_use(), k.why_not_compiled(), sep='|')"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_compiled_core_is_used_unless_the_setting_selects_numpy() -> None:
    assert kernels_in_use(GTOPK_KERNELS="").stdout == f"C++ core, {host.instructions()}|\n"
    requested = kernels_in_use(GTOPK_KERNELS="reference").stdout
    assert requested == "NumPy reference|GTOPK_KERNELS=reference asks for NumPy\n"
    wrong = kernels_in_use(GTOPK_KERNELS="fast")
    assert wrong.returncode != 0
    assert "ValueError: GTOPK_KERNELS must be 'reference' (NumPy) or unset" in wrong.stderr


@pytest.fixture
def _reload_core() -> Iterator[None]:
    library.load_error.cache_clear()
    yield
    library.load_error.cache_clear()


@pytest.mark.usefixtures("_reload_core")
@pytest.mark.parametrize(
    ("name", "replacement", "reason"),
    [
        ("fingerprint", lambda: "another", "is not built from the sources beside it"),
        ("LIBRARY", Path("/nowhere/core.so"), "is not built"),
        ("LIBRARY", Path(__file__), "cannot be loaded: .*"),
    ],
)
def test_mismatched_or_missing_core_is_not_loaded(
    name: str, replacement: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, name, replacement)
    monkeypatch.setattr("sys.path", [])
    assert re.fullmatch(rf"the C\+\+ core {reason}", library.load_error())


@pytest.mark.parametrize("same", [True, False])
def test_unbuilt_clone_uses_an_installed_core_of_the_same_sources(
    same: bool, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "collectives", tmp_path / "collectives", ignore=_not_built)
    if not same:
        (tmp_path / "collectives/kernels/host/abi.hpp").write_text("// edited since\n")
    found = kernels_in_use(tmp_path, GTOPK_KERNELS="")
    core = f"C++ core, {host.instructions()}|\n"
    assert found.stdout == (core if same else "NumPy reference|the C++ core is not built\n")


def _not_built(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "__pycache__" or name.endswith(".so")]


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Return the environment of a process that no launcher started, with four cores."""
    for name in list(os.environ):
        if "LOCAL" in name or name.startswith(("GTOPK_", "SLURM_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr("collectives.cores.usable_cores", lambda: 4)
    default_threads.cache_clear()
    yield monkeypatch
    default_threads.cache_clear()


@pytest.mark.parametrize(("ranks", "expected"), [(None, 4), (1, 4), (2, 2), (3, 1), (9, 1)])
def test_ranks_of_a_host_share_its_cores(
    ranks: int | None, expected: int, no_launcher: pytest.MonkeyPatch
) -> None:
    if ranks is not None:
        no_launcher.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", str(ranks))
    assert threads() == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_NODEID": "1"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_NODEID": "2"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "2"}, 2),
        # mpirun's daemons are a step of one task a node.
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "2"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "16"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": ""}, 4),
    ],
)
def test_srun_tasks_share_the_cores_of_their_node(
    variables: dict[str, str], expected: int, no_launcher: pytest.MonkeyPatch
) -> None:
    no_launcher.setenv("SLURM_STEP_ID", "0")
    for name, text in variables.items():
        no_launcher.setenv(name, text)
    assert default_threads() == expected


def test_slurm_batch_script_uses_all_cores(no_launcher: pytest.MonkeyPatch) -> None:
    no_launcher.setenv("SLURM_NTASKS_PER_NODE", "4")
    no_launcher.setenv("SLURM_CPUS_PER_TASK", "1")
    assert default_threads() == 4


def test_thread_count_is_set_by_setting_or_context(no_launcher: pytest.MonkeyPatch) -> None:
    no_launcher.setenv("GTOPK_THREADS", "3")
    assert threads() == 3
    with use_threads(2):
        assert threads() == 2
    assert threads() == 3


@pytest.mark.parametrize("requested", [2**31, 2**32, 10**14])
def test_thread_count_beyond_32_bits_is_limited_to_the_work(
    requested: int, no_launcher: pytest.MonkeyPatch, random: np.random.Generator
) -> None:
    no_launcher.setenv("GTOPK_THREADS", str(requested))
    dense = random.standard_normal(1_000_000).astype(np.float32)
    assert_same(host.select(dense, 10)[0], reference.select(dense, 10)[0])
    assert host.squared_norm(dense) == reference.squared_norm(dense)


@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_invalid_thread_count_is_refused(text: str, no_launcher: pytest.MonkeyPatch) -> None:
    no_launcher.setenv("GTOPK_THREADS", text)
    with pytest.raises(ValueError, match=f"GTOPK_THREADS must be .*, got '{text}'"):
        threads()


# ---- compiled code


# The names that GCC 8 and clang 14 know; GCC 11 and clang 17 know more.
KNOWN_FEATURES = {"avx2", "avx512f", "avx512vl", "bmi", "bmi2", "popcnt"}


def test_processor_check_covers_every_compiled_instruction_set() -> None:
    text = (library.FOLDER / "scan.cpp").read_text()
    requested = {}
    for name, body in re.findall(r"&set == &(\w+)\) \{(.*?)\}", text, re.DOTALL):
        requested[name] = set(re.findall(r'__builtin_cpu_supports\("(\w+)"\)', body))
        assert requested[name] <= KNOWN_FEATURES, (
            "older compilers fail on names that are new to them"
        )
        if "has_f16c()" in body:
            requested[name].add("f16c")
    assert list(requested) == ["avx512", "avx2"]
    for path in library.sources() + library.headers():
        compiled_for = re.findall(r'target\("(.*?)"\)', path.read_text())
        needed = {feature for features in compiled_for for feature in features.split(",")}
        wide = requested["avx512"] if path.name == "scan_avx512.cpp" else set()
        assert needed <= requested["avx2"] | wide, path.name


def test_sanitizers_find_no_error_in_the_kernels(
    sanitized: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GTOPK_THREADS", "3")
    assert sanitized("kernels_random.py") == "all the same\n"


def test_vectors_beyond_the_cache_are_summed_and_cleared_exactly() -> None:
    """From 64 MiB on, both write past the caches; the arrays' ends need not be at cache lines."""
    length = (64 << 18) + 4099
    room = np.full(length + 3, 7.0, np.float32)
    beside, residual = room[1:-2], np.ones(length, np.float32)
    gradient = np.arange(length, dtype=np.float32) % 1024
    gradient[[0, 4097, length - 1]] = 2000, -3000, 4000
    picked, _ = host.accumulate_and_select(residual, gradient, 3, into=beside)
    assert picked.indices.tolist() == [0, 4097, length - 1]
    assert picked.values.tolist() == [2001, -2999, 4001]
    assert np.array_equal(beside, gradient + 1)
    assert residual.max() == 1
    host.clear(beside)
    assert not beside.any()
    assert room[[0, -2, -1]].tolist() == [7, 7, 7]
