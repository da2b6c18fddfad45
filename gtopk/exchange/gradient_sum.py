"""GradientSum: a dense sum of gradients on a GPU that only torch reaches, as without CuPy.

Their bucket would work on the host; here its vector is not made, and no gradient goes to the host.
"""

from __future__ import annotations

import torch

from collectives.transports import Transport

from .buckets.buckets import Bucket


class GradientSum:
    """The ranks' sum of one step's gradients, as one vector until `apply`."""

    def __init__(self, bucket: Bucket, transport: Transport) -> None:
        """Sum weight * gradient over the ranks; a collective."""
        dtype: torch.dtype = getattr(torch, bucket.dtype.name)
        parts = [gradient.reshape(-1).to(dtype) for gradient in bucket.gradients]
        self._flat = torch.cat(parts)
        self._flat.mul_(bucket.weight)
        transport.allreduce(self._flat)  # type: ignore[arg-type]

    def fits(self, bucket: Bucket) -> bool:
        """Tell whether the sum is finite, also in the gradients' dtypes."""
        least, most = self._flat.aminmax()
        return bool((-bucket.largest <= least) & (most <= bucket.largest))  # False for NaN

    def apply(self, bucket: Bucket) -> None:
        """Copy the sum, times `scale`, out into the gradients."""
        self._flat.mul_(bucket.scale)
        parts = self._flat.split([gradient.numel() for gradient in bucket.gradients])
        for gradient, part in zip(bucket.gradients, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))


def only_torch_reaches(bucket: Bucket, transport: Transport) -> bool:
    """Tell whether a bucket works on the host, and the transport can sum its gradients in place."""
    return bucket.device.type == "cpu" and all(map(transport.carries, bucket.gradients))
