"""Every table has the dimensions of its data set, and states its origin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.data.catalogue import SHAPES
from models.data.rows import SparseRows
from mpi_scripts.tables import TABLES, File, open_table


@pytest.mark.parametrize("name", TABLES)
def test_synthetic_tables_are_labelled_and_have_published_dimensions(name: str) -> None:
    table = open_table(name, 0, 50)
    assert table.origin == f"synthetic, like {name}"
    assert (table.features, table.outputs) == (SHAPES[name].features, SHAPES[name].labels)
    x, targets = table.train.__getitems__(range(40))
    assert x.shape == (40, table.features)
    assert len(table.test) == 10
    scores = torch.zeros(40, table.outputs)
    assert table.loss(scores, targets).item() == pytest.approx(0.6931, abs=1e-3)
    assert targets.is_floating_point() == (name == "delicious")


def test_table_file_replaces_synthetic_rows(tmp_path: Path) -> None:
    file = tmp_path / "w8a"
    file.write_text("".join(f"{(-1) ** row:+d} {row + 1}:1\n" for row in range(10)))
    table = open_table("w8a", 0, 50, File(file))
    assert len(table.train) == 8
    assert "synthetic" not in table.origin
    assert table.features == 300


@pytest.mark.parametrize(
    ("text", "bases"),
    [
        ("10 500 983\n" + "0,982 499:1\n" * 10, {}),
        ("1,983 500:1\n" * 10, {"label_base": 1}),
        ("0,982 499:1\n" * 10, {"label_base": 0, "feature_base": 0}),
    ],
)
def test_delicious_file_is_read_with_or_without_header(
    tmp_path: Path, text: str, bases: dict[str, int]
) -> None:
    """read_libsvm, which reads one class a row, once refused this file."""
    file = tmp_path / "delicious"
    file.write_text(text)
    table = open_table("delicious", 0, 50, File(file, **bases))
    x, targets = table.train.__getitems__([3])
    assert x.nonzero().tolist() == [[0, 499]]
    assert targets.nonzero().tolist() == [[0, 0], [0, 982]]


def test_table_file_of_another_data_set_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mediamill"
    file.write_text("1 120 101\n5 3:1\n")
    with pytest.raises(ValueError, match=r"delicious has 500 .* 983 .* says 120 and 101"):
        open_table("delicious", 0, 50, File(file))


def test_sparse_rows_become_dense_one_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """real-sim was once made dense as a whole, which took 6 GB."""
    made, to_dense = [], SparseRows.to_dense
    monkeypatch.setattr(
        SparseRows, "to_dense", lambda rows: (made.append(len(rows)), to_dense(rows))[1]
    )
    table = open_table("real-sim", 0, 3000)
    assert made == []
    model = torch.nn.Linear(table.features, 2)
    x, y = table.train.__getitems__(range(2400))
    assert table.mean_loss(model) == pytest.approx(table.loss(model(x), y).item(), rel=1e-5)
    assert made == [2400, 1024, 1024, 352]


def test_accuracy_counts_rows_whose_highest_score_is_right() -> None:
    table = open_table("wine", 0, 0)
    x, y = table.test.__getitems__(range(len(table.test)))

    class RightExceptOnce(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            scores = torch.nn.functional.one_hot(y, 3).float()
            scores[0] = 1 - scores[0]  # one wrong row
            return scores

    assert table.accuracy(RightExceptOnce()) == pytest.approx(1 - 1 / len(x))
