"""Train a small network on all ranks: a Horovod script with one import changed.

mpirun -n 4 python mpi_scripts/train.py --compression gtopk --density 0.01
python mpi_scripts/train.py                  # one rank
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

# By path, `python mpi_scripts/train.py` would find neither `models` nor a gtopk not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gtopk.torch as hvd  # was: import horovod.torch as hvd
from models.data import Classification, load
from models.mlp import mlp

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would end the process, each rank for itself."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def at_least(minimum: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {value}")
        return value

    return integer


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="digits", help="'digits', or the path of an .npz file")
    parser.add_argument("--epochs", type=at_least(1), default=30)
    parser.add_argument("--batch-size", type=at_least(1), default=32, help="per rank and step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--compression", choices=["none", "fp16", "topk", "gtopk"], default="gtopk")
    parser.add_argument("--density", type=float, default=0.01, help="share of the entries sent")
    parser.add_argument("--seed", type=at_least(0), default=0)
    return parser.parse_args()


class Training(NamedTuple):
    """What is ready on a rank before the ranks do anything together."""

    epochs: int
    data: Classification
    sampler: DistributedSampler[tuple[torch.Tensor, ...]]
    loader: DataLoader[tuple[torch.Tensor, ...]]
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    compression: Any


def prepare() -> Training:
    """Raise ValueError, OSError or ImportError for what the user must change."""
    arguments = parse()
    torch.manual_seed(arguments.seed)
    data = load(arguments.dataset, arguments.seed)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        data.train, num_replicas=hvd.size(), rank=hvd.rank(), seed=arguments.seed
    )
    loader = DataLoader(data.train, arguments.batch_size, sampler=sampler, drop_last=True)
    if not len(loader):
        raise ValueError(
            f"--batch-size {arguments.batch_size} must not exceed the {len(sampler)} of "
            f"{len(data.train)} training samples that each of {hvd.size()} ranks gets"
        )
    model = mlp(data.features, classes=data.classes)
    # With top-k, momentum is taken before the selection, not after it.
    sparse = arguments.compression in ("topk", "gtopk")
    optimizer = torch.optim.SGD(
        model.parameters(), lr=arguments.lr, momentum=0.0 if sparse else arguments.momentum
    )
    compression = getattr(hvd.Compression, arguments.compression)
    if sparse:
        compression = compression(arguments.density, momentum_correction=arguments.momentum)
    return Training(arguments.epochs, data, sampler, loader, model, optimizer, compression)


def on_every_rank(prepare: Callable[[], T]) -> T:
    """Return what `prepare` returns; where it fails, say so once and end every rank."""
    problem = None
    try:
        prepared = prepare()
    except (ImportError, OSError, ValueError) as error:
        problem = str(error)
    problems = hvd.allgather_object(problem)
    if not any(problems):
        return prepared
    if hvd.rank() == 0:
        for text in dict.fromkeys(text for text in problems if text):
            ranks = ", ".join(str(rank) for rank, other in enumerate(problems) if other == text)
            print(
                f"{Path(sys.argv[0]).name}: error: {text} [rank {ranks}]",
                file=sys.stderr,
                flush=True,
            )
    hvd.shutdown()  # returns on all ranks at once: none is ended before the error is out
    sys.exit(2)


def main() -> None:
    hvd.init()
    epochs, data, sampler, loader, model, optimizer, compression = on_every_rank(prepare)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    sent_bytes, counted = 0, True
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            sent_bytes += optimizer.last_step.sent_bytes
            counted &= optimizer.last_step.bytes_counted  # MPI's own allreduce tells no one
        loss = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            accuracy = test(model, data.test)
            print(
                f"epoch {epoch + 1:3d}  loss {loss:.4f}  test accuracy {accuracy:.4f}  "
                f"sent per rank{'' if counted else ', reckoned,'} {sent_bytes / 1e6:.2f} MB",
                flush=True,
            )


@torch.no_grad()
def test(model: torch.nn.Module, data: torch.utils.data.TensorDataset) -> float:
    x, y = data.tensors
    return float((model(x).argmax(1) == y).float().mean())


if __name__ == "__main__":
    main()
