"""Classify images with Lightning Fabric, in your own loop.

torchrun --nproc-per-node 2 -m mpi_scripts.examples.fabric
torchrun --nproc-per-node 2 -m mpi_scripts.examples.fabric --dense
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import gtopk
from models.data.digit_images import load_digit_images
from models.digits_cnn import digits_cnn

try:
    from lightning.fabric import Fabric
except ImportError as missing:
    sys.exit(f'this example needs {missing.name}: pip install ".[lightning]" in a clone')


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, and return the loss on the test set, which is equal on all ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dense", action="store_true", help="Fabric alone")
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoint", help="a file to save to and to resume from")
    options = parser.parse_args(arguments)

    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = int(os.environ["WORLD_SIZE"]) // devices
    fabric = Fabric(strategy="ddp", devices=devices, num_nodes=nodes)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    data = load_digit_images()
    loader = DataLoader(data.train, 128 // fabric.world_size, shuffle=True)
    loader = fabric.setup_dataloaders(loader)
    model = digits_cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    saved = {"model": model, "optimizer": optimizer, "epoch": 0}
    if not options.dense:
        state = gtopk.lightning.compress(
            fabric, model, optimizer, options.density, global_clip_norm=1.0
        )
        saved["gtopk"] = state.stateful(model)
    if options.checkpoint and os.path.exists(options.checkpoint):
        fabric.load(options.checkpoint, saved)

    for epoch in range(saved["epoch"], options.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(model(x), y))
            if options.dense:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
        saved["epoch"] = epoch + 1
        if options.checkpoint:
            fabric.save(options.checkpoint, saved)

    x, y = (each.to(fabric.device) for each in data.test.tensors)
    with torch.no_grad():
        model.eval()
        scores = model(x)
    accuracy = 100 * float((scores.argmax(1) == y).double().mean())
    if fabric.is_global_zero:
        print(f"accuracy {accuracy:.1f} % after epoch {options.epochs}", flush=True)
    return float(F.cross_entropy(scores, y))


if __name__ == "__main__":
    main()
