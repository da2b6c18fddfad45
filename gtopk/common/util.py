"""What clients take from `horovod.common.util`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def split_list(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Return so many slices of a list, in order; the first len(items) % parts have one more."""
    each, more = divmod(len(items), parts)
    ends = [number * each + min(number, more) for number in range(parts + 1)]
    return [items[a:b] for a, b in itertools.pairwise(ends)]


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError for another framework than torch; nothing needs to be built for that one.

    ext_name: "horovod.torch", "horovod.tensorflow", ... The other arguments are Horovod's.
    """
    if ext_name.rpartition(".")[2] != "torch":
        raise ImportError(
            f"Extension {ext_name} has not been built: gtopk has only torch's, and needs no "
            f"{ext_env_var}"
        )
