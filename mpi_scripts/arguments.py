"""Arguments of the programs here, and errors in them: said once, for all ranks.

The device of a rank: one of its node's GPUs, by its number on the node, or the CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import torch

import gtopk.torch as hvd


def own_device(name: str = "auto") -> torch.device:
    """Return this rank's device, made the current one; name: "cpu", "cuda", or what there is.

    Raises ValueError where there is no GPU to be used.
    """
    count = 0 if name == "cpu" else torch.cuda.device_count()
    if not count:
        if name == "cuda":
            raise ValueError("--device cuda needs a GPU that torch can use; torch sees none")
        return torch.device("cpu")
    device = torch.device("cuda", hvd.local_rank() % count)
    torch.cuda.set_device(device)
    return device


T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would end the process, each rank for itself."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def at_least(minimum: int) -> Callable[[str], int]:
    """Return a type of argument: whole numbers from a minimum on."""

    def integer(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {value}")
        return value

    return integer


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
