"""Classify images with DistributedDataParallel, whose buckets are exchanged with gTop-k.

torchrun --nproc-per-node 2 -m mpi_scripts.examples.images            # scikit-learn's digits
torchrun --nproc-per-node 2 -m mpi_scripts.examples.images --dense    # DDP alone
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import gtopk.ddp
from models.data.digit_images import load_digit_images
from models.digits_cnn import digits_cnn


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, and return the loss on the test set, which is equal on all ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dense", action="store_true", help="plain DDP")
    parser.add_argument("--density", type=float, default=0.05, help="0.001 for a model of millions")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    data = load_digit_images()
    sampler = DistributedSampler(data.train)
    loader = DataLoader(data.train, batch_size=128 // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(digits_cnn().to(device))

    momentum, weight_decay = 0.9, 1e-4
    if not options.dense:
        state = gtopk.ddp.GTopKState(options.density, momentum_correction=momentum)
        model.register_comm_hook(state, gtopk.ddp.gtopk_hook)
        # The hook takes the momentum before it selects; the decay passes through none any more.
        momentum, weight_decay = 0.0, weight_decay / (1 - momentum)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=momentum, weight_decay=weight_decay
    )

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()

    x, y = (each.to(device) for each in data.test.tensors)
    with torch.no_grad():
        scores = model.module(x)
    accuracy = 100 * float((scores.argmax(1) == y).double().mean())
    if dist.get_rank() == 0:
        sent = "dense" if options.dense else f"{state.last_step.sent_bytes:,} bytes a step"
        print(f"accuracy {accuracy:.1f} % after epoch {options.epochs}, {sent}", flush=True)
    return float(F.cross_entropy(scores, y))


if __name__ == "__main__":
    dist.init_process_group()  # gloo on CPUs, NCCL on GPUs
    main()
    dist.destroy_process_group()
