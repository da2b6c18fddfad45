"""The test machine detects faults that a GPU would not report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

KERNELS = """
#include <algorithm>
#include "cuda_on_host.hpp"
constexpr unsigned ALL = 0xffffffffu;

// Turn the block's values round; right only with the barrier.
template <bool BARRIER> void turn(unsigned* values) {
  __shared__ unsigned held[64];
  held[threadIdx.x] = values[threadIdx.x];
  if (BARRIER) __syncthreads();
  values[threadIdx.x] = held[63 - threadIdx.x];
}

// Count the threads; right only with the atomic.
void count_atomically(unsigned* total) { atomicAdd(total, 1u); }

void sum_warp(unsigned* values) {
  unsigned sum = values[threadIdx.x];
  for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(ALL, sum, distance);
  values[threadIdx.x] = sum + __ballot_sync(ALL, threadIdx.x % 2);
}

void meet_at_two_barriers() {
  if (threadIdx.x % 2)
    __syncthreads();
  else
    __syncthreads();
}

void flags_alone() {
  if (threadIdx.x % 32 == 0) __any_sync(ALL, 1);
  __syncthreads();
}

void flags_in_part() {
  if (threadIdx.x % 32 == 0) __any_sync(1u, 1);
}

void write_beside(unsigned* values) { values[64 + threadIdx.x % 4] = 1; }

std::map<std::string, host::Entry> host::kernels = {
  {"turn", host::kernel_of(turn<true>)},
  {"turn without a barrier", host::kernel_of(turn<false>)},
  {"count_atomically", host::kernel_of(count_atomically)},
  {"sum_warp", host::kernel_of(sum_warp)},
  {"meet_at_two_barriers", host::kernel_of(meet_at_two_barriers)},
  {"flags_alone", host::kernel_of(flags_alone)},
  {"flags_in_part", host::kernel_of(flags_in_part)},
  {"write_beside", host::kernel_of(write_beside)},
};
"""


@pytest.fixture(scope="module")
def machine_with(beside: Any, on_host: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that makes a machine with the kernels above."""
    module = beside("machine_on_host")
    path: Path = tmp_path_factory.mktemp("kernels") / "kernels.so"
    module.compile_for_host(path, KERNELS, threads=64)
    library = module.loaded(path)
    return lambda seed=0: module.HostMachine(library, 64, 4, seed)


def values(machine: Any) -> np.ndarray:
    return machine.put(np.arange(64, dtype=np.uint32))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_barriers_votes_shuffles_and_atomics_work(machine_with: Any, seed: int) -> None:
    machine = machine_with(seed)
    turned = values(machine)
    machine.launch("turn", 1, turned)
    assert turned.tolist() == list(range(63, -1, -1))
    summed = values(machine)
    machine.launch("sum_warp", 1, summed)
    odd = 0xAAAAAAAA
    assert (
        summed.tolist()
        == [(sum(range(32)) + odd) % 2**32] * 32 + [(sum(range(32, 64)) + odd) % 2**32] * 32
    )
    total = machine.zeros(1, np.uint32)
    machine.launch("count_atomically", 4, total)
    assert total.tolist() == [256]


def test_missing_barrier_gives_different_results_in_different_orders(machine_with: Any) -> None:
    results = set()
    for seed in range(5):
        machine = machine_with(seed)
        turned = values(machine)
        machine.launch("turn without a barrier", 1, turned)
        results.add(tuple(turned.tolist()))
    assert len(results) > 1


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("meet_at_two_barriers", "threads of a block wait at two barriers, in lines"),
        ("flags_alone", "deadlock: every thread of a block waits, or has ended"),
        ("flags_in_part", "a vote or shuffle is not of the whole warp"),
        ("missing", "there is no such kernel"),
    ],
)
def test_faulty_kernel_fails_its_launch_with_a_message(
    machine_with: Any, kernel: str, message: str
) -> None:
    for seed in (0, 1):
        with pytest.raises(AssertionError, match=message):
            machine_with(seed).launch(kernel, 1)


def test_arguments_of_the_wrong_size_are_refused(machine_with: Any) -> None:
    for arguments in [(), (np.uint32(1),), (np.uint64(0), np.uint64(0))]:
        with pytest.raises(AssertionError, match="number or sizes are not the kernel's"):
            machine_with().launch("turn", 1, *arguments)


def test_write_beside_the_memory_is_detected(machine_with: Any) -> None:
    machine = machine_with()
    held = values(machine)
    with pytest.raises(AssertionError, match="write_beside wrote beside its memory"):
        machine.launch("write_beside", 1, held)


def test_new_memory_is_filled_with_garbage(machine_with: Any) -> None:
    assert machine_with().empty(3, np.uint8).tolist() == [0xCD] * 3
