"""Train a small convolutional network on handwritten digits, the way Horovod's users do.

horovodrun -np 4 python digits.py --epochs 3        or, without a launcher: --num-proc 4
"""

from __future__ import annotations

import argparse

import horovod
import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.drop = nn.Dropout(0.1)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(F.max_pool2d(self.norm(self.conv2(x)), 2))
        return F.log_softmax(self.fc(self.drop(x.flatten(1))), dim=1)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--momentum", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    parser.add_argument("--num-proc", type=int)
    return parser.parse_args(arguments)


def metric_average(value: float, name: str) -> float:
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train(epoch: int, model: nn.Module, loader: DataLoader, optimizer, log_interval: int) -> None:
    model.train()
    loader.sampler.set_epoch(epoch)
    for index, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if hvd.rank() == 0 and index % log_interval == 0:
            done = index * len(data)
            print(f"Train Epoch: {epoch} [{done}/{len(loader.sampler)}]\tLoss: {loss.item():.6f}")


def test(model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    model.eval()
    loss, right = 0.0, 0.0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            right += output.argmax(1).eq(target).float().sum().item()
    # The sampler's length, not the dataset's: each rank has seen a part.
    loss = metric_average(loss / len(loader.sampler), "avg_loss")
    accuracy = metric_average(right / len(loader.sampler), "avg_accuracy")
    if hvd.rank() == 0:
        print(f"Test set: Average loss: {loss:.6f}, Accuracy: {100 * accuracy:.2f}%", flush=True)
    return loss, accuracy


def main(args: argparse.Namespace) -> tuple[float, float]:
    hvd.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    train_set, test_set = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])
    train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    test_loader = DataLoader(test_set, batch_size=100, sampler=test_sampler)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    result = 0.0, 0.0
    for epoch in range(1, args.epochs + 1):
        train(epoch, model, train_loader, optimizer, args.log_interval)
        result = test(model, test_loader)
    return result


if __name__ == "__main__":
    args = parse()
    if args.num_proc:
        results = horovod.run(main, args=(args,), np=args.num_proc)
        print(f"{len(results)} ranks returned {len(set(results))} result")
    else:
        main(args)
