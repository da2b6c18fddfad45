"""Let every allocation of the C++ core fail once; check its state, and that it works afterwards.

    LD_PRELOAD=failing_new.so python tests/programs/kernels_out_of_memory.py

Each failure happens in its own child, which starts without threads and without earlier calls.
"""

import ctypes
import itertools
import os
import signal
import traceback
from collections.abc import Callable

import numpy as np

from collectives import SparseVector
from collectives.cores import use_threads
from collectives.kernels import host, reference

LENGTH = 900_000  # enough elements for three threads
FAILED, FINE = 0, 3  # a child's exit codes: an allocation failed, or there were not that many

fail_after = ctypes.CDLL(None).fail_after
fail_after.argtypes, fail_after.restype = [ctypes.c_long], ctypes.c_long

random = np.random.default_rng(1)
gradient = random.standard_normal(LENGTH).astype(np.float32)
INPUTS = {"shuffled": gradient, "ascending": np.sort(np.abs(gradient))}  # the latter are pruned


def same(a: SparseVector, b: SparseVector) -> bool:
    return a.indices.tolist() == b.indices.tolist() and a.values.tolist() == b.values.tolist()


def accumulates(addend: np.ndarray, k: int) -> None:
    """Add to a residual of ones; after a failure it has the whole gradient or none of it."""
    residual = np.ones_like(addend)
    whole = residual + addend
    try:
        picked, _ = host.accumulate_and_select(residual, addend, k, 0.1)
    except MemoryError:
        assert np.array_equal(residual, whole) or (residual == 1).all(), "half of a gradient"
    else:
        assert np.array_equal(residual, whole)
        assert same(picked, reference.select(whole, k)[0])


def sums(addend: np.ndarray, k: int) -> None:
    """Merge two lists, and sum three."""
    a, b = SparseVector.from_dense(addend[:k]), SparseVector.from_dense(addend[k : 2 * k])
    try:
        merged = host.merge(a, b, k)
        total = host.sum_by_index([a, b, a])
    except MemoryError:
        return
    assert same(merged, reference.merge(a, b, k))
    assert same(total, reference.sum_by_index([a, b, a]))


def fails(call: int, program: Callable[..., None], addend: np.ndarray, k: int, before: int) -> bool:
    """Let an allocation fail, then call again; tell whether there was such an allocation."""
    if before:
        program(addend, before)
    fail_after(call)
    program(addend, k)
    failed = fail_after(-1) == -1
    program(addend, k // 2)
    return failed


def fails_in_child(call: int, program: Callable[..., None], *arguments: object) -> bool:
    """Return what `fails` returns in a forked child."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            os._exit(FAILED if fails(call, program, *arguments) else FINE)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (FAILED, FINE), f"{program.__name__} ended with {code}: allocation {call} failed"
    return code == FAILED


with use_threads(3):
    for program in (accumulates, sums):
        for addend in INPUTS.values():
            for before in (0, 2000):
                failing = (
                    fails_in_child(n, program, addend, 4000, before) for n in itertools.count()
                )
                assert sum(itertools.takewhile(bool, failing)) > 0
print("it works after each failure")
