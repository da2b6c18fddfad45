"""The network of extreme classification: its outputs, gradients, and P@k."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from models.data.batches import SparseBatch, SparseDataset, as_batch
from models.data.catalogue import SHAPES
from models.data.rows import LabelledRows, LabelLists, SparseRows
from models.data.synthetic_xml import resized, synthesise
from models.xml_mlp import XmlMlp, precisions

SMALL = resized(SHAPES["amazon-670k"], features=60, labels=40)


def network(seed: int = 0) -> XmlMlp:
    torch.manual_seed(seed)
    return XmlMlp(SMALL.features, SMALL.labels, hidden=8).double()


def batch_of(rows: LabelledRows) -> SparseBatch:
    batch = SparseDataset(rows).__getitems__(range(len(rows)))
    return batch._replace(values=batch.values.double())


def with_rows_without_labels_and_entries() -> LabelledRows:
    features = SparseRows(
        np.array([0, 2, 2, 3]), np.array([5, 9], np.int32).repeat([1, 2]), np.ones(3, "f4"), 60
    )
    return LabelledRows(features, LabelLists(np.array([0, 2, 3, 3]), np.arange(3), 40), "")


def dense(model: XmlMlp, rows: LabelledRows) -> torch.Tensor:
    """Return the logits by dense algebra."""
    inputs = torch.from_numpy(rows.features.to_dense()).double()
    inputs = inputs / inputs.norm(dim=1, keepdim=True).clamp_min(1e-30)
    hidden = F.relu(inputs @ model.embedding.weight + model.hidden_bias)
    return hidden @ model.output.T + model.output_bias.squeeze(1)


def dense_loss(model: XmlMlp, rows: LabelledRows) -> torch.Tensor:
    targets = torch.zeros(len(rows), rows.labels.width, dtype=torch.float64)
    targets[torch.from_numpy(rows.labels.row_of_entry()), rows.labels.indices] = 1
    targets /= targets.sum(1, keepdim=True).clamp_min(1)
    return -(targets * dense(model, rows).log_softmax(1)).sum() / len(rows)


def gradients(model: XmlMlp, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [p.grad.to_dense() for p in model.parameters() if p.grad is not None]


def test_xml_mlp_matches_dense_algebra_on_sparse_inputs() -> None:
    model = network()
    for rows in (synthesise(SMALL, 7), with_rows_without_labels_and_entries()):
        batch = batch_of(rows)
        torch.testing.assert_close(model(batch), dense(model, rows), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(model.loss(batch), dense_loss(model, rows), rtol=1e-6, atol=1e-6)
        for ours, theirs in zip(
            gradients(model, model.loss(batch)),
            gradients(model, dense_loss(model, rows)),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_sampled_loss_with_every_label_equals_the_full_loss() -> None:
    model, batch = network(), batch_of(synthesise(SMALL, 7))
    own = len(batch.labels.unique())
    sampled = model.sampled_loss(batch, negatives=20_000)  # every one of the 40 is among them
    assert own < SMALL.labels
    torch.testing.assert_close(sampled, model.loss(batch))
    for ours, theirs in zip(
        gradients(model, sampled), gradients(model, model.loss(batch)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_sampled_loss_estimates_the_denominator_without_bias() -> None:
    one_label = replace(SMALL, labels_per_row=1.0)
    model, batch = network(), batch_of(synthesise(one_label, 1))
    logits = model(batch).detach()[0]
    generator = torch.Generator().manual_seed(5)
    denominators = [
        float((model.sampled_loss(batch, 6, generator) + logits[batch.labels[0]]).detach().exp())
        for _ in range(400)
    ]
    error = np.std(denominators) / np.sqrt(len(denominators))
    assert abs(np.mean(denominators) - float(logits.exp().sum())) < 4 * error


def test_sparse_gradients_have_rows_only_for_used_features_and_labels() -> None:
    model, batch = network(), batch_of(synthesise(SMALL, 3))
    model.sampled_loss(batch, 4, torch.Generator().manual_seed(1)).backward()
    assert model.embedding.weight.grad.is_sparse
    features = model.embedding.weight.grad.coalesce().indices()[0]
    assert features.tolist() == batch.indices.unique().tolist()
    for parameter in (model.output, model.output_bias):
        assert parameter.grad.is_sparse
        labels = parameter.grad.coalesce().indices()[0].tolist()
        own = set(batch.labels.tolist())
        assert own <= set(labels)
        assert len(labels) <= len(own) + 4


def test_precisions_count_labels_among_the_highest_logits() -> None:
    class FixedLogits(torch.nn.Module):
        def forward(self, batch: SparseBatch) -> torch.Tensor:
            return torch.tensor([[5.0, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], [0, 0, 9, 0, 0, 0]])

    none = torch.empty(0, dtype=torch.int64)
    labels, label_rows = torch.tensor([0, 2, 5, 0]), torch.tensor([0, 0, 0, 1])
    batch = SparseBatch(none, none.float(), torch.zeros(3, dtype=torch.int64), labels, label_rows)
    reached = precisions(FixedLogits(), batch)
    assert reached == {1: 1 / 3, 3: 2 / 9, 5: 2 / 15}  # row 1 has its label last, row 2 none


def test_xml_mlp_learns_from_a_data_loader() -> None:
    rows, held_out = synthesise(SMALL, 600), synthesise(SMALL, 200, stream=1)
    torch.manual_seed(0)
    model = XmlMlp(SMALL.features, SMALL.labels, hidden=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    test = SparseDataset(held_out).__getitems__(range(len(held_out)))
    before = precisions(model, test)
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(
        SparseDataset(rows), 32, shuffle=True, collate_fn=as_batch, generator=generator
    )
    for _ in range(4):
        for batch in loader:
            optimizer.zero_grad()
            model.sampled_loss(batch, 16, generator).backward()
            optimizer.step()
    after = precisions(model, test)
    assert after[1] > 2 * before[1]
    assert after[5] > before[5]
