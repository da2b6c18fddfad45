"""What travels in place of the gradients: sparse methods as frozen records, Horovod's classes."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

import torch


class Compressor:
    """Horovod's interface: tensors that are reduced in another form, entry by entry.

    Subclass it and pass the class itself. Only linear forms are right: sums of compressed tensors
    must be the compressed sums.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to reduce, and a context for `decompress`."""
        raise TypeError("compress of this Compressor is not defined; subclass it")

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the reduced tensor in its first form."""
        raise TypeError("decompress of this Compressor is not defined; subclass it")


class NoneCompressor(Compressor):
    """Send gradients as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Send floating-point gradients as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.half() if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


@dataclass(frozen=True)
class SparseCompression:
    """Send the k = density * n entries of largest magnitude; keep the rest in a residual."""

    # Lower: less traffic, slower convergence per step. Under about 500 entries left, accuracy
    # suffers: small models want 0.01 and more.
    density: float = 0.001
    # 0: the wrapped optimizer's momentum works on the reduced gradient. Above 0: momentum with this
    # factor is taken before selection, on each rank (Lin et al. 2018, section 3.1 and 3.3: momentum
    # correction with factor masking), and the wrapped optimizer's momentum must be 0.
    momentum_correction: float = 0.0

    algorithm: ClassVar[str]

    def __post_init__(self) -> None:
        for name in ("density", "momentum_correction"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{name} must be a number, got {value!r}")
        if not 0.0 < self.density <= 1.0:
            raise ValueError(f"density must lie in (0, 1], got {self.density}")
        if not 0.0 <= self.momentum_correction < 1.0:
            raise ValueError(
                f"momentum_correction must lie in [0, 1), got {self.momentum_correction}"
            )

    def selected(self, length: int) -> int:
        """Return k for a vector of `length` elements: at least 1."""
        return max(1, round(length * self.density))


@dataclass(frozen=True)
class TopK(SparseCompression):
    """Every rank's k entries to every rank; updates up to k times world size coordinates."""

    algorithm: ClassVar[str] = "topk-allgather"


@dataclass(frozen=True)
class GTopK(SparseCompression):
    """Global top-k: the ranks agree on one set of k entries (Shi et al. 2019)."""

    algorithm: ClassVar[str] = "gtopk"


class Compression:
    """The choices: `Compression.none`, `.fp16`, `.topk(density=...)`, `.gtopk(density=...)`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    topk = TopK
    gtopk = GTopK
