"""Simulate Adaptive SGD and its rivals on synthetic sparse data with very many labels.

python mpi_scripts/simulate_xml.py --speeds 1320:1200:1100:1000 --seeds 5

Everything runs in this process: models, gradients and merges are real, seconds are simulated. A
batch takes time in proportion to its entries, as rows differ much in length. The data is synthetic,
like a smaller Amazon-670k: results show how strategies compare, not what they reach on real data.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

# Run by its path, a script finds neither `models` nor a gtopk that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from collectives.cost import Link
from gtopk.cli.simulate import render, replicas, speeds
from gtopk.cli.simulate.setting import Cluster, Record, Setting
from models.data.batches import SparseDataset
from models.data.catalogue import shape_of
from models.data.synthetic_xml import resized, synthesise
from models.xml_mlp import XmlMlp, precisions

STRATEGIES: Final[Mapping[str, dict[str, Any]]] = {
    "adaptive-sgd": {"algorithm": "adaptive"},
    "published": {
        "algorithm": "adaptive",
        "batch_rule": "published",
        "merge_weights": "published",
        "perturbation": 0.1,
        "merge_momentum": 0.9,
    },
    "k-step": {"algorithm": "k-step"},
    "elastic": {"algorithm": "elastic"},
    "crossbow": {"algorithm": "crossbow"},
    "s-sgd": {"algorithm": "s-sgd"},
}


class XmlTask:
    """Synthetic training and test rows, and the three-layer network; accuracy is P@1."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        shape = dataclasses.replace(
            resized(shape_of("amazon-670k"), options.features, options.labels),
            labels_per_row=options.labels_per_row,
        )
        self._train, self._test = (
            SparseDataset(synthesise(shape, rows, seed, stream=stream))
            for stream, rows in enumerate((options.rows, options.test_rows))
        )
        entries = np.diff(self._train.rows.features.offsets)
        self._work = entries / entries.mean()
        torch.manual_seed(seed)
        self._sizes = options.features, options.labels, options.hidden
        self._weights = XmlMlp(*self._sizes).state_dict()
        self.samples = options.rows
        self.length = sum(tensor.numel() for tensor in self._weights.values())

    def model(self) -> torch.nn.Module:
        """Return a network, always with the same initial weights."""
        made = XmlMlp(*self._sizes)
        made.load_state_dict(self._weights)
        return made

    def loss(self, model: torch.nn.Module, indices: torch.Tensor) -> torch.Tensor:
        """Return the cross entropy of the given rows."""
        assert isinstance(model, XmlMlp)
        return model.loss(self._train.__getitems__(indices.tolist()))

    def work_of(self, places: Sequence[int]) -> float:
        """Return the number of entries in the given rows, divided by a mean row's."""
        return float(self._work[list(places)].sum())

    def accuracy(self, model: torch.nn.Module) -> float:
        """Return P@1 of the test rows."""
        assert isinstance(model, XmlMlp)
        everything = self._test.__getitems__(range(len(self._test)))
        return precisions(model, everything, at=(1,))[1]


def rows_per_second(text: str) -> list[float]:
    """Parse the speeds of one or more ranks, such as "1320:1200"."""
    return speeds(text) if ":" in text else speeds(f"{text}:{text}")[:1]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    fleet = speeds("1320:1200:1100:1000")
    add("--speeds", type=rows_per_second, default=fleet, help="rows/s of each rank")
    add("--seeds", type=int, default=1)
    add("--epochs", type=int, default=8)
    add("--batch", type=int, default=64, help="a rank's first batch size; default: %(default)s")
    add("--mega-batch", type=int, default=0, help="rows between merges; default: 100 batches")
    add("--local-steps", type=int, default=8, help="for k-step and elastic; default: %(default)s")
    add("--merge-momentum", type=float, default=0.0, help="for the merged model of all strategies")
    add(
        "--lr",
        type=float,
        nargs="+",
        default=[4.0],
        help="learning rate; of several, the best one on an additional seed is used",
    )
    add("--target", type=float, default=0.5, help="P@1 to reach; default: %(default)s")
    add("--features", type=int, default=4000)
    add("--labels", type=int, default=1000)
    add("--labels-per-row", type=float, default=1.5, help="on average; default: %(default)s")
    add("--hidden", type=int, default=32)
    add("--rows", type=int, default=8000)
    add("--test-rows", type=int, default=1000)
    add("--overhead", type=float, default=0.002, help="seconds per batch")
    add("--noise", type=float, default=0.03)
    add("--bandwidth", type=float, default=10e9, help="bits a second; default: %(default)g")
    add("--latency", type=float, default=20e-6, help="seconds")
    add("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for the strategies."""
    options = parse(arguments)
    torch.set_num_threads(1)
    link = Link.of(options.bandwidth, options.latency)
    cluster = Cluster(options.speeds, options.overhead, options.noise, link=link)
    tasks = [XmlTask(options, seed) for seed in range(options.seeds + 1)]

    def setting_of(rate: float, seed: int) -> Setting:
        return Setting(
            cluster,
            tasks[seed],
            seed,
            options.epochs,
            options.batch * cluster.ranks,
            rate,
            momentum=0.0,
            density=None,
            mega_batch=options.mega_batch,
            evaluate_every=options.rows // 8,
        )

    def train(name: str, rate: float, seed: int) -> Record:
        return run(name, setting_of(rate, seed), options)

    shown: list[Record] = []
    for name in options.strategies:
        rate = options.lr[0]
        if len(options.lr) > 1:
            tried = {rate: train(name, rate, options.seeds) for rate in options.lr}
            rate = min(tried, key=lambda rate: rank_of(tried[rate], options.target))
        records = [train(name, rate, seed) for seed in range(options.seeds)]
        reached = ", ".join(f"{r.seconds_to(options.target) or math.nan:.3g}" for r in records)
        print(f"{name}, lr {rate:g}: {reached} s to the target, by seed", file=sys.stderr)
        shown += [dataclasses.replace(record, mode=f"{name} {rate:g}") for record in records]
    print("Synthetic rows, like a smaller Amazon-670k; accuracy is P@1; names have learning rates.")
    for line in render(shown, setting_of(options.lr[0], 0), options.target):
        print(line)


def run(name: str, setting: Setting, options: argparse.Namespace) -> Record:
    """Return the record of a strategy's run."""
    arguments = {
        "local_steps": options.local_steps,
        "merge_momentum": options.merge_momentum,
        **STRATEGIES[name],
    }
    return replicas.simulate(setting, name, **arguments)


def rank_of(record: Record, target: float) -> tuple[float, float]:
    """Return a key that is smaller for the better run: seconds to a target, then -accuracy."""
    return record.seconds_to(target) or math.inf, -record.final_accuracy


if __name__ == "__main__":
    main()
