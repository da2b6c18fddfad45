"""Every kind of kernel of a step, on small vectors, equal to the reference to the bit.

As a program it allocates each array by itself, so that a sanitizer finds writes behind its
end; CuPy's pool would hide them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives import SparseVector, kernels
from collectives.kernels import Momentum, device, reference
from collectives.kernels.reference_indices import index_capacity
from collectives.kernels.reference_values import BITS, value_bytes

# n, k: less than a tile, just above one tile, several tiles. A tile has 8192 elements.
SIZES = ((5, 1), (8193, 40), (70_001, 700))


def assert_same(got: SparseVector, expected: SparseVector) -> None:
    """Check that a vector of the GPU equals the reference's to the bit."""
    found = got.on_host()
    assert found.indices.tolist() == expected.indices.tolist()
    assert found.values.tobytes() == expected.values.tobytes()


def on_host(array: Any) -> list[Any]:
    """Return an array of the GPU as a list."""
    return list(array.get().tolist())


def select(cupy: Any, n: int, k: int, parts: int, momentum: bool) -> SparseVector:
    """Accumulate, select and clear three times as the reference does; return the last selection."""
    random = np.random.default_rng(n + parts)
    residual, velocity = np.zeros((2, n), np.float32)
    held, held_velocity = cupy.zeros(n, np.float32), cupy.zeros(n, np.float32)
    threshold = 0.0
    for _ in range(3):
        gradient = random.standard_normal(n).astype(np.float32)
        pieces = [cupy.asarray(piece) for piece in np.array_split(gradient, parts)]
        expected, _ = reference.accumulate_and_select(
            residual, gradient, k, momentum=Momentum(velocity, 0.9) if momentum else None
        )
        picked, threshold = device.accumulate_and_select(
            held,
            pieces if parts > 1 else pieces[0],
            k,
            threshold,
            Momentum(held_velocity, 0.9) if momentum else None,
        )
        assert_same(picked, expected)
        reference.clear_at(residual, expected.indices)
        device.clear_at(held, picked.indices)
        assert held.get().tobytes() == residual.tobytes()
    assert device.squared_norm(held) == reference.squared_norm(residual)
    assert device.all_finite(held)
    return expected


def merge_and_encode(cupy: Any, ours: SparseVector, k: int) -> None:
    """Merge, sum, put and encode two selections as the reference does."""
    n, like = ours.length, cupy.zeros(1, np.float32)
    drawn = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    theirs, _ = reference.select(drawn, k)
    a, b = ours.beside(like), theirs.beside(like)
    assert_same(device.merge(a, b, k), reference.merge(ours, theirs, k))
    assert_same(device.sum_by_index([a, b, a]), reference.sum_by_index([ours, theirs, ours]))
    found = device.contains(a.indices, b.indices)
    assert on_host(found) == reference.contains(ours.indices, theirs.indices).tolist()
    dense, expected_dense = cupy.asarray(drawn), drawn.copy()
    device.add_at(dense, a)
    reference.add_at(expected_dense, ours)
    assert dense.get().tobytes() == expected_dense.tobytes()
    parts = [cupy.zeros(n // 2, np.float32), cupy.zeros(n - n // 2, np.float32)]
    device.put_at(parts, a)
    assert np.concatenate([p.get() for p in parts]).tobytes() == ours.to_dense().tobytes()
    for vector, written in ((a, ours), (b, theirs)):
        packed = cupy.zeros(index_capacity(vector.entries, n, "blocks"), np.uint8)
        expected_packed = np.zeros(packed.size, np.uint8)
        taken = device.pack_indices(vector.indices, n, packed, "blocks")
        assert taken == kernels.pack_indices(written.indices, n, expected_packed, "blocks")
        assert packed.get()[:taken].tobytes() == expected_packed[:taken].tobytes()
        indices, read = device.unpack_indices(packed, vector.entries, n, "blocks")
        assert (read, on_host(indices)) == (taken, written.indices.tolist())
        code_in_few_bits(vector.values, written.values)


def code_in_few_bits(values: Any, written: Any) -> None:
    """Round values and widen them again as the reference does."""
    for code in BITS:
        expected_packed = np.zeros(value_bytes(written.size, code), np.uint8)
        packed = device.cupy().zeros(expected_packed.size, np.uint8)
        exponent = kernels.pack_values(written, expected_packed, code)
        assert device.pack_values(values, packed, code) == exponent
        assert packed.get().tobytes() == expected_packed.tobytes()
        seen: Any = device.unpack_values(packed, written.size, exponent, written.dtype, code)
        again = kernels.unpack_values(expected_packed, written.size, exponent, written.dtype, code)
        assert seen.get().tobytes() == again.tobytes()


def work(cupy: Any) -> None:
    """Launch every kind of kernel of a step."""
    for n, k in SIZES:
        for parts in (1, 3):
            for momentum in (False, True):
                picked = select(cupy, n, k, parts, momentum)
        merge_and_encode(cupy, picked, k)


if __name__ == "__main__":
    device.cupy().cuda.set_allocator(None)
    work(device.cupy())
    print("the reference's bits")
