"""The functions of `horovod.common.util` that clients use; build queries answer for torch."""

from __future__ import annotations

import itertools
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch
from torch.torch_version import TorchVersion

from ..torch.mpi_ops import lifecycle
from ..torch.mpi_ops.reduction import op_of

T = TypeVar("T")

EXTENSIONS: Final = ("torch",)  # of Horovod's three frameworks


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables within the context; a value of None leaves its variable alone."""
    given = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    try:
        os.environ.update(given)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def split_list(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Split a list into `parts` slices, in order; the first len(items) % parts have one more."""
    each, more = divmod(len(items), parts)
    ends = [number * each + min(number, more) for number in range(parts + 1)]
    return [items[a:b] for a, b in itertools.pairwise(ends)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Tell whether a number of ranks is a power of two. gtopk's Adasum accepts any number."""
    return num_rank > 0 and num_rank.bit_count() == 1


def is_iterable(x: object) -> bool:
    """Tell whether `iter` accepts the object."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Tell whether a version is the target, "major.minor.patch", or a later one.

    Raises ValueError for a target in another form, and for a value that is not a string.
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"versions must be strings, got {ver!r} and {target!r}")
    if len(target.split(".")) != 3:
        raise ValueError(f"target must be 'major.minor.patch', got {target!r}")
    # torch's own class: `packaging` need not be installed.
    return bool(TorchVersion(ver) >= target)


def get_average_backwards_compatibility_fun(
    reduce_ops: Any,
) -> Callable[[int | None, bool | None], int]:
    """Return a function that maps Horovod's (op, average) arguments to an op.

    reduce_ops: has the ops' numbers as Average and Sum, as horovod.torch.mpi_ops does.
    """
    return lambda op, average: op_of(op, average, reduce_ops.Average, reduce_ops.Sum)


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError unless the extension is torch's, which needs no build.

    ext_name: "horovod.torch", "horovod.tensorflow", ... The other arguments are ignored.
    """
    if ext_name.rpartition(".")[2] not in EXTENSIONS:
        raise ImportError(
            f"Extension {ext_name} has not been built: gtopk has only torch's, and needs no "
            f"{ext_env_var}"
        )


def check_installed_version(
    name: str, version: str, exception: BaseException | None = None
) -> None:
    """Do nothing: gtopk is not built against a framework version."""


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Tell whether the extension is torch's."""
    return ext_base_name in EXTENSIONS


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Tell whether torch sees a GPU; False for other frameworks."""
    return extension_available(ext_base_name) and torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:
    """Tell whether MPI can be used here."""
    return lifecycle.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """Tell whether gloo can be used here."""
    return lifecycle.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """Return the version of the usable NCCL; 0 for none."""
    return lifecycle.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """Return False: IBM's DDL is not used."""
    return lifecycle.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """Return False: Intel's oneCCL is not used."""
    return lifecycle.ccl_built()


def get_ext_suffix() -> str:
    """Return the file name suffix of compiled modules for this Python."""
    return sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Return the path of a compiled module; the last of `args` is its name, the others folders.

    pkg_path: the path is relative to this file's folder.
    """
    *folders, name = args
    return os.path.join(os.path.dirname(pkg_path), *folders, name + get_ext_suffix())
