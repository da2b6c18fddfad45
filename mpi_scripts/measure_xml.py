"""Measure memory and time of a training step for extreme classification, in published dimensions.

python mpi_scripts/measure_xml.py amazon-670k                  # one rank
mpirun -n 2 python mpi_scripts/measure_xml.py delicious-200k --batch-size 64

Rows are synthetic. Memory is given as the bytes of tensors and as the process's peak, which Linux
counts. Seconds are the CPU time of all threads of a rank, so that other programs do not count.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Run by its path, a script finds neither `models` nor a gtopk that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gtopk.torch as hvd
from gtopk.cli.arguments import as_argument, share
from gtopk.units import bytes_text, count_text
from models.data.batches import SparseDataset
from models.data.catalogue import shape_of
from models.data.synthetic_xml import synthesise
from models.xml_mlp import XmlMlp


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor; of a sparse one, of its values and indices."""
    if tensor.is_sparse:
        return bytes_of(tensor._values()) + bytes_of(tensor._indices())
    return tensor.numel() * tensor.element_size()


def memory_bytes(which: str) -> int:
    """Return this process's memory by Linux: VmRSS, or VmHWM, the peak since `reset_peak`."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{which}:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found.group(1))


def reset_peak() -> None:
    """Reset VmHWM."""
    Path("/proc/self/clear_refs").write_text("5")


class Steps:
    """Measures steps with different ways to compute the loss."""

    def __init__(self, model: XmlMlp, optimizer: Any, dataset: SparseDataset) -> None:
        self._model, self._optimizer, self._dataset = model, optimizer, dataset

    def measure(self, name: str, loss_of: Callable[[Any], torch.Tensor], steps: int) -> str:
        """Return a step's cost as text: the mean of all steps but the first."""
        batch_size = len(self._dataset) // (steps + 1)
        names = "forward", "backward", "exchange", "apply"
        seconds = dict.fromkeys(names, 0.0)
        bytes_before = memory_bytes("VmRSS")
        reset_peak()
        for step in range(steps + 1):
            batch = self._dataset.__getitems__(range(step * batch_size, (step + 1) * batch_size))
            clock = [time.process_time()]
            self._optimizer.zero_grad()
            loss = loss_of(batch)
            clock.append(time.process_time())
            loss.backward()
            clock.append(time.process_time())
            computed = sum(bytes_of(p.grad) for p in self._model.parameters() if p.grad is not None)
            self._optimizer.synchronize()
            clock.append(time.process_time())
            with self._optimizer.skip_synchronize():
                self._optimizer.step()
            clock.append(time.process_time())
            if step:
                for part, begun, ended in zip(names, clock[:-1], clock[1:], strict=True):
                    seconds[part] += (ended - begun) / steps
        rows = {
            "embedding": self._model.embedding.weight.grad,
            "output": self._model.output.grad,
        }
        touched = ", ".join(
            f"{name} {count_text(len(gradient.coalesce().indices()[0]))} rows"
            if gradient is not None and gradient.is_sparse
            else f"{name} dense"
            for name, gradient in rows.items()
        )
        parts = ", ".join(f"{part} {seconds[part]:.3f}" for part in names)
        peak_bytes = memory_bytes("VmHWM") - bytes_before
        return (
            f"{name}\n"
            f"  gradient of a rank   {bytes_text(computed)}\n"
            f"  agreed update        {touched}\n"
            f"  sent by a rank       {bytes_text(self._optimizer.last_step.sent_bytes)}\n"
            f"  most memory of steps {bytes_text(peak_bytes)}, besides what was there before\n"
            f"  processor seconds    {sum(seconds.values()):.3f}: {parts}\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("like", help="amazon-670k or delicious-200k")
    parser.add_argument("--batch-size", type=int, default=256, help="of a rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--negatives", type=int, default=4096)
    parser.add_argument("--compression", choices=("none", "gtopk"), default="none")
    parser.add_argument("--density", type=as_argument(share), default=0.001)
    parser.add_argument("--only", choices=("sampled", "full"))
    arguments = parser.parse_args()
    hvd.init()
    shape = shape_of(arguments.like)
    count = arguments.batch_size * (arguments.steps + 1)
    dataset = SparseDataset(synthesise(shape, count, stream=hvd.rank()))
    torch.manual_seed(0)
    model = XmlMlp(shape.features, shape.labels)
    compression: Any = hvd.Compression.none
    if arguments.compression == "gtopk":
        compression = hvd.Compression.gtopk(arguments.density)
    lines = [
        f"{dataset.rows.origin}: {count_text(shape.features)} features, "
        f"{count_text(shape.labels)} labels, {arguments.batch_size} rows a rank, {hvd.size()} "
        "ranks\n"
        f"{count_text(sum(p.numel() for p in model.parameters()))} parameters, "
        f"{bytes_text(sum(map(bytes_of, model.parameters())))}\n"
    ]
    ways: dict[str, Callable[[Any], torch.Tensor]] = {
        "sampled": lambda batch: model.sampled_loss(batch, arguments.negatives),
        "full": model.loss,
    }
    for way, loss_of in ways.items():
        if arguments.only in (None, way):
            # A new optimizer for each: once a parameter's gradient was sparse, it stays sparse.
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1),
                named_parameters=model.named_parameters(),
                compression=compression,
            )
            name = f"softmax over all labels, {arguments.compression}"
            if way == "sampled":
                name = f"softmax over the batch's labels and {arguments.negatives} others"
            steps = Steps(model, optimizer, dataset)
            lines.append(steps.measure(name, loss_of, arguments.steps))
    if hvd.rank() == 0:
        print("".join(lines), end="", flush=True)


if __name__ == "__main__":
    main()
