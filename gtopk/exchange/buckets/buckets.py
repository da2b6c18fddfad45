"""Bucket: the gradients of many parameters as one vector.

A sparse method reads the gradients and writes its update in their own memory, parameter by
parameter: a step allocates no memory of the vector's length. A dense method copies them into one
buffer, `flat`, which is allocated once. Gradients of mixed dtypes, or in a different memory order
than their parameters, also go through `flat`; so do small ones, because one call copies them all.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from collectives.kernels import Gradient, Located, all_finite, clear, put_at
from collectives.transports import Transport
from collectives.vector import SparseVector

from .arrays import (
    Timestamp,
    current_stream,
    current_streams,
    device_of,
    located,
    view_array,
    view_tensor,
    zeros,
)
from .parameters import refuse_complex

_READ_IN_PLACE = {
    np.dtype(np.float32): (torch.float32, torch.float16, torch.bfloat16),
    np.dtype(np.float64): (torch.float64,),
}
_SAMPLED_ELEMENTS = 4096  # elements
_LARGE_BYTES = 64 << 20  # from this size on `clear` is faster than torch's functions
_SMALL = 8192  # elements: below, copying to and from `flat` is faster than looking up addresses
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class Bucket:
    """One vector of all gradients, in the order of the parameters and of their elements in memory.

    In a step: `capture_gradients`, read with `addend` or `gather`, write with `scatter_sparse` or
    `scatter`, then `keep_gradients`.

    members:   the parameters; or the tensors, side by side, that a single parameter stands for.
    sizes:     of the members.
    length, dtype: of the vector; float64 if any parameter is float64, float32 otherwise.
    device:    where the kernels work: a GPU or the host.
    strides:   of each parameter when the bucket was created; they define its element order.
    weight:    multiplies this step's gradients before anything else.
    share:     the weight of this rank's mean gradient in the sum; 0 if it has no samples.
    scale:     multiplies the update, after everything else.
    gradients: of this step; zeros in place of a missing one.
    captured_at: when they were captured, by time.perf_counter.
    on_stream: makes a context, for any thread, on the stream of the captured gradients.
    ready:     the timestamp when they are computed; on a GPU that is after they are captured.
    lacking:   for each parameter, whether it had no gradient of its own when they were captured.
    sparse:    parameters with sparse gradients on some rank, and so after the exchange on all.
    largest:   the largest update value that is finite in every parameter's dtype.
    Raises ValueError for complex parameters.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        members: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.parameters = list(parameters)
        refuse_complex(self.parameters)
        self.members = list(self.parameters if members is None else members)
        self.sizes = [each.numel() for each in self.members]
        self.length = sum(p.numel() for p in self.parameters)
        any_double = any(p.dtype == torch.float64 for p in self.parameters)
        self.dtype: np.dtype[Any] = np.dtype(np.float64 if any_double else np.float32)
        self.device = device_of(self.parameters)
        self.strides = strides_of(self.parameters)
        self._dtypes = {p.dtype for p in self.parameters if p.numel()}
        self._largest = min((torch.finfo(dtype).max for dtype in self._dtypes), default=math.inf)
        self.weight = self.scale = self.share = 1.0
        self.gradients: list[torch.Tensor] = []
        self.lacking: list[bool] = []
        self.sparse: list[torch.nn.Parameter] = []
        self.captured_at = 0.0
        self.ready = Timestamp(self.device)
        # The gradients' memory, looked up once a step; (None,) if they must be copied.
        self._gradient_cache: tuple[list[NDArray[Any]] | Located | None] | None = None
        # For a bucket on the host: the GPUs that hold its gradients; torch copies from them.
        gpus = {p.device for p in self.parameters if p.is_cuda}
        self._gpus = sorted(gpus, key=str) if self.device.type == "cpu" else []
        self.on_stream = self._current_stream()

    def capture_gradients(
        self,
        weight: float,
        scale: float = 1.0,
        gradients: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Capture this step's gradients without a copy; they are multiplied with `weight` later.

        gradients: used instead of the parameters' own; of any dtype.
        Sparse gradients become dense; `keep_gradients` makes them sparse again.
        """
        self.weight, self.scale, self.captured_at = weight, scale, time.perf_counter()
        self.share = weight * scale  # gradients are means over samples, times the scale
        if gradients is None:
            own = [parameter.grad for parameter in self.parameters]
            self.lacking = [gradient is None for gradient in own]
            # Sparse and expanded gradients are rare: a cheap first pass usually finds none.
            special = [
                (place, gradient)
                for place, gradient in enumerate(own)
                if gradient is not None and (gradient.is_sparse or 0 in gradient.stride())
            ]
            for place, gradient in special:
                if gradient.is_sparse:
                    self.parameters[place].grad = own[place] = gradient.to_dense()
                elif is_expanded(gradient):  # shared memory cannot hold an update
                    self.parameters[place].grad = own[place] = gradient.clone()
            gradients = own
        # Zeros for a missing gradient; the parameter may keep them to hold the update.
        self.gradients = [
            torch.zeros_like(p)
            if gradient is None
            # With create_graph=True autograd would refuse or record writing the update into the
            # gradient.
            else (gradient.detach() if gradient.requires_grad else gradient)
            for p, gradient in zip(self.parameters, gradients, strict=True)
        ]
        self._record_capture()

    def capture_zeros(self, scale: float) -> None:
        """Use zeros as gradients, in new memory: the parameters' gradients stay unchanged.

        scale: that of the other ranks, so that all compute the same excess over the gradients'
            dtype.
        """
        self.weight, self.scale, self.share = 1.0, scale, 0.0
        self.gradients = [torch.zeros_like(p) for p in self.parameters]
        self._record_capture()

    def _record_capture(self) -> None:
        # The caller's current stream: the engine's thread, which reads the gradients, has another.
        self.on_stream = self._current_stream()
        with self.on_stream():
            self.ready = Timestamp(self.device)
        self._gradient_cache = None

    @property
    def _parts(self) -> list[NDArray[Any]] | Located | None:
        if self._gradient_cache is None:
            self._gradient_cache = (self._gradient_memory(),)
        return self._gradient_cache[0]

    @property
    def largest(self) -> float:
        """Return the largest value that an update may have, at this step's `scale`."""
        return self._largest / max(abs(self.scale), 1.0)

    def _current_stream(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a context maker for the streams that are current now."""
        return current_streams(self._gpus) if self._gpus else current_stream(self.device)

    def all_finite(self) -> bool:
        """Return whether this step's gradients hold neither NaN nor infinity."""
        if _on_gpu(self.device):
            return are_finite(self.gradients)
        parts = self.addend()
        return all(map(all_finite, parts if isinstance(parts, list) else [self.flat]))

    def addend(self) -> Gradient:
        """Return the gradients, before multiplication with `weight`, to add to a residual."""
        if self._parts is not None:
            return self._parts
        torch._foreach_copy_(self.views, self.gradients)
        return self.flat

    def _gradient_memory(self) -> list[NDArray[Any]] | Located | None:
        """Return the gradients' own memory, on a GPU as addresses; None if it must be copied.

        Work on the stream of the capture runs after pending writes to that memory.
        """
        if self.length < _SMALL * len(self.parameters) and not _on_gpu(self.device):
            return None
        dtypes = {gradient.dtype for gradient in self.gradients}
        if len(dtypes) > 1 or dtypes.pop() not in _READ_IN_PLACE[self.dtype]:
            return None
        for gradient, stride in zip(self.gradients, self.strides, strict=True):
            if gradient.device != self.device or not _is_ordered(gradient, stride):
                return None
        # Skip empty tensors: they need not have an address.
        filled = [gradient for gradient in self.gradients if gradient.numel()]
        if _on_gpu(self.device):
            return located(filled)
        return [view_array(gradient.as_strided((gradient.numel(),), (1,))) for gradient in filled]

    def scatter_sparse(self, update: SparseVector) -> None:
        """Replace the gradients with the update's entries, times `scale`, and zeros elsewhere."""
        if self.scale != 1.0:
            scaled = update.values * update.values.dtype.type(self.scale)
            update = SparseVector(update.indices, scaled, update.length)
        if self._parts is not None:
            if isinstance(self._parts, list) and max(p.nbytes for p in self._parts) >= _LARGE_BYTES:
                for part in self._parts:
                    clear(part)
                # `clear` bypasses torch, but autograd relies on versions to detect changes.
                torch.autograd.graph.increment_version(self.gradients)
            else:
                torch._foreach_zero_(self.gradients)
            put_at(self._parts, update)
            return
        self._flat.zero_()
        put_at([self.flat], update)
        torch._foreach_copy_(self.gradients, self.views)

    def fits_sum(self) -> bool:
        """Return whether the sum in `flat` is finite, also in the gradients' dtypes."""
        # Any finite value fits: the kernel checks that in a faster pass.
        if self.largest == np.finfo(self.dtype).max:
            return bool(all_finite(self.flat))
        least, most = self._flat.aminmax()
        return bool((-self.largest <= least) & (most <= self.largest))  # False for NaN

    def fit(self, update: SparseVector) -> tuple[SparseVector, SparseVector | None]:
        """Return the update as the gradients can hold it, and the rest, or None if none is left.

        The rest has values beyond `largest` and, for 16-bit gradients, rounding errors.
        """
        if self.largest == np.finfo(self.dtype).max and self._dtypes == {_torch_dtype(self.dtype)}:
            return update, None
        values = view_tensor(update.values)  # torch's operators: CuPy's lose subnormal float32
        fitted = values.clamp(-self.largest, self.largest)
        if self._dtypes != {values.dtype}:
            # Round as `scatter_sparse` will, with the scale: the rest is then exactly what the
            # gradients lose.
            fitted = self._rounded(fitted * self.scale, update.indices) / self.scale
        error = values - fitted
        nonzero = error != 0
        if not bool(nonzero.any()):
            return update, None
        indices = update.indices[view_array(nonzero)]
        rest = SparseVector(indices, view_array(error[nonzero]), self.length)
        return SparseVector(update.indices, view_array(fitted), self.length), rest

    def _rounded(self, values: torch.Tensor, indices: NDArray[Any]) -> torch.Tensor:
        """Return an update's values rounded to the dtypes of their parameters."""
        if len(self._dtypes) == 1:
            (dtype,) = self._dtypes
            return values.to(dtype).to(values.dtype)
        sizes = torch.tensor([p.numel() for p in self.parameters], device=values.device)
        numbers = view_tensor(indices).long()
        parameter_of = torch.searchsorted(sizes.cumsum(0), numbers, right=True)
        for dtype in self._dtypes:
            matches = torch.tensor(
                [p.dtype == dtype for p in self.parameters], device=values.device
            )
            values = torch.where(matches[parameter_of], values.to(dtype).to(values.dtype), values)
        return values

    def gather(self) -> NDArray[Any]:
        """Copy the gradients, times `weight`, side by side into `flat`, and return it."""
        same_dtype = all(gradient.dtype == self._flat.dtype for gradient in self.gradients)
        if self.weight != 1.0 and same_dtype and self.length >= _SMALL * len(self.parameters):
            for view, gradient in zip(self.views, self.gradients, strict=True):
                torch.mul(gradient, self.weight, out=view)  # one pass instead of two
            return self.flat
        torch._foreach_copy_(self.views, self.gradients)
        if self.weight != 1.0:
            self._flat.mul_(self.weight)
        return self.flat

    def rounding_error(self) -> torch.Tensor | None:
        """Return the part of `flat` that 16-bit gradients cannot hold, [length], or None.

        Call it before `scatter`.
        """
        if all(gradient.dtype == self._flat.dtype for gradient in self.gradients):
            return None
        rest = self._flat.clone()
        for part, gradient in zip(self.split(rest), self.gradients, strict=True):
            part.sub_((part * self.scale).to(gradient.dtype).to(part.dtype) / self.scale)
        return rest if bool(rest.any()) else None

    def checksum(self, whole: bool) -> torch.Tensor | None:
        """Return a checksum that detects changes of this step's gradients, int64.

        whole: read all values. Otherwise read some values of the largest gradient, which reveal a
            factor applied to all gradients, such as by a GradScaler: torch does not count those.
        Returns None on a GPU, where the host would have to wait: there, only changes that torch
        counts are detected.
        """
        if _on_gpu(self.device):
            return None
        if not whole:
            largest = max(self.gradients, key=torch.Tensor.numel)
            return _sample_of(largest.reshape(-1))
        ordered = zip(self.gradients, self.strides, strict=True)
        marks = [_checksum(gradient, stride) for gradient, stride in ordered if gradient.numel()]
        return torch.stack([mark.to(self.device) for mark in marks])

    def scatter(self) -> None:
        """Copy `flat`, times `scale`, back into the gradients."""
        if self.scale != 1.0:
            self._flat.mul_(self.scale)
        torch._foreach_copy_(self.gradients, self.views)

    @cached_property
    def _flat(self) -> torch.Tensor:
        return zeros(self.length, self.dtype, self.device)

    @cached_property
    def flat(self) -> NDArray[Any]:
        """The vector in contiguous memory, [length], on `device`."""
        return view_array(self._flat)

    @cached_property
    def views(self) -> list[torch.Tensor]:
        """Views into `flat`, one for each parameter's gradient."""
        return self.split(self._flat)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of each parameter's part of a vector like this one, [length]."""
        return split_like(flat, self.parameters, self.strides)

    @contextmanager
    def flat_on_host(self) -> Iterator[NDArray[Any]]:
        """Work on `flat` in pinned host memory, and copy it back."""
        self._pinned.copy_(self._flat)
        yield self._pinned.numpy()
        # No wait: the next copy into `_pinned` comes after this one on the same stream.
        self._flat.copy_(self._pinned, non_blocking=True)

    @cached_property
    def _pinned(self) -> torch.Tensor:
        return torch.empty_like(self._flat, device="cpu", pin_memory=self._flat.is_cuda)

    def keep_gradients(self, may_stay_none: Collection[int]) -> None:
        """Give parameters without a gradient the update's, and drop this step's references.

        may_stay_none: places of parameters without a gradient on any rank: if their update is
            zero, the gradient stays None, and the optimizer skips them, as it would without gtopk.
        Gradients of parameters in `sparse` become sparse by rows, the only kind that optimizers
        such as SparseAdam accept.
        """
        for place in itertools.compress(itertools.count(), self.lacking):
            gradient = self.gradients[place]
            stays = place in may_stay_none and not bool(gradient.any())
            self.parameters[place].grad = None if stays else gradient.detach()
        for parameter in self.sparse:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to_sparse(1)
        self.release_gradients()

    def poison(self) -> None:
        """Make every gradient NaN, so that a GradScaler also sees that the step is skipped.

        Also drops this step's references to gradients.
        """
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.fill_(float("nan"))
        self.release_gradients()

    def release_gradients(self) -> None:
        """Drop references to this step's gradients, so that `zero_grad` frees their memory."""
        self.gradients = []
        self._gradient_cache = None


def strides_of(parameters: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Return the strides of each parameter's dense copy: they define its element order."""
    # On the meta device, which allocates no memory.
    return [torch.empty_like(p, device="meta").stride() for p in parameters]


def split_like(
    flat: torch.Tensor, parameters: Sequence[torch.Tensor], strides: Sequence[tuple[int, ...]]
) -> list[torch.Tensor]:
    """Return views of each parameter's part of a vector, [their elements], in its shape."""
    starts = np.cumsum([0, *(p.numel() for p in parameters)]).tolist()
    return [
        flat.as_strided(p.shape, stride, start)
        for p, stride, start in zip(parameters, strides, starts, strict=False)
    ]


def _on_gpu(device: torch.device) -> bool:
    # A function, so that tests on a CPU can run GPU code paths.
    return device.type == "cuda"


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    torch_dtype: torch.dtype = getattr(torch, dtype.name)
    return torch_dtype


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether no tensor holds NaN or infinity; waits once for all those on GPUs."""
    on_gpu = []
    for tensor in tensors:
        values = tensor.coalesce().values() if tensor.is_sparse else tensor
        if _on_gpu(values.device):
            on_gpu += [values] * (values.numel() > 0)
        elif values.is_contiguous():
            if not all_finite(view_array(values)):
                return False
        elif not values.isfinite().all():
            return False
    if not on_gpu:
        return True
    # The infinity norm is not finite if any value is not: one number per tensor to read.
    norms = torch._foreach_norm(on_gpu, math.inf)
    return bool(torch.stack([norm.to(on_gpu[0].device) for norm in norms]).isfinite().all())


def _checksum(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return two sums of a tensor, int64 [2]; stride: the order of its elements in memory.

    The sum of its bits, in 64-bit words, shows changes of a few elements. The sum of values sampled
    from all over it shows changes of all elements, which may leave the sum of bits unchanged.
    """
    ordered = _is_ordered(tensor, stride)
    flat = (
        tensor.as_strided((tensor.numel(),), (1,)) if ordered else tensor.reshape(-1).contiguous()
    )
    per_word = 8 // flat.element_size()
    if flat.storage_offset() % per_word:
        flat = flat.clone()  # a view as words must start at a multiple of their size
    end = flat.numel() - flat.numel() % per_word
    bits = (
        flat[:end].view(torch.int64).sum() + flat[end:].view(_INTEGERS[flat.element_size()]).sum()
    )
    return torch.stack([bits, _sample_of(flat)])


def _sample_of(flat: torch.Tensor) -> torch.Tensor:
    """Return the bits of a sum of values sampled from all over a tensor, int64."""
    total = flat[:: max(1, flat.numel() // _SAMPLED_ELEMENTS)].sum()
    return total.double().view(torch.int64)


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether elements share memory, as after `expand`."""
    # A stride of 0 shares nothing if its dimension has only one element.
    return 0 in tensor.stride() and any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _is_ordered(tensor: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """Return whether a tensor has these strides; dimensions of size 1 do not matter."""
    return tensor.stride() == stride or all(
        own == expected
        for size, own, expected in zip(tensor.shape, tensor.stride(), stride, strict=True)
        if size != 1
    )


class GradientSum:
    """The ranks' sum of one step's gradients, on a GPU that only torch can use, without CuPy.

    The bucket itself would work on the host. This avoids its vector and any copy to the host.
    """

    def __init__(self, bucket: Bucket, transport: Transport) -> None:
        """Sum weight * gradient over the ranks; a collective."""
        dtype: torch.dtype = getattr(torch, bucket.dtype.name)
        parts = [gradient.reshape(-1).to(dtype) for gradient in bucket.gradients]
        self._flat = torch.cat(parts)
        self._flat.mul_(bucket.weight)
        transport.allreduce(self._flat)  # type: ignore[arg-type]

    def fits(self, bucket: Bucket) -> bool:
        """Return whether the sum is finite, also in the gradients' dtypes."""
        least, most = self._flat.aminmax()
        return bool((-bucket.largest <= least) & (most <= bucket.largest))  # False for NaN

    def apply(self, bucket: Bucket) -> None:
        """Copy the sum, times `scale`, back into the gradients."""
        self._flat.mul_(bucket.scale)
        parts = self._flat.split([gradient.numel() for gradient in bucket.gradients])
        for gradient, part in zip(bucket.gradients, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))


def only_torch_reaches(bucket: Bucket, transport: Transport) -> bool:
    """Return whether a bucket works on the host and the transport can sum gradients in place."""
    return bucket.device.type == "cpu" and all(map(transport.carries, bucket.gradients))
