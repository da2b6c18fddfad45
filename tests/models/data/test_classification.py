"""Data sets that come with scikit-learn, and those of a file."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.data import load


@pytest.mark.parametrize(
    ("name", "rows", "features", "classes"),
    [("digits", 1797, 64, 10), ("breast-cancer", 569, 30, 2), ("wine", 178, 13, 3)],
)
def test_bundled_data_sets_are_split_and_scaled(name, rows, features, classes) -> None:
    data = load(name, seed=1)
    assert (data.features, data.classes) == (features, classes)
    assert len(data.train) + len(data.test) == rows
    inputs, labels = data.train.tensors
    assert inputs.dtype == torch.float32
    assert labels.unique().tolist() == list(range(classes))
    if name == "digits":
        assert (inputs.min(), inputs.max()) == (-0.5, 0.5)
    else:
        assert inputs.mean(0).abs().max() < 1e-5
        torch.testing.assert_close(inputs.std(0, correction=0), torch.ones(features))


def test_unknown_data_set_error_lists_the_bundled_ones(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="give 'digits', 'breast-cancer', 'wine', or"):
        load(str(tmp_path / "mnist"))


@pytest.mark.parametrize(("rows", "largest"), [(20, 999), (1500, 1499)])
def test_class_numbers_are_limited_by_rows_or_a_thousand(tmp_path, rows, largest) -> None:
    x, y = np.ones((rows, 2)), np.zeros(rows, int)
    y[3] = largest
    np.savez(tmp_path / "good", x=x, y=y)
    assert load(str(tmp_path / "good.npz")).classes == largest + 1
    y[3] += 1
    np.savez(tmp_path / "bad", x=x, y=y)
    with pytest.raises(ValueError, match=f"below {y[3]} for {rows} rows, got {y[3]}"):
        load(str(tmp_path / "bad.npz"))
