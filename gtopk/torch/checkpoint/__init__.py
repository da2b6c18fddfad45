"""Checkpoints of a training run on all ranks: safetensors and JSON, whole or not there at all.

save.py         what a script calls: `save_checkpoint`, `load_latest`
state.py        the state, taken from models, optimizers and loaders, and put back
archive.py      the checkpoints in a folder: numbers, which is whole, which go
files.py        their files, with checksums; tree.py: objects as JSON and named tensors
validation.py   checks before anything is put back; all ranks fail, or none does
dcp.py          torch.distributed.checkpoint reads and writes them, too

Which residual a rank gets on another number of ranks is in optim/wrapped/checkpoint.py.
"""

from __future__ import annotations

from ...errors import CheckpointError
from .archive import Saving
from .save import Loaded, load_latest, save_checkpoint

__all__ = ["CheckpointError", "Loaded", "Saving", "load_latest", "save_checkpoint"]
