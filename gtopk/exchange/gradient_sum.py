"""GradientSum: a dense sum of gradients on a GPU that torch alone reaches, without CuPy.

Their bucket is worked on on the host then; its vector is not made, and nothing goes there.
"""

from __future__ import annotations

import torch

from collectives.transports import Transport

from .buckets.buckets import Bucket


class GradientSum:
    """The ranks' sum of one step's gradients, side by side until `apply`."""

    def __init__(self, bucket: Bucket, transport: Transport) -> None:
        """Sum weight * gradient over the ranks; a collective."""
        dtype: torch.dtype = getattr(torch, bucket.dtype.name)
        parts = [gradient.reshape(-1).to(dtype) for gradient in bucket.gradients]
        self._flat = torch.cat(parts)
        self._flat.mul_(bucket.weight)
        transport.allreduce(self._flat)  # type: ignore[arg-type]

    def fits(self, bucket: Bucket) -> bool:
        """Tell whether the sum is finite, and will be in the gradients' dtypes."""
        least, most = self._flat.aminmax()
        return bool((-bucket.largest <= least) & (most <= bucket.largest))  # NaN is not

    def apply(self, bucket: Bucket) -> None:
        """Copy the sum, times `scale`, out into the gradients."""
        self._flat.mul_(bucket.scale)
        parts = self._flat.split([gradient.numel() for gradient in bucket.gradients])
        for gradient, part in zip(bucket.gradients, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))


def only_torch_reaches(bucket: Bucket, transport: Transport) -> bool:
    """Tell whether a bucket of the host has its gradients where the transport can sum them."""
    return bucket.device.type == "cpu" and all(map(transport.carries, bucket.gradients))
