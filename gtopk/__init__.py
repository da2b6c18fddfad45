"""gtopk: data-parallel PyTorch training for slow networks and mixed GPUs.

    import gtopk.torch as hvd

is the main API: Horovod's names, with `Compression.gtopk` beside `none` and `fp16`.

    gtopk.run(func, args, np=4)

starts ranks itself and calls a function on them, as horovod.run does.

    gtopk.save_checkpoint(folder, model, optimizer, loader, step)
    gtopk.load_latest(folder, model, optimizer, loader)

save and restore a training run on all ranks: see `torch.checkpoint`.

    with gtopk.termination() as preempted: ...

tells all ranks, after the same step, that one of them got SIGTERM, so that they can save.

    gtopk.record(folder)
    gtopk.log(loss=..., accuracy=...)
    gtopk.log_samples(len(batch))

record a run for `gtopk report` and `gtopk top`; GTOPK_RUN=FOLDER does the same as `record`.

    gtopk.LocalSGD(optimizer, inner_steps=32, compression=...)

lets ranks train locally and exchange every 32 steps: see `local_sgd`.

    scheduler = gtopk.ramp(optimizer, steps=10_000)

starts training with AdamW's compressed steps at a lower learning rate and raises it.

`gtopk.torch`, `ddp`, `fsdp`, `lightning`, `accelerate`, `transformers`, `horovod` and `local_sgd`
need no separate import: each is imported, with its dependencies, at its first use.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CheckpointError, RankError
from .runtime.runner import run

if TYPE_CHECKING:
    from . import accelerate as accelerate
    from . import ddp as ddp
    from . import fsdp as fsdp
    from . import horovod as horovod
    from . import lightning as lightning
    from . import local_sgd as local_sgd
    from . import torch as torch
    from . import transformers as transformers
    from .local_sgd import LocalSGD
    from .optim.wrapped.adam_step import ramp
    from .runtime.world.preemption import termination
    from .telemetry.run_record import log, log_samples, record
    from .torch.checkpoint import load_latest, save_checkpoint

__all__ = [
    "CheckpointError",
    "LocalSGD",
    "RankError",
    "load_latest",
    "log",
    "log_samples",
    "ramp",
    "record",
    "run",
    "save_checkpoint",
    "termination",
]

__version__ = "0.1.0"


def _check_collectives() -> None:
    """Raise ImportError when another `collectives` shadows the one gtopk was installed with."""
    # Only located, not imported: importing a foreign package would run its code first.
    spec = importlib.util.find_spec("collectives")
    found = Path(spec.origin) if spec and spec.origin else None
    if found is None or not (found.parent / "vector.py").exists():
        advice = "rename that file or run from another directory"
        if found is None or "site-packages" in found.parts:
            advice = "pip uninstall collectives, then install gtopk again"
        raise ImportError(
            "gtopk needs the 'collectives' package it was installed with, but found "
            f"{found or 'none'}; {advice}"
        )
    if _is_replaced(found.parent / "__init__.py"):
        raise ImportError(
            f"another package named 'collectives' has overwritten {found}, which belongs to gtopk: "
            "pip uninstall collectives, then install gtopk again"
        )


def _is_replaced(initial: Path) -> bool:
    """Tell whether another package of the same name has overwritten the file."""
    try:
        return "from .vector import SparseVector" not in initial.read_text(encoding="utf-8")
    except OSError:
        return False


def _is_command() -> bool:
    """Tell whether Python runs `gtopk ...` or `python -m gtopk ...`, not a user's script."""
    # While Python looks for the module of -m, argv[0] is just "-m".
    program = sys.argv[0] if sys.argv else ""
    return Path(program).name == "gtopk" or (program == "-m" and "gtopk" in sys.orig_argv)


_SUBMODULES = {
    "accelerate",
    "ddp",
    "fsdp",
    "horovod",
    "lightning",
    "local_sgd",
    "torch",
    "transformers",
}
_HOMES = {
    "LocalSGD": ".local_sgd",
    "load_latest": ".torch.checkpoint",
    "log": ".telemetry.run_record",
    "log_samples": ".telemetry.run_record",
    "ramp": ".optim.wrapped.adam_step",
    "record": ".telemetry.run_record",
    "save_checkpoint": ".torch.checkpoint",
    "termination": ".runtime.world.preemption",
}


def __getattr__(name: str) -> Any:
    """Import names that need torch at their first use: `import gtopk` does not import torch."""
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names: those of `__all__`, and the submodules that need no import."""
    return sorted({*__all__, *_SUBMODULES, "__version__"})


try:
    _check_collectives()
except ImportError as error:
    # A command prints only the message; a traceback would show nothing but Python's launcher.
    if _is_command():
        sys.exit(f"gtopk: {error}")
    raise
