"""What is to be recorded, and where to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .. import settings
from .endpoint import Address, parse_address


@dataclass(frozen=True)
class Settings:
    """What a rank records; empty: nothing.

    run:         the folder of the run's record.
    every:       steps, of which one is written.
    tensorboard: the folder for its scalars.
    wandb:       the project for them; mlflow: the experiment.
    prometheus:  where its endpoint is, for local rank 0; the others' ports follow.
    """

    run: str = ""
    every: int = 1
    tensorboard: str = ""
    prometheus: Address | None = None
    wandb: str = ""
    mlflow: str = ""

    @property
    def asked(self) -> bool:
        """Tell whether anything is to be recorded."""
        return any((self.run, self.tensorboard, self.prometheus, self.wandb, self.mlflow))


def settings_from(environ: Mapping[str, str] = os.environ) -> Settings:
    """Return what the environment asks for; raise ValueError for what makes no sense."""
    address = settings.PROMETHEUS.read(environ)
    return Settings(
        settings.RUN.read(environ),
        settings.RUN_EVERY.read(environ),
        settings.TENSORBOARD.read(environ),
        parse_address(address, settings.PROMETHEUS.name) if address else None,
        settings.WANDB.read(environ),
        settings.MLFLOW.read(environ),
    )
