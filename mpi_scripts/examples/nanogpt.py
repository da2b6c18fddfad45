"""Train a small GPT with AdamW, clipping and a cosine schedule on the bytes of a text.

gtopk run -n 2 mpi_scripts/examples/nanogpt.py --text input.txt   # default: Python's docstrings
gtopk run -n 2 mpi_scripts/examples/nanogpt.py --dense
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `models`, where run by path

import gtopk
import gtopk.torch as hvd
from models.data.docstrings import load_docstrings
from models.gpt import Gpt


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, and return the mean loss of the last tenth of the steps, equal on all ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dense", action="store_true", help="gradients travel whole")
    parser.add_argument("--text", type=Path, help="a file to learn")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=16, help="windows a step and rank")
    parser.add_argument("--context", type=int, default=64, help="bytes of a window")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args(arguments)

    hvd.init()
    torch.manual_seed(0)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if options.text is None:
        text = load_docstrings().train
    else:
        text = torch.from_numpy(np.fromfile(options.text, np.uint8).astype(np.int64))
    model = Gpt(256, options.context, options.width, options.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)

    def cosine(step: int) -> float:
        return 0.55 + 0.45 * math.cos(math.pi * step / options.steps)

    compression = hvd.Compression.none if options.dense else hvd.Compression.shards()
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), compression, global_clip_norm=1.0
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    schedule = gtopk.ramp(optimizer, options.steps, cosine)  # both ways: dense learns better, too

    places = torch.arange(options.context)
    generator = torch.Generator().manual_seed(hvd.rank())
    losses = []
    for step in range(options.steps):
        begins = torch.randint(len(text) - options.context, (options.batch, 1), generator=generator)
        x, y = (text[begins + places + ahead].to(device) for ahead in (0, 1))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if hvd.rank() == 0 and step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.2f}", flush=True)
    last = torch.stack(losses[-max(1, options.steps // 10) :]).mean()
    mean = float(hvd.allreduce(last, name="loss"))
    if hvd.rank() == 0:
        sent = optimizer.last_step.sent_bytes
        print(f"loss {mean:.2f} after step {options.steps}, {sent:,} bytes a step", flush=True)
    return mean


if __name__ == "__main__":
    main()
