"""Atomic checkpoints of a training run on all ranks, as safetensors and JSON.

save.py         `save_checkpoint` and `load_latest`, the functions that a script calls
state.py        collects the state of models, optimizers and loaders, and restores it
archive.py      the checkpoints in a folder: numbers them, finds whole ones, removes old ones
files.py        the files, with checksums
tree.py         objects as JSON and named tensors
validation.py   checks a state before it is restored; all ranks fail, or none does
dcp.py          reads and writes the same checkpoints with torch.distributed.checkpoint

optim/wrapped/checkpoint.py assigns residuals when the number of ranks has changed.
"""

from __future__ import annotations

from ...errors import CheckpointError
from .archive import Saving
from .save import Loaded, load_latest, save_checkpoint

__all__ = ["CheckpointError", "Loaded", "Saving", "load_latest", "save_checkpoint"]
