"""The forms in which a blocking collective reduces tensors: Horovod's compressors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...compression import Compressor


def compress(
    compression: type[Compressor], tensors: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]]:
    """Return the tensors as they are reduced, and the function that returns them to their form.

    Raises TypeError for a compression that is none of Horovod's kind.
    """
    if not hasattr(compression, "compress"):
        raise TypeError(
            f"compression must be Compression.none, .fp16, .bf16 or a Compressor class, got "
            f"{compression!r}: top-k needs the residual that DistributedOptimizer keeps"
        )
    pairs = [compression.compress(tensor) for tensor in tensors]

    def decompress(reduced: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        contexts = (context for _, context in pairs)
        return [compression.decompress(*pair) for pair in zip(reduced, contexts, strict=True)]

    return [compressed for compressed, _ in pairs], decompress
