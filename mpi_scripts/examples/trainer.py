"""Classify images with Lightning's Trainer; a callback makes its DDP use gTop-k.

torchrun --nproc-per-node 2 -m mpi_scripts.examples.trainer
torchrun --nproc-per-node 2 -m mpi_scripts.examples.trainer --dense
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
    from lightning.pytorch import LightningModule, Trainer, seed_everything
except ImportError as missing:
    sys.exit(f'this example needs {missing.name}: pip install ".[lightning]" in a clone')


class Digits(LightningModule):
    """A network for scikit-learn's digits, trained with AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.network = digits_cnn()

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.network(x), y)
        self.log("loss", loss)
        return loss

    def test_step(self, batch: list[torch.Tensor], number: int) -> None:
        x, y = batch
        scores = self.network(x)
        self.log("test loss", F.cross_entropy(scores, y), sync_dist=True)
        self.log("accuracy", 100 * (scores.argmax(1) == y).double().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, and return the loss on the test set, which is equal on all ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dense", action="store_true", help="Trainer without the callback")
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args(arguments)

    seed_everything(0, verbose=False)
    ranks = int(os.environ["WORLD_SIZE"])
    data = load_digit_images()
    callbacks = [] if options.dense else [gtopk.lightning.GTopK(options.density)]
    trainer = Trainer(
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=ranks // int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=options.epochs,
        gradient_clip_val=1.0,  # clips the mean gradient, with the callback, too
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits()
    trainer.fit(model, DataLoader(data.train, 128 // ranks, shuffle=True))
    (measured,) = trainer.test(model, DataLoader(data.test, 128), verbose=False)
    if trainer.is_global_zero:
        print(f"accuracy {measured['accuracy']:.1f} % after epoch {options.epochs}", flush=True)
    return measured["test loss"]


if __name__ == "__main__":
    main()
