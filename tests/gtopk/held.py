"""What a distributed optimizer holds back, as the laws speak of it: one vector."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def held(optimizer: Any, what: str = "residual") -> np.ndarray:
    """Return a copy of the residual, or the velocity, of all parameters in their order.

    What rounding took of sums that this rank owns counts as residual.
    """
    by_name, _ = optimizer._reducer.take_state_out()
    parts = [what, "owner_error"] if what == "residual" else [what]
    return np.concatenate(
        [
            sum(
                by_name.get(name, {}).get(part, torch.zeros_like(parameter.detach())).numpy()
                for part in parts
            ).reshape(-1)
            for parameter, name in optimizer._parameter_names.items()
        ]
    )
