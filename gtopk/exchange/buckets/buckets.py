"""Bucket: the gradients of many parameters as one vector.

A sparse method reads the gradients and writes its update in their own memory, parameter by
parameter: a step allocates nothing of the vector's length. A dense one copies them into one buffer,
`flat`, which is made once. Gradients of mixed dtypes, or in another memory order than their
parameters had, also go through `flat`; so do small ones, as one call copies them all.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
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
from .parameters import lack_gradients, lacks_gradient, refuse_complex

_READ_WHERE_THEY_LIE = {
    np.dtype(np.float32): (torch.float32, torch.float16, torch.bfloat16),
    np.dtype(np.float64): (torch.float64,),
}
_SOME = 4096  # elements
_LARGE_BYTES = 64 << 20  # from this size on `clear`, no torch function, is faster
_SMALL = 8192  # elements: below, copying to `flat` and back is faster than looking memory up
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class Bucket:
    """The vector of all gradients, in the order of the parameters and of their elements in memory.

    In a step: `capture_gradients`, read by `addend` or `gather`, write by `scatter_sparse` or
    `scatter`, then `keep_gradients`.

    members:   the parameters; or the tensors in it, side by side, that a single one stands for.
    sizes:     of the members.
    length, dtype: of the vector; float64 when a parameter is float64, float32 otherwise.
    device:    of the work on it: a GPU or the host.
    strides:   of each parameter when the bucket was made; they give the order of its elements.
    weight:    multiplies this step's gradients before anything else.
    share:     the factor of this rank's mean gradient in the sum; 0 where it has no samples.
    scale:     multiplies the update, after everything else.
    gradients: of this step; zeros for one that is missing.
    captured_at: when they were captured, by time.perf_counter.
    on_stream: makes a context, for any thread, on the stream of the captured gradients.
    ready:     the timestamp when they are computed: on a GPU later than when they were captured.
    lacking:   of each parameter, whether it had no gradient of its own when they were captured.
    sparse:    parameters whose gradients are sparse on some rank, and so on all after the exchange.
    largest:   the largest value of an update that is finite in every parameter's dtype.
    Raises ValueError for complex parameters, and when there is no element at all.
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
        if self.length == 0:
            raise ValueError(
                f"there is nothing to train: {len(self.parameters)} parameters hold no values"
            )
        any_double = any(p.dtype == torch.float64 for p in self.parameters)
        self.dtype: np.dtype[Any] = np.dtype(np.float64 if any_double else np.float32)
        self.device = device_of(self.parameters)
        self.strides = strides_of(self.parameters)
        self._dtypes = {p.dtype for p in self.parameters if p.numel()}
        self._largest = min(torch.finfo(dtype).max for dtype in self._dtypes)
        self.weight = self.scale = self.share = 1.0
        self.gradients: list[torch.Tensor] = []
        self.lacking: list[bool] = []
        self.sparse: list[torch.nn.Parameter] = []
        self.captured_at = 0.0
        self.ready = Timestamp(self.device)
        # The gradients' memory, looked up once a step; (None,) where they are to be copied.
        self._gradient_cache: tuple[list[NDArray[Any]] | Located | None] | None = None
        # For a bucket on the host: the GPUs of its gradients, which torch copies.
        gpus = {p.device for p in self.parameters if p.is_cuda}
        self._gpus = sorted(gpus, key=str) if self.device.type == "cpu" else []
        self.on_stream = self._current_stream()

    def capture_gradients(
        self,
        weight: float,
        scale: float = 1.0,
        gradients: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Capture this step's gradients, to be multiplied with `weight` later: no copy is made.

        gradients: in place of the parameters' own, of any dtype.
        Sparse gradients become dense; `keep_gradients` makes them sparse again.
        """
        self.weight, self.scale, self.captured_at = weight, scale, time.perf_counter()
        self.share = weight * scale  # gradients are means of samples, times the scale
        if gradients is None:
            own = [parameter.grad for parameter in self.parameters]
            self.lacking = lack_gradients(own)
            # Sparse and expanded gradients are rare: a cheap first pass, which mostly finds none.
            others = [
                (place, gradient)
                for place, gradient in enumerate(own)
                if gradient is not None and (gradient.is_sparse or 0 in gradient.stride())
            ]
            for place, gradient in others:
                if gradient.is_sparse:
                    self.parameters[place].grad = own[place] = gradient.to_dense()
                elif is_expanded(gradient):  # its elements share memory: an update needs its own
                    self.parameters[place].grad = own[place] = gradient.clone()
            gradients = own
        # For a missing one, zeros that the parameter may keep: the update may need a place.
        self.gradients = [
            torch.zeros_like(p)
            if gradient is None
            # With create_graph=True autograd would refuse, or record, the update that is written
            # into it.
            else (gradient.detach() if gradient.requires_grad else gradient)
            for p, gradient in zip(self.parameters, gradients, strict=True)
        ]
        self._note_captured()

    def capture_zeros(self, scale: float) -> None:
        """Use zeros as gradients, in memory of their own: parameters' gradients stay unchanged.

        scale: the other ranks': all ranks compute by it what the gradients' dtype cannot hold.
        """
        self.weight, self.scale, self.share = 1.0, scale, 0.0
        self.gradients = [torch.zeros_like(p) for p in self.parameters]
        self._note_captured()

    def _note_captured(self) -> None:
        # The caller's: the engine's thread, which reads the gradients, has another one.
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
        """Return a maker of contexts on the streams that are current now."""
        return current_streams(self._gpus) if self._gpus else current_stream(self.device)

    def all_finite(self) -> bool:
        """Tell whether this step's gradients hold neither NaN nor infinity."""
        if not _on_gpu(self.device):
            parts = self.addend()
            return all(map(all_finite, parts if isinstance(parts, list) else [self.flat]))
        # The infinity norm of values that are not all finite is not finite: one number each to
        # read.
        largest = torch._foreach_norm([g for g in self.gradients if g.numel()], math.inf)
        return bool(torch.stack(largest).isfinite().all())  # waits for the GPU once

    def addend(self) -> Gradient:
        """Return the gradients, not multiplied with `weight` yet, for a residual to add."""
        if self._parts is not None:
            return self._parts
        torch._foreach_copy_(self.views, self.gradients)
        return self.flat

    def _gradient_memory(self) -> list[NDArray[Any]] | Located | None:
        """Return the gradients' own memory, on a GPU as addresses; None where it must be copied.

        Work on the stream that they were captured on comes after pending writes to that memory.
        """
        if self.length < _SMALL * len(self.parameters) and not _on_gpu(self.device):
            return None
        dtypes = {gradient.dtype for gradient in self.gradients}
        if len(dtypes) > 1 or dtypes.pop() not in _READ_WHERE_THEY_LIE[self.dtype]:
            return None
        for gradient, stride in zip(self.gradients, self.strides, strict=True):
            if gradient.device != self.device or not _is_ordered(gradient, stride):
                return None
        # The kernels get no empty parts: an empty tensor need not have an address.
        filled = [gradient for gradient in self.gradients if gradient.numel()]
        if _on_gpu(self.device):
            return located(filled)
        return [view_array(gradient.as_strided((gradient.numel(),), (1,))) for gradient in filled]

    def scatter_sparse(self, update: SparseVector) -> None:
        """Replace the gradients by the update's entries, times `scale`, and zeros elsewhere."""
        if self.scale != 1.0:
            scaled = update.values * update.values.dtype.type(self.scale)
            update = SparseVector(update.indices, scaled, update.length)
        if self._parts is not None:
            if isinstance(self._parts, list) and max(p.nbytes for p in self._parts) >= _LARGE_BYTES:
                for part in self._parts:
                    clear(part)
                # `clear` writes behind torch's back, and versions tell changes: to placeholders, to
                # autograd.
                torch.autograd.graph.increment_version(self.gradients)
            else:
                torch._foreach_zero_(self.gradients)
            put_at(self._parts, update)
            return
        self._flat.zero_()
        put_at([self.flat], update)
        torch._foreach_copy_(self.gradients, self.views)

    def fits_sum(self) -> bool:
        """Tell whether the sum in `flat` is finite, also in the gradients' dtypes."""
        # Whatever is finite fits: the kernel tells that in a quicker pass.
        if self.largest == np.finfo(self.dtype).max:
            return bool(all_finite(self.flat))
        least, most = self._flat.aminmax()
        return bool((-self.largest <= least) & (most <= self.largest))  # False for NaN

    def fit(self, update: SparseVector) -> tuple[SparseVector, SparseVector | None]:
        """Return the update as the gradients can hold it, and the rest, None where there is none.

        They cannot hold values beyond `largest`, nor, in 16 bits, rounding errors.
        """
        if self.largest == np.finfo(self.dtype).max and self._dtypes == {_torchs(self.dtype)}:
            return update, None
        values = view_tensor(update.values)  # torch's operators: CuPy's lose subnormal float32
        fitted = values.clamp(-self.largest, self.largest)
        if self._dtypes != {values.dtype}:
            # As `scatter_sparse` will write them, times the scale: the rest is what the gradients
            # will really lack.
            fitted = self._rounded(fitted * self.scale, update.indices) / self.scale
        left = values - fitted
        some = left != 0
        if not bool(some.any()):
            return update, None
        rest = SparseVector(update.indices[view_array(some)], view_array(left[some]), self.length)
        return SparseVector(update.indices, view_array(fitted), self.length), rest

    def _rounded(self, values: torch.Tensor, indices: NDArray[Any]) -> torch.Tensor:
        """Return an update's values as they are in the dtypes of the parameters they are of."""
        if len(self._dtypes) == 1:
            (dtype,) = self._dtypes
            return values.to(dtype).to(values.dtype)
        sizes = torch.tensor([p.numel() for p in self.parameters], device=values.device)
        numbers = view_tensor(indices).long()
        parameter_of = torch.searchsorted(sizes.cumsum(0), numbers, right=True)
        for dtype in self._dtypes:
            are = torch.tensor([p.dtype == dtype for p in self.parameters], device=values.device)
            values = torch.where(are[parameter_of], values.to(dtype).to(values.dtype), values)
        return values

    def gather(self) -> NDArray[Any]:
        """Copy the gradients, times `weight`, side by side into `flat`, and return it."""
        alike = all(gradient.dtype == self._flat.dtype for gradient in self.gradients)
        if self.weight != 1.0 and alike and self.length >= _SMALL * len(self.parameters):
            for view, gradient in zip(self.views, self.gradients, strict=True):
                torch.mul(gradient, self.weight, out=view)  # one pass in place of two
            return self.flat
        torch._foreach_copy_(self.views, self.gradients)
        if self.weight != 1.0:
            self._flat.mul_(self.weight)
        return self.flat

    def rounding_error(self) -> torch.Tensor | None:
        """Return the part of `flat` that gradients in 16 bits cannot hold, [length]; None: none.

        Call it before `scatter`.
        """
        if all(gradient.dtype == self._flat.dtype for gradient in self.gradients):
            return None
        rest = self._flat.clone()
        for part, gradient in zip(self.split(rest), self.gradients, strict=True):
            part.sub_((part * self.scale).to(gradient.dtype).to(part.dtype) / self.scale)
        return rest if bool(rest.any()) else None

    def checksum(self, whole: bool) -> torch.Tensor | None:
        """Return a checksum that tells this step's gradients from changed ones, int64.

        whole: read all values; else some values of the largest gradient, which show a factor that
            all gradients get, as by a GradScaler, whose changes torch does not count.
        None on a GPU, where the host would have to wait: only changes that torch counts show there.
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
        """Copy `flat`, times `scale`, out into the gradients."""
        if self.scale != 1.0:
            self._flat.mul_(self.scale)
        torch._foreach_copy_(self.gradients, self.views)

    @cached_property
    def _flat(self) -> torch.Tensor:
        return zeros(self.length, self.dtype, self.device)

    @cached_property
    def flat(self) -> NDArray[Any]:
        """The vector in one place, [length], on `device`."""
        return view_array(self._flat)

    @cached_property
    def views(self) -> list[torch.Tensor]:
        """The place of each parameter's gradient in `flat`."""
        return self.split(self._flat)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the place of each parameter in a vector like this one, [length]."""
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
        """Give parameters that lacked a gradient the update's, and drop this step's references.

        may_stay_none: places of parameters without a gradient on any rank: where the update is
            zero, the gradient stays None, and the optimizer passes over it, as without gtopk.
        Gradients of parameters in `sparse` become sparse by rows: their optimizer, such as
        SparseAdam, takes only those.
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
        """Make every gradient NaN, so that a GradScaler, too, finds that the step is skipped.

        Drops this step's references to gradients, too.
        """
        for parameter in self.parameters:
            if parameter.grad is not None and not lacks_gradient(parameter):
                parameter.grad.fill_(float("nan"))
        self.release_gradients()

    def release_gradients(self) -> None:
        """Drop references to this step's gradients, so that `zero_grad` frees their memory."""
        self.gradients = []
        self._gradient_cache = None


def strides_of(parameters: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Return the strides of each parameter's dense copy: they give its elements' order."""
    # On the meta device: no memory is taken.
    return [torch.empty_like(p, device="meta").stride() for p in parameters]


def split_like(
    flat: torch.Tensor, parameters: Sequence[torch.Tensor], strides: Sequence[tuple[int, ...]]
) -> list[torch.Tensor]:
    """Return the place of each parameter in a vector, [their elements], in its shape."""
    starts = np.cumsum([0, *(p.numel() for p in parameters)]).tolist()
    return [
        flat.as_strided(p.shape, stride, start)
        for p, stride, start in zip(parameters, strides, starts, strict=False)
    ]


def _on_gpu(device: torch.device) -> bool:
    # Apart, so that tests on a CPU can run what only GPUs do.
    return device.type == "cuda"


def _torchs(dtype: np.dtype[Any]) -> torch.dtype:
    own: torch.dtype = getattr(torch, dtype.name)
    return own


def is_finite(gradient: torch.Tensor) -> bool:
    """Tell whether a dense tensor holds neither NaN nor infinity."""
    if gradient.is_contiguous() and not gradient.is_cuda:
        return all_finite(view_array(gradient))
    return bool(gradient.isfinite().all())


def _checksum(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return two sums of a tensor, int64 [2]; stride: the order of its elements in memory.

    One of its bits, in words of 64, shows changes of a few elements. One of values from all over it
    shows changes of all elements, after which the sum of bits may be the same.
    """
    alike = _is_ordered(tensor, stride)
    flat = tensor.as_strided((tensor.numel(),), (1,)) if alike else tensor.reshape(-1).contiguous()
    in_word = 8 // flat.element_size()
    if flat.storage_offset() % in_word:
        flat = flat.clone()  # a view as words must begin at a multiple of their size
    end = flat.numel() - flat.numel() % in_word
    bits = (
        flat[:end].view(torch.int64).sum() + flat[end:].view(_INTEGERS[flat.element_size()]).sum()
    )
    return torch.stack([bits, _sample_of(flat)])


def _sample_of(flat: torch.Tensor) -> torch.Tensor:
    """Return the bits of a sum of values from all over a tensor, int64."""
    some = flat[:: max(1, flat.numel() // _SOME)].sum()
    return some.double().view(torch.int64)


def is_expanded(tensor: torch.Tensor) -> bool:
    """Tell whether elements share their memory, as after `expand`."""
    # A stride of 0 shares nothing where its dimension has one element.
    return 0 in tensor.stride() and any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _is_ordered(tensor: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """Tell whether a tensor has these strides; dimensions of size 1 do not matter."""
    return tensor.stride() == stride or all(
        here == there
        for size, here, there in zip(tensor.shape, tensor.stride(), stride, strict=True)
        if size != 1
    )


class GradientSum:
    """The ranks' sum of one step's gradients, on a GPU that only torch reaches, without CuPy.

    The bucket would work on the host; its own vector is not made, and no gradient goes to the host.
    """

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
