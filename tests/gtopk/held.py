"""A distributed optimizer's residual as one vector, for checks of the laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def held(optimizer: Any, what: str = "residual") -> np.ndarray:
    """Return a copy of the residual, or the velocity, of all parameters in their order.

    The residual includes rounding errors of sums that this rank owns.
    """
    by_name, _ = optimizer._reducer.export_state()
    keys = [what, "owner_error"] if what == "residual" else [what]

    def of(name: str, parameter: torch.Tensor) -> np.ndarray:
        parts = by_name.get(name, {})
        arrays = [parts[each].numpy() for each in keys if each in parts]
        total = sum(arrays) if arrays else parameter.detach().new_zeros(parameter.shape).numpy()
        return np.asarray(total).reshape(-1)

    return np.concatenate(
        [of(name, parameter) for parameter, name in optimizer._parameter_names.items()]
    )
