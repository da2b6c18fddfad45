"""horovod.common.util, as far as scripts use it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def split_list(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Return `items` in `count` runs whose lengths differ by one at most, the longer ones first."""
    length, longer = divmod(len(items), count)
    ends = [(index + 1) * length + min(index + 1, longer) for index in range(count)]
    return [items[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def is_iterable(value: Any) -> bool:
    """Tell whether a value can be iterated over."""
    return isinstance(value, Iterable)


def num_rank_is_power_2(ranks: int) -> bool:
    """Tell whether a number of ranks is a power of two."""
    return ranks > 0 and ranks & (ranks - 1) == 0


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Tell whether Horovod's API for a framework is there: torch's is."""
    return ext_base_name == "torch"


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError unless Horovod's API for a framework ("horovod.torch") is there."""
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(f"Extension {ext_name} has not been built: gtopk has horovod.torch only")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Tell whether a framework sees a GPU."""
    import torch

    return ext_base_name == "torch" and torch.cuda.is_available()


def __getattr__(name: str) -> Any:
    """Return mpi_built, gloo_built, nccl_built, ...: those of horovod.torch."""
    if name.endswith("_built"):
        return getattr(importlib.import_module("gtopk.torch"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
