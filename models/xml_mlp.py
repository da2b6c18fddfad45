"""The network of extreme classification: sparse inputs, a hidden layer, a softmax over all labels.

    inputs  f entries of F --EmbeddingBag [F, h]--> ReLU --[L, h]--> L labels

Both large layers are rows of `hidden` numbers, one for each feature and each label. A batch uses
few rows of the first layer. Of the last it uses the rows of its own labels and a sample of the
others (`sampled_loss`), or all of them (`loss`). If few rows are used the gradient is a sparse
tensor, and it stays sparse on its way to the weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .data.batches import SparseBatch


class XmlMlp(torch.nn.Module):
    """features-hidden-labels with ReLU.

    embedding: [features, hidden]; output: [labels, hidden]; output_bias: [labels, 1].
    """

    def __init__(self, features: int, labels: int, hidden: int = 128) -> None:
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(features, hidden, mode="sum", sparse=True)
        self.hidden_bias = torch.nn.Parameter(torch.zeros(hidden))
        self.output = torch.nn.Parameter(torch.empty(labels, hidden))
        self.output_bias = torch.nn.Parameter(torch.zeros(labels, 1))
        # As inputs have length 1, the hidden layer then has variance 1, and so have the logits.
        torch.nn.init.normal_(self.embedding.weight)
        torch.nn.init.normal_(self.output, std=(hidden / 2) ** -0.5)

    def represent(self, batch: SparseBatch) -> torch.Tensor:
        """Return the hidden layer, [rows, hidden]."""
        summed = self.embedding(batch.indices, batch.offsets, per_sample_weights=batch.values)
        return F.relu(summed + self.hidden_bias)

    def forward(self, batch: SparseBatch) -> torch.Tensor:
        """Return logits, [rows, labels]: 686 MB for 256 rows of Amazon-670k."""
        return F.linear(self.represent(batch), self.output, self.output_bias.squeeze(1))

    def loss(self, batch: SparseBatch) -> torch.Tensor:
        """Return the softmax's cross entropy, mean over rows; a row's labels have equal weights.

        A row without labels counts as 0. The gradient of the output layer is dense.
        """
        return _cross_entropy(self(batch), batch.labels, batch)

    def sampled_loss(
        self, batch: SparseBatch, negatives: int, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """Return an estimate of `loss` from the batch's own labels and a sample of all.

        The sampled labels stand for all that are not the batch's own. They are weighted so that
        the softmax's denominator is right on average (Bengio and Senecal 2008). The gradient of
        the output layer has only the rows of the labels used.
        """
        own, places = torch.unique(batch.labels, return_inverse=True)
        count = len(self.output)
        drawn = torch.randint(count, (negatives,), generator=generator).to(own.device).unique()
        sampled = drawn[~torch.isin(drawn, own)]
        used = torch.cat([own, sampled])
        rows = F.embedding(used, self.output, sparse=True)
        biases = F.embedding(used, self.output_bias, sparse=True).squeeze(1)
        stands_for = (count - len(own)) / max(1, len(sampled))
        biases = biases + torch.cat(
            [biases.new_zeros(len(own)), biases.new_full((len(sampled),), stands_for).log()]
        )
        return _cross_entropy(F.linear(self.represent(batch), rows, biases), places, batch)


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor, batch: SparseBatch) -> torch.Tensor:
    """Return the mean over rows of the mean over a row's labels of -log softmax.

    labels: columns of `logits`, one for each of the batch's labels.
    """
    counts = torch.bincount(batch.label_rows, minlength=batch.rows)
    shares = 1 / counts[batch.label_rows].to(logits.dtype)
    denominators = logits.logsumexp(1)
    chosen = denominators[batch.label_rows] - logits[batch.label_rows, labels]
    return (shares * chosen).sum() / batch.rows


@torch.no_grad()
def precisions(
    model: XmlMlp, batch: SparseBatch, at: tuple[int, ...] = (1, 3, 5)
) -> dict[int, float]:
    """Return P@k: the share of the k highest logits that are labels of their row, mean over rows.

    As in the Extreme Classification Repository, a row with fewer labels than k cannot reach 1, and
    one without any counts 0.
    """
    logits = model(batch)
    best = logits.topk(min(max(at), logits.shape[1]), dim=1).indices
    rows = torch.arange(batch.rows, device=best.device).unsqueeze(1)
    labels = batch.label_rows * logits.shape[1] + batch.labels
    right = torch.isin(rows * logits.shape[1] + best, labels).double()
    return {k: float(right[:, :k].sum()) / (k * batch.rows) for k in at}
