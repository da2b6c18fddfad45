"""Arguments of the programs here; an error in them is printed once, for all ranks.

A rank's device is one of its node's GPUs, by the rank's number on the node, or the CPU.
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
    """Make a device current, and return it; name: "cpu", "cuda", or "auto" for either.

    Raises ValueError if no GPU can be used.
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
    """Raises ValueError, where argparse would end each rank's process separately."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def at_least(minimum: int) -> Callable[[str], int]:
    """Return an argument type: whole numbers that are at least `minimum`."""

    def integer(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {value}")
        return value

    return integer


def on_every_rank(prepare: Callable[[], T]) -> T:
    """Return the result of `prepare`; if it fails on a rank, print the error once and end all."""
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
    hvd.shutdown()  # all ranks return together: none ends before the error is printed
    sys.exit(2)
