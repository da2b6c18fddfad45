"""The kinds of transport whose ranks may be threads of a test, and what they send."""

from __future__ import annotations

import numpy as np
import pytest

MESSAGE = np.arange(10, dtype=np.uint8)
every_kind = pytest.mark.parametrize("kind", ["local", "torch.distributed", "horovod"])
