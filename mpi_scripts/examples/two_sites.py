"""Train at two sites: each rank trains locally, and ranks exchange their changes now and then.

gtopk run -n 2 --link 100mbit,30ms mpi_scripts/examples/two_sites.py          # an emulated uplink
gtopk run -n 2 --link 100mbit,30ms mpi_scripts/examples/two_sites.py --dense  # DiLoCo, dense
gtopk run -n 2 --link 100mbit,30ms mpi_scripts/examples/two_sites.py --dense --overlap-steps 8
gtopk run -n 2 --link 100mbit,30ms mpi_scripts/examples/two_sites.py --every-step
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `models`, where run by path

import gtopk
import gtopk.torch as hvd
from models.data.digit_images import load_digit_images
from models.digits_cnn import digits_cnn


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, and return the loss on the test set, which is equal on all ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dense", action="store_true", help="a round exchanges all changes: DiLoCo"
    )
    parser.add_argument("--every-step", action="store_true", help="exchange gradients, all of them")
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--inner-steps", type=int, default=16, help="of a round")
    parser.add_argument("--overlap-steps", type=int, default=0, help="made during an exchange")
    parser.add_argument("--fragments", type=int, default=1, help="parts of the model, in turn")
    parser.add_argument("--bits", type=int, help="exchange all changes, with this many bits each")
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args(arguments)

    hvd.init()
    torch.manual_seed(0)
    data = load_digit_images()
    sampler = DistributedSampler(data.train, hvd.size(), hvd.rank())
    loader = DataLoader(data.train, batch_size=128 // hvd.size(), sampler=sampler)
    model = digits_cnn()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    compression = hvd.Compression.none
    if options.every_step:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    else:
        if options.bits:
            compression = hvd.Compression.shards(1, options.bits)
        elif not options.dense:
            compression = hvd.Compression.gtopk(options.density)
        optimizer = gtopk.LocalSGD(
            optimizer,
            options.inner_steps,
            compression=compression,
            overlap_steps=options.overlap_steps,
            fragments=options.fragments,
        )

    began = time.perf_counter()
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    if not options.every_step:
        optimizer.outer_step()  # ends an unfinished round, so that all ranks end with one model
    seconds = time.perf_counter() - began

    x, y = data.test.tensors
    with torch.no_grad():
        scores = model(x)
    accuracy = 100 * float((scores.argmax(1) == y).double().mean())
    if hvd.rank() == 0:
        print(f"accuracy {accuracy:.1f} % after {seconds:.1f} s", flush=True)
    return float(F.cross_entropy(scores, y))


if __name__ == "__main__":
    main()
