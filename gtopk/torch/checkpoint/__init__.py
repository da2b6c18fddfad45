"""Checkpoints of a training run on all ranks: safetensors and JSON, whole or not there at all."""

from __future__ import annotations

from ...errors import CheckpointError
from .save import Loaded, Saving, load_latest, save_checkpoint

__all__ = ["CheckpointError", "Loaded", "Saving", "load_latest", "save_checkpoint"]
