"""gtopk: data-parallel PyTorch training for slow networks and mixed GPUs.

    import gtopk.torch as hvd

is the face of the library: Horovod's names, and `Compression.gtopk` beside `none` and `fp16`.

    gtopk.run(func, args, np=4)

starts ranks itself and calls a function on them, as horovod.run does.
"""

import importlib.util
from pathlib import Path

from .runner import RankError, run

__all__ = ["RankError", "run"]

__version__ = "0.1.0"


def _check_collectives() -> None:
    """Raise ImportError when another `collectives` shadows the one gtopk was installed with."""
    spec = importlib.util.find_spec("collectives")
    found = Path(spec.origin) if spec and spec.origin else None
    if found is None or not (found.parent / "vector.py").exists():
        raise ImportError(
            "gtopk needs the 'collectives' package it was installed with, but found "
            f"{found or 'none'}; rename that file or run from another directory"
        )


_check_collectives()
