"""Import this before torch, so that ranks that compile nothing do not load torch's compiler.

For programs that are also started without `light` on their path.
"""

from __future__ import annotations

import sys

assert "torch" not in sys.modules

import light.sitecustomize  # noqa: E402, F401
