"""Synthetic data has the stated dimensions, is the same on every rank, and is labelled as such."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.data.batches import DenseDataset
from models.data.catalogue import SHAPES, shape_of
from models.data.synthetic_tables import synthesise_table
from models.data.synthetic_xml import main, synthesise
from models.data.xml import read_xml


@pytest.mark.parametrize("name", ["amazon-670k", "delicious-200k", "delicious"])
def test_synthetic_rows_have_the_published_lengths_and_label_frequencies(name) -> None:
    shape = SHAPES[name]
    rows = synthesise(shape, 2000)
    features, labels = rows.features, rows.labels
    lengths = np.diff(features.offsets)
    spread = lengths.std() / np.sqrt(len(lengths))
    assert abs(lengths.mean() - shape.entries_per_row) < 4 * spread + 0.5
    assert (features.width, labels.width) == (shape.features, shape.labels)
    assert 0 <= features.indices.min() <= features.indices.max() < shape.features
    assert 0 <= labels.indices.min() <= labels.indices.max() < shape.labels
    row = features.row_of_entry()
    keys = row * shape.features + features.indices
    assert (np.diff(keys) > 0).all()  # ascending within each row, none twice
    np.testing.assert_allclose(features.lengths(), 1, rtol=1e-5)
    counts = np.sort(np.bincount(labels.indices, minlength=shape.labels))[::-1]
    assert 1.3 < counts[0] / counts[1] < 3 or name != "amazon-670k"  # Zipf: 2, where few collide
    assert counts[0] > 20 * counts[: shape.labels // 2].mean()
    assert rows.origin == f"synthetic, like {name}"


def test_synthetic_rows_follow_from_seed_and_stream() -> None:
    shape = SHAPES["delicious"]
    first, again = synthesise(shape, 50, seed=3), synthesise(shape, 50, seed=3)
    assert np.array_equal(first.features.indices, again.features.indices)
    assert np.array_equal(first.features.values, again.features.values)
    other = synthesise(shape, 50, seed=3, stream=1)
    assert not np.array_equal(first.labels.offsets, other.labels.offsets)
    assert len(synthesise(shape, 0)) == 0


def test_synthetic_xml_files_are_named_and_reported_as_synthetic(
    tmp_path, monkeypatch, capsys
) -> None:
    arguments = ["delicious", "--train", "30", "--test", "10", "--folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["synthetic_xml", *arguments])
    main()
    assert "synthetic-delicious-train.txt: 30 synthetic rows" in capsys.readouterr().out
    read = read_xml(tmp_path / "synthetic-delicious-test.txt")
    assert (len(read), read.features.width, read.labels.width) == (10, 500, 983)


@pytest.mark.parametrize("name", ["covtype", "w8a", "real-sim"])
def test_synthetic_tables_have_the_dimensions_and_classes_of_their_set(name) -> None:
    shape = SHAPES[name]
    rows = synthesise_table(shape, 3000)
    lengths = np.diff(rows.features.offsets)
    assert abs(lengths.mean() / shape.entries_per_row - 1) < 0.1
    assert rows.features.width == shape.features
    share = rows.labels.indices.mean()
    assert abs(share - {"covtype": 0.49, "w8a": 0.05, "real-sim": 0.31}[name]) < 0.05
    assert rows.origin == f"synthetic, like {name}"
    assert np.array_equal(synthesise_table(shape, 3000).features.indices, rows.features.indices)


def test_dense_dataset_has_rows_with_classes_or_multilabel_targets() -> None:
    table = synthesise_table(SHAPES["covtype"], 20)
    inputs, targets = DenseDataset(table, multilabel=False).__getitems__([4, 2])
    assert torch.equal(inputs, torch.from_numpy(table.features.to_dense()[[4, 2]]))
    assert targets.tolist() == table.labels.indices[[4, 2]].tolist()
    many = synthesise(SHAPES["delicious"], 20)
    _, targets = DenseDataset(many, multilabel=True).__getitems__([4, 2])
    own = many.labels.take(np.array([4]))
    assert targets.shape == (2, 983)
    assert targets[0].nonzero()[:, 0].tolist() == own.indices.tolist()
    assert DenseDataset(many, multilabel=True)[4].targets.equal(targets[0])
    with pytest.raises(ValueError, match="every row must have one class; use multilabel=True"):
        DenseDataset(many, multilabel=False)


def test_unknown_synthetic_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one of amazon-670k, .* got 'mnist'"):
        shape_of("mnist")
    with pytest.raises(ValueError, match="one of covtype, w8a, real-sim, got 'delicious'"):
        synthesise_table(SHAPES["delicious"], 10)
