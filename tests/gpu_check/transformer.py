"""Train a GPT on text, on ranks that share one device: dense AdamW and the transformer recipes.

All begin with the same weights and see the same rows in the same order. The loss on held-out text
is recorded by step. On a GPU: 10.8 million parameters, on the sources of Python's library and of
this repository, as bytes; on a CPU far fewer of both.
"""

from __future__ import annotations

import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import arguments, on_gpu, record, seconds_left

import gtopk
import gtopk.torch as hvd
from models.gpt import Gpt

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = (".py", ".md", ".cu", ".cuh", ".cpp", ".hpp")
BETAS = (0.9, 0.95)
CLOCKED_EVERY = 5  # steps: then rank 0 broadcasts whether the time is over


class Size(NamedTuple):
    """The sizes of the model, the text and the training."""

    rows: int  # of a rank's batch
    context: int
    width: int
    layers: int
    heads: int
    text_bytes: int
    most_steps: int
    warm_steps: int  # in which the learning rate rises
    every: int  # steps between evaluations


SIZES = {
    "cuda": Size(16, 256, 384, 6, 6, 40_000_000, 600, 40, 20),
    "cpu": Size(2, 32, 32, 2, 2, 200_000, 6, 2, 3),
}


class Recipe(NamedTuple):
    """AdamW with a compression; share: of the time, for this training."""

    name: str
    compression: Any
    share: float
    ramps: bool = True  # the learning rate, over the first half of the steps


# The first recipe determines the number of steps; the others are those of docs/tuning.md.
RECIPES = (
    Recipe("dense AdamW", hvd.Compression.none, 0.3, ramps=False),
    Recipe("AdamW, shards", hvd.Compression.shards(), 0.35),
    Recipe(
        "AdamW, gtopk",
        hvd.Compression.gtopk(density=0.05, wire="packed", values="int8"),
        0.35,
    ),
)


def files() -> Iterator[Path]:
    """Yield the files whose text is learned."""
    library = Path(sysconfig.get_path("stdlib"))
    ours = (ROOT / name for name in ("gtopk", "collectives", "docs", "tests"))
    for folder in (*ours, library):
        for path in sorted(folder.rglob("*")):
            packages = "site-packages" in path.parts or "dist-packages" in path.parts
            if path.suffix in SUFFIXES and path.is_file() and not packages:
                yield path


def text(most: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes to learn, and those of every twentieth file, held out: uint8 [n]."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    taken = 0
    for number, path in enumerate(files()):
        if taken >= most:
            break
        content = path.read_bytes()
        parts[number % 20 == 4].append(content)
        taken += len(content)
    learned, held_out = (
        torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8).to(device) for part in parts
    )
    return learned, held_out


class Training:
    """The training of one recipe on all ranks, for some steps or until the time is over."""

    def __init__(
        self, recipe: Recipe, size: Size, device: str, learned: torch.Tensor, held_out: torch.Tensor
    ) -> None:
        self.recipe, self.size, self.device = recipe, size, device
        self.learned, self.held_out = learned, held_out
        self.model = new_model(size, device)
        self.curve: list[dict[str, float]] = []

    def run(self, steps: int, seconds: float) -> list[dict[str, float]]:
        """Return rank 0's curve: step, seconds since the start, loss on held-out rows."""
        size, model = self.size, self.model
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=1e-3, betas=BETAS, weight_decay=0.0),
            model.named_parameters(),
            self.recipe.compression,
        )
        rates = (
            gtopk.ramp(optimizer, steps, self._warm_up)
            if self.recipe.ramps
            else torch.optim.lr_scheduler.LambdaLR(optimizer, self._warm_up)
        )
        begun = time.perf_counter()
        for step in range(1, steps + 1):
            rows = self._rows(self.learned, size.rows, step * hvd.size() + hvd.rank())
            optimizer.zero_grad()
            self._loss(rows).backward()
            optimizer.step()
            rates.step()
            time_is_over = time.perf_counter() - begun > seconds
            time_is_over = step % CLOCKED_EVERY == 0 and hvd.broadcast_object(time_is_over, 0)
            if step % size.every == 0 or step == steps or time_is_over:
                self._evaluate(step, time.perf_counter() - begun)
            if time_is_over:
                break
        return self.curve

    def _warm_up(self, step: int) -> float:
        return min(1.0, (step + 1) / self.size.warm_steps)

    def _evaluate(self, step: int, seconds: float) -> None:
        """Record the loss on held-out text, at the weights that are equal on all ranks."""
        if hvd.rank() > 0:
            return
        self.model.eval()
        with torch.no_grad():
            losses = [self._loss(self._rows(self.held_out, 32, n)).item() for n in range(4)]
        self.model.train()
        loss = sum(losses) / len(losses)
        self.curve.append({"step": step, "seconds": round(seconds, 2), "loss": round(loss, 4)})
        print(f"{self.recipe.name}: {self.curve[-1]}", flush=True)

    def _rows(self, of: torch.Tensor, count: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        most = len(of) - self.size.context - 1
        at = torch.randint(most, (count,), generator=generator).to(self.device)
        return of[at[:, None] + torch.arange(self.size.context + 1, device=self.device)].long()

    def _loss(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            scores = self.model(rows[:, :-1])
        return F.cross_entropy(scores.float().flatten(0, 1), rows[:, 1:].flatten())


def new_model(size: Size, device: str) -> Gpt:
    """Return the model as all ranks and recipes begin with it."""
    torch.manual_seed(0)
    return Gpt(256, size.context, size.width, size.layers, size.heads).to(device)


def main() -> int:
    """Train by each recipe; return 0 if the loss of each fell below that of guessing."""
    device = arguments().device
    size = SIZES["cuda" if on_gpu(device) else "cpu"]
    hvd.init()
    learned, held_out = text(size.text_bytes, device)
    parameters = sum(p.numel() for p in new_model(size, device).parameters())
    assert device == "cpu" or parameters >= 10_000_000, parameters
    seconds = seconds_left() - 25  # the ranks' start, and the last steps
    steps, well = size.most_steps, True
    for recipe in RECIPES:
        training = Training(recipe, size, device, learned, held_out)
        curve = hvd.broadcast_object(training.run(steps, seconds * recipe.share), 0)
        if hvd.rank() == 0:
            record(
                "training",
                recipe=recipe.name,
                compression=repr(recipe.compression),
                parameters=parameters,
                learned_bytes=len(learned),
                held_out_bytes=len(held_out),
                python=sys.version.split()[0],
                ranks=hvd.size(),
                rows_of_a_rank=size.rows,
                context=size.context,
                curve=curve,
            )
        if recipe is RECIPES[0]:
            steps = curve[-1]["step"]
        well &= curve[-1]["loss"] < math.log(256)  # that of guessing
    hvd.shutdown()
    return not well


if __name__ == "__main__":
    sys.exit(main())
