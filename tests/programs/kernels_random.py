"""Compare random calls of the C++ core with the reference; run with a core that has sanitizers."""

import numpy as np

from collectives import SparseVector
from collectives.kernels import Momentum, host, reference
from collectives.kernels.host.library import use_instructions

random = np.random.default_rng(7)


def same(a: SparseVector, b: SparseVector) -> None:
    assert a.indices.tolist() == b.indices.tolist()
    assert np.array_equal(a.values, b.values, equal_nan=True)


def vector(size: int, dtype: type) -> np.ndarray:
    values = random.standard_normal(size) * 2.0 ** random.integers(-3, 3, size)
    if random.random() < 0.3:
        values = np.round(values)
    if random.random() < 0.2:
        values.sort()
    if random.random() < 0.2:
        values[random.random(size) < 0.05] = random.choice([np.nan, np.inf])
    return values.astype(dtype)


for number in range(75):
    while not use_instructions(random.choice(["portable", "AVX2", "AVX-512"])):
        pass
    dtype = random.choice([np.float32, np.float64])
    size = int(2 ** random.uniform(0, 15)) if number % 50 else 800_000
    k = int(random.integers(1, size + 1) ** random.uniform(0.3, 1))
    threshold = random.choice([0.0, 1e-3, 0.5, 3.0, 1e9])
    residual = vector(size, dtype)
    parts = np.split(vector(size, dtype), np.sort(random.integers(0, size, number % 4)))
    if dtype == np.float32 and number % 3 == 0:
        parts = [part.astype(np.float16) for part in parts]
    copy = residual.copy()
    velocities = np.ones((2, size), dtype)
    moved = [Momentum(velocity, 0.9) if number % 2 else None for velocity in velocities]
    with np.errstate(invalid="ignore", over="ignore"):
        expected, _ = reference.accumulate_and_select(copy, parts, k, threshold, moved[0])
        found, _ = host.accumulate_and_select(residual, parts, k, threshold, moved[1])
    assert np.array_equal(copy, residual, equal_nan=True)
    assert np.array_equal(*velocities, equal_nan=True)
    same(found, expected)
    other, _ = host.select(vector(size, dtype), k, threshold)
    with np.errstate(invalid="ignore"):
        same(host.merge(found, other, k), reference.merge(found, other, k))
        several = [found, other, found][: number % 3 + 1]
        same(host.sum_by_index(several), reference.sum_by_index(several))
        host.add_at(residual, other)
        reference.add_at(copy, other)
    assert np.array_equal(copy, residual, equal_nan=True)
    host.clear_at(residual, found.indices)
    reference.clear_at(copy, found.indices)
    assert np.array_equal(copy, residual, equal_nan=True)
    assert np.array_equal(
        host.contains(found.indices, other.indices),
        reference.contains(found.indices, other.indices),
    )
    assert host.all_finite(residual) == reference.all_finite(residual)
    with np.errstate(invalid="ignore"):
        norms = host.squared_norm(residual), reference.squared_norm(residual)
    assert np.array_equal(*norms, equal_nan=True)
print("all the same")
