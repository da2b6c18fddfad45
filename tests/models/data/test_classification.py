"""Real sets that come with scikit-learn."""

from __future__ import annotations

import pytest
import torch

from models.data import load


@pytest.mark.parametrize(
    ("name", "rows", "features", "classes"),
    [("digits", 1797, 64, 10), ("breast-cancer", 569, 30, 2), ("wine", 178, 13, 3)],
)
def test_bundled_sets_are_split_and_scaled(name, rows, features, classes) -> None:
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


def test_a_set_that_is_not_there_is_named_with_those_that_are(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="give 'digits', 'breast-cancer', 'wine', or"):
        load(str(tmp_path / "mnist"))
