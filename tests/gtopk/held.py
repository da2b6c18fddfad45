"""What a distributed optimizer holds back, as the laws speak of it: one vector."""

from __future__ import annotations

from typing import Any

import numpy as np


def held(optimizer: Any, what: str = "residual") -> np.ndarray:
    """Return a copy of the residual, or the velocity, of all parameters in their order."""
    by_name, _ = optimizer._reducer.take_state_out()
    return np.concatenate(
        [
            by_name.get(name, {})
            .get(what, parameter.detach().new_zeros(parameter.shape))
            .numpy()
            .reshape(-1)
            for parameter, name in optimizer._parameter_names.items()
        ]
    )
