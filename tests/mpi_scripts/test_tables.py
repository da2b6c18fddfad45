"""Every table has the dimensions of the set it is named after, and says where it is from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.data.catalogue import SHAPES
from mpi_scripts.tables import TABLES, open_table


@pytest.mark.parametrize("name", TABLES)
def test_synthetic_tables_are_labelled_and_as_wide_as_the_published_ones(name: str) -> None:
    table = open_table(name, 0, 50)
    assert table.origin == f"synthetic, like {name}"
    assert (table.features, table.outputs) == (SHAPES[name].features, SHAPES[name].labels)
    x, targets = table.train[:]
    assert x.shape == (40, table.features)
    assert len(table.test) == 10
    scores = torch.zeros(40, table.outputs)
    assert table.loss(scores, targets).item() == pytest.approx(0.6931, abs=1e-3)
    assert targets.is_floating_point() == (name == "delicious")


def test_a_file_takes_the_place_of_synthetic_data(tmp_path: Path) -> None:
    file = tmp_path / "w8a"
    file.write_text("".join(f"{(-1) ** row:+d} {row + 1}:1\n" for row in range(10)))
    table = open_table("w8a", 0, 50, file)
    assert len(table.train) == 8
    assert "synthetic" not in table.origin
    assert table.features == 300


def test_accuracy_is_that_of_the_highest_score() -> None:
    table = open_table("wine", 0, 0)
    x, y = table.test[:]

    class Knows(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            scores = torch.nn.functional.one_hot(y, 3).float()
            scores[0] = 1 - scores[0]  # is wrong about one
            return scores

    assert table.accuracy(Knows()) == pytest.approx(1 - 1 / len(x))
