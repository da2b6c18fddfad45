"""The Adasum optimizer: every rank steps on its own, then the parameter changes are combined.

    gradients of this rank -> step of the wrapped optimizer -> delta = after - before
        -> compress -> Adasum over the ranks, tensor by tensor -> decompress -> before + delta

So momentum and other state follow this rank's own gradients and differ between ranks; parameters
do not. Adasum averages parallel deltas and adds orthogonal ones, so the learning rate is that of a
single rank, whatever the number of ranks (Maleki et al. 2021).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from collectives.algorithms import adasum
from collectives.transports import Transport

from ..compression import Compression, Compressor
from ..exchange.buckets.arrays import await_copies, begin_copy, flattened, from_array, view_dense
from ..exchange.buckets.buckets import are_finite
from ..exchange.buckets.parameters import (
    describe_parameter,
    name_parameters,
    refuse_complex,
    require_trained,
    with_gradients,
)
from ..exchange.exchange import Exchanged, Progress
from ..exchange.residual_state import nonzero_names, norm_of
from ..reduce_ops import Adasum
from ..runtime.coordinator import Work
from ..runtime.world import world
from ..runtime.world.membership import World
from ..telemetry.run_record import recorder_of
from ..telemetry.step_report import RecordedStep, StepReport, report
from .expected_step import ExpectedStep
from .gradient_checks import SharedParameters
from .hooks import BackwardHooks
from .peers import Peers
from .step_checks import ReplicaCheck, SkippedSteps
from .wrapped import checkpoint as optimizer_checkpoint
from .wrapped.wrapping import Wrapping, wrap


class _Fused(NamedTuple):
    """The compressed tensors of one dtype: their places in the list, and their elements, fused."""

    places: list[int]
    lengths: list[int]
    array: NDArray[Any]


class _DeltaBucket(NamedTuple):
    """All changes of a step as one bucket, for the step's report."""

    elements: int


class Deltas:
    """The changes of a step, compressed and fused by dtype; `allreduce` combines tensor by tensor.

    compressor: the ranks combine its compressed form. Raises ValueError unless that is
        floating-point.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], compressor: type[Compressor]) -> None:
        self._compressor = compressor
        self._compressed = [compressor.compress(tensor) for tensor in tensors]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, (tensor, _) in enumerate(self._compressed):
            by_dtype.setdefault(tensor.dtype, []).append(index)
        others = [str(dtype) for dtype in by_dtype if not dtype.is_floating_point]
        if others:
            raise ValueError(
                f"op=Adasum combines floating-point numbers, but {compressor.__name__} returns "
                f"{', '.join(others)}"
            )
        # One array per dtype, with the lengths: Adasum computes dot products tensor by tensor.
        self._fused = [self._fuse(places) for places in by_dtype.values()]

    def _fuse(self, places: list[int]) -> _Fused:
        tensors = [flattened(self._compressed[place][0]) for place in places]
        copies = [begin_copy(tensor) if tensor.is_cuda else tensor for tensor in tensors]
        await_copies(tensors)
        arrays = [*map(view_dense, copies)]
        return _Fused(places, [array.size for array in arrays], np.concatenate(arrays))

    @property
    def elements(self) -> int:
        """Return the number of compressed values."""
        return sum(fused.array.size for fused in self._fused)

    def allreduce(self, transport: Transport) -> None:
        """Combine the changes over the ranks with Adasum, in place; a collective."""
        for _, lengths, array in self._fused:
            adasum.allreduce(transport, array, lengths)

    def tensors(self) -> list[torch.Tensor]:
        """Return the decompressed tensors: after `allreduce`, bit-identical on every rank."""
        decompressed: list[torch.Tensor] = [tensor for tensor, _ in self._compressed]
        for places, lengths, array in self._fused:
            parts = np.split(array, np.cumsum(lengths)[:-1])
            for index, part in zip(places, parts, strict=True):
                compressed, context = self._compressed[index]
                tensor = from_array(part, compressed)
                decompressed[index] = self._compressor.decompress(tensor, context)
        return decompressed


class _Replicas(NamedTuple):
    """The parameters of all ranks, for `ReplicaCheck`; progress: the steps in this world."""

    names: Mapping[torch.nn.Parameter, str]
    progress: Progress
    peers: Peers


_log = logging.getLogger("gtopk")
_KEY: Final = "adasum"
_FORMAT: Final = 1


class _AdasumOptimizer(Wrapping):
    """The result of `distribute_adasum`: a mixin, which `wrap` combines with the user's class."""

    op = Adasum

    def _distribute(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
        compression: type[Compressor],
        backward_passes_per_step: int,
        max_skipped_steps: int,
    ) -> None:
        self._world = world.current()
        self._parameter_names = name_parameters(self, named_parameters)
        self._compression = compression
        require_trained(self._parameter_names)
        self._hooks = BackwardHooks(self._parameter_names, backward_passes_per_step)
        if self._world.size > 1:
            trained = self._trained()
            self._hooks.watch(trained)
            # One bucket of all: count passes only at its first and last gradient.
            self._hooks.watch_buckets([trained])
        self._shared = SharedParameters(self._parameter_names, self._hooks.set_aside)
        self._enter(self._world)
        self._begun = time.perf_counter()  # start of this step: the end of the last one
        self._recorded = RecordedStep()  # this step; spans: the waits for its operations
        self._select_seconds = 0.0
        self._skipped = SkippedSteps(max_skipped_steps)
        self.last_step: StepReport | None = None

    def _enter(self, here: World) -> None:
        """Enter a world: the first, or the next one after `shutdown` or a failure."""
        self._world = here
        self._name = f"deltas.{here.name_optimizer(self._parameter_names.values())}"
        peers = Peers(here, here.engine, self._name, range(here.size), takes_part=True)
        self._replicas = _Replicas(self._parameter_names, Progress(), peers)
        self._check = ReplicaCheck(self._replicas, None, None)
        self._expected: ExpectedStep | None = None  # before the first exchange
        self._are_finite: bool | None = None  # gradients, on all ranks; None: not agreed yet

    @property
    def skipped_steps(self) -> int:
        """The number of steps skipped because some rank had a non-finite value."""
        return self._skipped.count

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes accumulated before a step."""
        return self._hooks.limit

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes to accumulate before a step."""
        self._hooks.set_limit(passes)

    def _trained(self) -> list[torch.nn.Parameter]:
        """Return the parameters that may have a gradient now, including ones added later."""
        trained = with_gradients(self.param_groups)
        refuse_complex(trained, self._parameter_names)
        return trained

    def synchronize(self) -> None:
        """Agree with all ranks whether gradients are finite; they remain this rank's own.

        If one is not, all become NaN on every rank, so that a GradScaler that checks them next
        skips the step everywhere. `step` calls this, unless it was called before.
        Raises, on every rank alike, HorovodInternalError if the ranks disagree, and
        FloatingPointError if more steps in a row were skipped than `max_skipped_steps`.
        """
        # `step` may repeat this for the same gradients: count one skip. One rank has no hooks.
        is_repeated = self._world.size > 1 and not self._hooks.has_counted
        already_counted = self._are_finite is False and is_repeated
        if (here := world.current()) is not self._world:  # such as after an elastic recovery
            self._enter(here)
        self._hooks.check()
        self._hooks.forget()
        trained = self._trained()
        self._parameter_names.add(self.param_groups)
        # Parameters may have been added, such as those of an unfrozen layer.
        self._hooks.watch(trained if self._world.size > 1 else [])
        entries = [_entries(p.grad) for p in trained if p.grad is not None]
        finite = are_finite(entries)
        all_flags = self._run("finite", lambda transport, all_flags: all_flags, flags=finite)
        self._are_finite = all(all_flags)
        if self._are_finite:
            return
        for part in entries:
            part.fill_(float("nan"))
        if not already_counted:
            ranks = [rank for rank, flags in enumerate(all_flags) if not flags]
            self._note_skip(f"the gradient is not finite on ranks {ranks}")

    def _signature(self) -> list[str]:
        """Return the options, shapes and dtypes that must be equal on all ranks."""
        return [
            f"op=Adasum compression={self._compression.__name__} "
            f"max_skipped_steps={self._skipped.allowed}",
            *(describe_parameter(self._parameter_names[p], p) for p in self._trained()),
        ]

    def _run(self, part: str, work: Work, flags: int = 0) -> Any:
        """Run a part of the step together with the other ranks, and return its result."""
        begun = time.perf_counter()
        operation = self._world.engine.submit(
            f"{self._name}.{part}", self._signature(), work, flags
        )
        result = operation.wait()
        self._recorded.operations[len(self._recorded.operations)] = operation
        self._recorded.spans.append((begun, time.perf_counter()))
        return result

    def skip_synchronize(self) -> NoReturn:
        """Raise AssertionError: Adasum exchanges after the step, not before."""
        raise AssertionError(
            "skip_synchronize() does not apply to op=Adasum, which exchanges the changes of a step "
            "instead of gradients; clip or unscale this rank's gradients before step()"
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the wrapped optimizer on this rank, and combine the changes of all ranks.

        If a rank's gradient or the combined change is not finite, no rank changes any parameter.
        closure: called once, before that, to compute the loss and the gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Also after a skip: the script may have replaced the gradients since.
        if not self._are_finite or world.current() is not self._world:
            self.synchronize()
        finite, self._are_finite = self._are_finite, None
        done = bool(finite) and self._step_together()
        if done:
            self._skipped.end_row()
            self._replicas.progress.steps += 1
        self._report(not done)
        self._world.step += 1
        self._check.await_step(updates=done)
        self._check.after_step(self.state)
        return loss

    @torch.no_grad()
    def _step_together(self) -> bool:
        """Step, and replace the changes with the combined ones; return whether they are finite."""
        if self._world.size == 1:
            self._step_wrapped()
            return True
        parameters = self._trained()
        before = [parameter.clone() for parameter in parameters]
        self._step_wrapped()
        begun = time.perf_counter()
        changes = [p - old for p, old in zip(parameters, before, strict=True)]
        for parameter, old in zip(parameters, before, strict=True):
            parameter.copy_(old)  # parameters change only after the changes are combined
        deltas = Deltas(changes, self._compression)
        computed_at = time.perf_counter()
        self._log_expected_step(deltas)
        self._begun += time.perf_counter() - computed_at  # leave out the time to measure links
        self._run("adasum", lambda transport, all_flags: deltas.allreduce(transport))
        combined_at = time.perf_counter()
        changes = deltas.tensors()
        finite = are_finite(changes)
        # The combined changes are bit-identical, so either all ranks add them or none.
        if finite:
            for parameter, change in zip(parameters, changes, strict=True):
                parameter.add_(change)
        else:
            self._note_skip("the combined change of the parameters is not finite")
        self._select_seconds = computed_at - begun + time.perf_counter() - combined_at
        return finite

    def _log_expected_step(self, deltas: Deltas) -> None:
        """Before the first exchange, let rank 0 log the cost model's advice."""
        if self._expected is None:
            self._expected = ExpectedStep(Compression.none, Progress(), uncovered="op=Adasum")
            self._expected.measure([deltas], self._replicas.peers)

    def _note_skip(self, why: str) -> None:
        warning = "rank %d: step %d is skipped on every rank: %s"
        self._skipped.note_that(self._world.rank, self._world.step, warning, why, why)

    def _report(self, skipped: bool) -> None:
        """Set `last_step`, and start recording the next step."""
        now, recorded, self._recorded = time.perf_counter(), self._recorded, RecordedStep()
        entries = sum(parameter.numel() for parameter in self._trained())
        sent = 0 if skipped else entries
        waited_seconds = sum(ended - begun for begun, ended in recorded.spans)
        agree_seconds = sum(operation.agree_seconds for operation in recorded.operations.values())
        recorded.bucket_exchanges.append(_DeltaBucket(entries))
        recorded.exchanged[0] = Exchanged(
            "adasum",
            selected=sent,
            updated=sent,
            select_seconds=self._select_seconds,
            communicate_seconds=waited_seconds - agree_seconds,
            merge_seconds=0.0,
            finite=not skipped,
            bytes_counted=True,
        )
        exchange_seconds = self._select_seconds + waited_seconds
        self.last_step = report(
            recorded,
            step=self._world.step,
            compute_seconds=now - self._begun - exchange_seconds,
            waits=recorded.spans,
            waited_seconds=exchange_seconds,
            skipped=skipped,
        )
        if (recorder := recorder_of(self._world)) is not None:
            recorder.note_step(self.last_step)
        self._begun, self._select_seconds = now, 0.0

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, and discard all work towards the next step."""
        self._discard_progress()
        super().zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, marked as this rank's own, so that DCP keeps it."""
        return {**super().state_dict(), _KEY: {"format": _FORMAT}}

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load the wrapped optimizer's state, and discard all work towards the next step.

        Warns if the state has residuals: op=Adasum cannot send them, so they are lost.
        """
        optimizer_checkpoint.require_state(state_dict)
        self._discard_progress()
        self._skipped.end_row()
        super().load_state_dict(state_dict, *args, **kwargs)
        parts = state_dict.get(optimizer_checkpoint.KEY, {}).get("held", {}).values()
        if lost := sorted({name for part in parts for name in nonzero_names(part)}):
            _log.warning(
                "rank %d: the state has a residual of %s, which op=Adasum cannot send: they "
                "are lost (their norm: %.3g); take a step with op=Average and Compression.none "
                "first to send them",
                self._world.rank,
                ", ".join(map(repr, lost[:5])) + (", ..." if len(lost) > 5 else ""),
                norm_of(state for part in parts for state in part.values()),
            )

    def _discard_progress(self) -> None:
        self._hooks.forget()
        self._are_finite = None


def _entries(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's values; for a sparse gradient, only the stored ones."""
    return gradient._values() if gradient.is_sparse else gradient.detach()


def distribute_adasum(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
    compression: Any,
    backward_passes_per_step: int,
    max_skipped_steps: int,
) -> Any:
    """Return the wrapped optimizer; Adasum combines its steps over all ranks.

    compression: Compression.none, .fp16, .bf16 or a Compressor class. It compresses deltas, which
        are smaller than gradients by about the learning rate.
    A parameter without a gradient on this rank does not change here, but gets the others' change.
    Raises TypeError for another compression; otherwise as DistributedOptimizer does.
    """
    if not (isinstance(compression, type) and hasattr(compression, "compress")):
        raise TypeError(
            "op=Adasum takes Compression.none, .fp16, .bf16 or a Compressor class, got "
            f"{compression!r}: it combines dense vectors"
        )
    distributed = wrap(optimizer, _AdasumOptimizer)
    distributed._distribute(
        named_parameters, compression, backward_passes_per_step, max_skipped_steps
    )
    return distributed
