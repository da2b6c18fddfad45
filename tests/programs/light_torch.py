"""Import this before torch: ranks that compile nothing need not load what torch's compiler needs.

For programs that are also started without `light` on their path.
"""

from __future__ import annotations

import sys

assert "torch" not in sys.modules

import light.sitecustomize  # noqa: E402, F401
