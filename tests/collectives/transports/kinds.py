"""The kinds of transport that run with ranks as threads, and their messages."""

from __future__ import annotations

import numpy as np
import pytest

MESSAGE = np.arange(10, dtype=np.uint8)
every_kind = pytest.mark.parametrize("kind", ["local", "torch.distributed", "horovod"])
