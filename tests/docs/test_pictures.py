"""The numbers in the pictures are those that the code computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from collectives import SparseVector, local_world, reduce, run_ranks

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


def reduced(k: int, *picks: dict[int, float]) -> tuple[str, list[str]]:
    """Return the update, and what returns to each rank, as the pictures write them."""

    def program(transport):
        own = picks[transport.rank]
        indices, values = np.array([*own], np.int32), np.array([*own.values()], np.float32)
        return reduce(SparseVector(indices, values, 10), k, transport, "gtopk")

    def text(vector: SparseVector) -> str:
        pairs = zip(vector.indices, vector.values, strict=True)
        return "  ".join(f"{index}: {value:.1f}" for index, value in pairs)

    results = run_ranks(local_world(len(picks)), program)
    (update,) = {text(update) for update, _ in results}
    return update, [text(returned) for _, returned in results]


def test_butterfly_picture_shows_the_computed_update_and_returned_entries() -> None:
    shown = (PICTURES / "butterfly.svg").read_text(encoding="utf-8")
    update, returned = reduced(2, {2: 3, 5: 1}, {5: 2, 7: -2.5}, {2: -1, 9: 4}, {7: 0.5, 9: 1})
    assert shown.count(f">{update}<") == 4
    assert all(f'lost mono mid">{each}<' in shown for each in returned)


def test_conservation_picture_shows_the_computed_returned_entries() -> None:
    shown = (PICTURES / "conservation.svg").read_text(encoding="utf-8")
    update, returned = reduced(1, {5: 1}, {7: 2}, {5: 3}, {9: 0.1})
    assert f">{update}<" in shown
    assert returned == ["5: 1.0", "7: 2.0", "", "9: 0.1"]
    assert 'bold">5: 1.0<' in shown
