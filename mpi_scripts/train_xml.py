"""Train a network for extreme classification with several methods in turn, and compare them.

mpirun -n 4 python mpi_scripts/train_xml.py --train amazon_train.txt --test amazon_test.txt
mpirun -n 4 python mpi_scripts/train_xml.py --synthetic amazon-670k --rows 20000

Writes every method's P@1, P@3 and P@5 over time to a page with plots and to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

# Run as `python mpi_scripts/train_xml.py`, Python finds neither `models` nor an uninstalled gtopk.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gtopk.torch as hvd
from gtopk.cli.arguments import as_argument, output_file, share
from models.data.batches import SparseBatch, SparseDataset, as_batch
from models.data.catalogue import shape_of
from models.data.rows import LabelledRows
from models.data.synthetic_xml import resized, synthesise
from models.data.xml import read_xml
from models.xml_mlp import XmlMlp, precisions
from mpi_scripts.arguments import Parser, at_least, on_every_rank, own_device
from mpi_scripts.xml_page import AT, Curve, Point, page

EVALUATED_AT_ONCE: Final = 256  # rows: their logits over all labels are in memory together


class Rounds(Sampler[int]):
    """The order of samples, cut into rounds with an evaluation after each; equal on all ranks.

    A round starts where the last one stopped; every epoch is a new permutation.
    """

    def __init__(self, rows: int, per_round: int, seed: int, rank: int, size: int) -> None:
        self._rows, self._per_round, self._seed = rows, per_round, seed
        self._rank, self._size = rank, size
        self._round = 0

    def order(self, round: int) -> Sequence[int]:
        """Return the numbers of all ranks' samples in a round."""
        begin = round * self._per_round
        epochs = range(begin // self._rows, (begin + self._per_round - 1) // self._rows + 1)
        numbers = np.concatenate(
            [np.random.default_rng([self._seed, epoch]).permutation(self._rows) for epoch in epochs]
        )
        begin -= epochs[0] * self._rows
        chosen: list[int] = numbers[begin : begin + self._per_round].tolist()
        return chosen

    def set_epoch(self, round: int) -> None:
        """Choose the round of the next iteration."""
        self._round = round

    def __iter__(self) -> Iterator[int]:
        return iter(self.order(self._round)[self._rank :: self._size][: len(self)])

    def __len__(self) -> int:
        return self._per_round // self._size


class Training(NamedTuple):
    """The inputs of every method, prepared on a rank before the ranks communicate."""

    arguments: argparse.Namespace
    train: LabelledRows
    test: LabelledRows
    rounds: Rounds

    def model(self) -> XmlMlp:
        """Return the initial model, equal on all ranks."""
        torch.manual_seed(self.arguments.seed)
        return XmlMlp(self.train.features.width, self.train.labels.width, self.arguments.hidden)

    def loader(self) -> DataLoader[SparseBatch]:
        """Return this rank's batches, with equally many samples on each rank."""
        dataset = SparseDataset(self.train)
        batch_size = self.arguments.batch_size
        return DataLoader(dataset, batch_size, sampler=self.rounds, collate_fn=as_batch)


class Method(NamedTuple):
    """A training method: its name in the plot, and a function that makes loader and optimizer."""

    label: str
    begin: Callable[[Training, XmlMlp], tuple[Any, Any]]


def synchronous(training: Training, model: XmlMlp, density: float) -> tuple[Any, Any]:
    """Return equal batches, and an optimizer that steps with the mean of all gradients.

    At density 1 gradients that are sparse by rows are exchanged as rows. At a lower density they
    are made dense, so that gTop-k can pick entries among all values.
    """
    compression = hvd.Compression.gtopk(density) if density < 1 else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=training.arguments.lr),
        named_parameters=model.named_parameters(),
        compression=compression,
        sparse_as_dense=density < 1,
    )
    return training.loader(), optimizer


def merging(training: Training, model: XmlMlp, algorithm: str) -> tuple[Any, Any]:
    """Return batches and an optimizer for this rank's own replica.

    The loader merges the replicas, compressed if --merge-density is given.
    """
    arguments = training.arguments
    _, optimizer = synchronous(training, model, arguments.merge_density)
    loader = hvd.adapt(
        training.loader(),
        optimizer,
        "adaptive-sgd",
        order=training.rounds.order,
        algorithm=algorithm,
        mega_batch=min(arguments.mega_batch, len(training.rounds) * hvd.size()),
        local_steps=arguments.local_steps,
    )
    return loader, optimizer


METHODS: Final = {
    "adaptive-sgd": Method("Adaptive SGD", partial(merging, algorithm="adaptive")),
    "k-step": Method("K-step averaging", partial(merging, algorithm="k-step")),
    "elastic": Method("Elastic averaging", partial(merging, algorithm="elastic")),
    "crossbow": Method("CROSSBOW", partial(merging, algorithm="crossbow")),
    "s-sgd": Method("S-SGD", partial(synchronous, density=1.0)),
    "gtop-k": Method(
        "S-SGD with gTop-k",
        lambda training, model: synchronous(training, model, training.arguments.density),
    ),
}


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=Path, help="training file, old format, plain, gz or bz2")
    parser.add_argument("--test", type=Path, help="test file with the same features and labels")
    parser.add_argument(
        "--synthetic", help="instead of files: rows like those of this set, such as amazon-670k"
    )
    parser.add_argument("--rows", type=at_least(1), default=20_000, help="number of synthetic rows")
    parser.add_argument(
        "--shrink", type=at_least(1), default=1, help="divides the synthetic features and labels"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--epochs", type=at_least(1), default=2)
    parser.add_argument("--evaluations", type=at_least(1), default=4, help="per epoch")
    parser.add_argument("--test-rows", type=at_least(1), default=4096, help="for each evaluation")
    parser.add_argument("--batch-size", type=at_least(1), default=64, help="per rank and step")
    parser.add_argument("--hidden", type=at_least(1), default=128)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument(
        "--negatives",
        type=at_least(0),
        default=4096,
        help="labels sampled for the softmax; 0: all labels, a dense gradient",
    )
    density = as_argument(share)
    parser.add_argument("--density", type=density, default=0.01, help="gTop-k's, for gradients")
    parser.add_argument("--merge-density", type=density, default=1.0, help="gTop-k's, for merges")
    parser.add_argument(
        "--mega-batch", type=at_least(1), default=5000, help="samples between two merges"
    )
    parser.add_argument(
        "--local-steps", type=at_least(1), default=8, help="between merges of k-step and elastic"
    )
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--out", type=Path, default=Path("report/xml"), help="folder")
    arguments = parser.parse_args()
    output_file(str(arguments.out / "train_xml.json"))
    return arguments


def prepare(arguments: argparse.Namespace) -> Training:
    """Return the training; raise ValueError or OSError for the user's errors."""
    train, test = read(arguments)
    for part in (train, test):
        if not len(part):
            raise ValueError(f"{part.origin} holds no rows")
    if (train.features.width, train.labels.width) != (test.features.width, test.labels.width):
        raise ValueError(
            f"training and test data must have the same features and labels, got "
            f"{train.features.width} and {train.labels.width} in {train.origin}, "
            f"{test.features.width} and {test.labels.width} in {test.origin}"
        )
    per_round = len(train) // arguments.evaluations
    if per_round < hvd.size():
        raise ValueError(
            f"with --evaluations {arguments.evaluations} there are only {per_round} of "
            f"{len(train)} rows between two evaluations, fewer than the {hvd.size()} ranks"
        )
    rounds = Rounds(len(train), per_round, arguments.seed, hvd.rank(), hvd.size())
    return Training(arguments, train, test, rounds)


def read(arguments: argparse.Namespace) -> tuple[LabelledRows, LabelledRows]:
    """Return training and test rows."""
    if arguments.synthetic is not None and arguments.train is arguments.test is None:
        shape = shape_of(arguments.synthetic)
        if (by := arguments.shrink) > 1:
            shape = resized(shape, max(16, shape.features // by), max(16, shape.labels // by))
        rows, tested = arguments.rows, min(arguments.test_rows, arguments.rows)
        return (
            synthesise(shape, rows, arguments.seed),
            synthesise(shape, tested, arguments.seed, stream=1),
        )
    if arguments.synthetic is None and arguments.train and arguments.test:
        return read_xml(arguments.train), read_xml(arguments.test)
    raise ValueError("give --train FILE --test FILE, or --synthetic NAME")


def run(method: Method, training: Training, report: Callable[[str], None]) -> Curve:
    """Train from scratch with a method; the time of evaluations does not count."""
    arguments = training.arguments
    device = own_device()
    model = training.model().to(device)
    loader, optimizer = method.begin(training, model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    drawn = torch.Generator().manual_seed(arguments.seed * 1000 + hvd.rank())
    points = [Point(0.0, 0, evaluate(model, training))]
    seconds, samples = 0.0, 0
    for round in range(arguments.epochs * arguments.evaluations):
        begun = time.perf_counter()
        getattr(loader, "set_epoch", training.rounds.set_epoch)(round)
        for batch in loader:
            optimizer.zero_grad()
            batch = batch.to(device)
            if arguments.negatives:
                loss = model.sampled_loss(batch, arguments.negatives, drawn)
            else:
                loss = model.loss(batch)
            loss.backward()
            optimizer.step()
            samples += batch.rows
        hvd.barrier()
        seconds += time.perf_counter() - begun
        counted = int(hvd.allreduce(torch.tensor(samples), op=hvd.Sum))
        with getattr(loader, "merged", nullcontext)():
            points.append(Point(seconds, counted, evaluate(model, training)))
        reached = "  ".join(f"P@{k} {points[-1].precisions[k]:.4f}" for k in AT)
        report(f"{method.label}: {counted} samples, {seconds:.1f} s  {reached}")
    return Curve(method.label, points)


def evaluate(model: XmlMlp, training: Training) -> dict[int, float]:
    """Return P@k over the first rows of the test set, each evaluated by one of the ranks."""
    rows = min(training.arguments.test_rows, len(training.test))
    dataset, device = SparseDataset(training.test), own_device()
    own = range(hvd.rank(), rows, hvd.size())
    sums = torch.zeros(len(AT), dtype=torch.float64)
    for begin in range(0, len(own), EVALUATED_AT_ONCE):
        batch = dataset.__getitems__(own[begin : begin + EVALUATED_AT_ONCE])
        shares = precisions(model, batch.to(device), AT)
        sums += batch.rows * torch.tensor([shares[k] for k in AT])
    sums = hvd.allreduce(sums, op=hvd.Sum)
    return dict(zip(AT, (sums / rows).tolist(), strict=True))


def main() -> None:
    hvd.init()
    arguments = on_every_rank(parse)
    # One rank per node reads the files; the others load the arrays that it saves beside them.
    on_every_rank(lambda: hvd.local_rank() or read(arguments))
    training = on_every_rank(lambda: prepare(arguments))

    def report(text: str) -> None:
        if hvd.rank() == 0:
            print(f"{text}\n", end="", flush=True)

    report(
        f"{training.train.origin}: {len(training.train)} rows, {training.train.features.width} "
        f"features, {training.train.labels.width} labels; {hvd.size()} ranks"
    )
    curves = [run(METHODS[name], training, report) for name in arguments.methods]
    if hvd.rank() == 0:
        facts = {
            "data": training.train.origin,
            "ranks": hvd.size(),
            **{name: str(value) for name, value in vars(arguments).items()},
        }
        record = {"facts": facts, "curves": [curve.record() for curve in curves]}
        (arguments.out / "train_xml.json").write_text(json.dumps(record, indent=1))
        (arguments.out / "train_xml.html").write_text(page(facts, curves), encoding="utf-8")
        report(f"wrote {arguments.out / 'train_xml.html'} and train_xml.json beside it")
    hvd.barrier()


if __name__ == "__main__":
    main()
