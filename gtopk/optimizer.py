"""DistributedOptimizer: the wrapped optimizer, stepping with what all ranks agreed on."""

from __future__ import annotations

import logging
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

import torch

from collectives.errors import MismatchError
from collectives.transports import Transport

from . import world
from .agreement import describe_missing, gather_words
from .buckets import Bucket
from .compression import Compression, ErrorFeedback
from .exchange import Exchanged, open_exchange
from .parameters import name_parameters
from .reductions import NAMES, Average, Sum
from .samples import VOTE_BITS, Samples
from .telemetry import StepReport

_log = logging.getLogger("gtopk")
# The vote's lowest bit; above it come a hash of the missing gradients, and the samples.
_NOT_FINITE: Final = 1
_MISSING: Final = (1 << VOTE_BITS) - 1 - _NOT_FINITE


class _DistributedOptimizer(torch.optim.Optimizer):
    """What is mixed into the class of the wrapped optimizer."""

    _wrapped: torch.optim.Optimizer

    def _distribute(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
        compression: Any,
        backward_passes_per_step: int,
        op: int,
        missing_gradients: Literal["error", "zeros"],
    ) -> None:
        self._world = world.current()
        self._parameter_names = name_parameters(self, named_parameters)
        self._compression = compression
        self.op = op
        self.missing_gradients = missing_gradients
        self.samples = Samples()
        trained = [p for p in self._parameter_names if p.requires_grad]
        if not trained:
            raise ValueError("DistributedOptimizer needs a parameter that requires a gradient")
        self._bucket = Bucket(trained)
        self._names = [self._parameter_names[p] for p in trained]
        self._exchange = open_exchange(
            self._bucket, compression, backward_seconds=lambda: self._backward_seconds
        )
        # One rank's optimizers are told apart by their order of construction.
        self._world.optimizers += 1
        self._operation = f"gradients.{self._world.optimizers}"
        self._parameter_facts = [
            f"parameter '{name}' {list(p.shape)} {p.dtype}"
            + ("" if p.is_contiguous() else f" of strides {list(stride)}")
            for name, p, stride in zip(self._names, trained, self._bucket.strides, strict=True)
        ]
        self._passes = dict.fromkeys(trained, 0)
        self._backward_began: float | None = None
        self._backward_seconds = 0.0  # of the last step, from its first gradient to its last
        self.set_backward_passes_per_step(backward_passes_per_step)
        if self._world.size > 1:
            # Weakly: a parameter outlives its optimizers, and their hooks must not count on.
            count_pass = weakref.WeakMethod(self._count_pass)

            def hook(parameter: torch.nn.Parameter) -> None:
                if (count := count_pass()) is not None:
                    count(parameter)

            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(hook)
        self._should_synchronize = True
        self._synchronized = False
        self._skip = False
        self._exchange_ended: float | None = None
        self.skipped_steps = 0
        self.last_step: StepReport | None = None

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes add up before a step."""
        if passes < 1:
            raise ValueError(f"backward_passes_per_step must be at least 1, got {passes}")
        self.backward_passes_per_step = passes

    def set_num_samples(
        self, samples: int | None, loss_reduction: Literal["mean", "sum"] = "mean"
    ) -> None:
        """Say how many samples (or tokens) this rank's gradients come from, until said otherwise.

        The update is then that of one mean over the samples of all ranks: a mean's gradient weighs
        samples / total, a sum's 1 / total, and that of no samples nothing, whatever it is.
        None: every rank weighs alike. Where some ranks only say a number, the step is an error.
        Raises ValueError for a negative number, or with op=Sum.
        """
        if samples is not None and self.op != Average:
            raise ValueError("set_num_samples weights an average: use op=Average")
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', got {loss_reduction!r}")
        self.samples.set(samples, summed=loss_reduction == "sum")

    def _facts(self) -> list[str]:
        """Return what must be equal on all ranks in the next step."""
        return [
            f"op={NAMES[self.op]}",
            self._exchange.facts,
            f"missing_gradients={self.missing_gradients!r}",
            self.samples.facts,
            *self._parameter_facts,
        ]

    def _count_pass(self, parameter: torch.nn.Parameter) -> None:
        now = time.perf_counter()
        if self._backward_began is None:
            self._backward_began = now
        self._backward_seconds = now - self._backward_began
        passes = self._passes[parameter] = self._passes[parameter] + 1
        if passes > self.backward_passes_per_step:
            raise AssertionError(
                f"the gradient of '{self._parameter_names[parameter]}' was computed {passes} times "
                "before a call to step(); increase backward_passes_per_step to accumulate "
                "gradients locally"
            )

    def _forget_passes(self) -> None:
        self._passes = dict.fromkeys(self._passes, 0)
        self._backward_began = None

    def synchronize(self) -> None:
        """Replace every gradient by the agreed update.

        When a gradient was not finite on any rank, all ranks skip: the residuals stay as they were,
        the gradients become NaN on every rank, and `step` applies nothing.
        Raises HorovodInternalError, on every rank alike, when the ranks disagree.
        """
        begun = time.perf_counter()
        compute_seconds = begun - self._exchange_ended if self._exchange_ended else 0.0
        self._forget_passes()  # also where this fails: the next step counts
        self._check_gradients()
        missing = [
            name
            for name, parameter in zip(self._names, self._bucket.parameters, strict=True)
            if parameter.grad is None
        ]
        samples = self.samples
        if samples.count == 0:
            torch._foreach_zero_([p.grad for p in self._bucket.parameters if p.grad is not None])
        self._bucket.take(1.0 / self._world.size if self.op == Average else 1.0)
        finite = self._bucket.all_finite()
        missing_everywhere = True

        def work(transport: Transport, votes: list[int]) -> Exchanged | None:
            nonlocal missing_everywhere
            missing_everywhere = len({vote & _MISSING for vote in votes}) == 1
            if self.missing_gradients == "error" and not missing_everywhere:
                raise MismatchError(describe_missing(gather_words(transport, missing)))
            not_finite = [rank for rank, vote in enumerate(votes) if vote & _NOT_FINITE]
            if not_finite:
                self._report_skip(transport, not_finite)
                return None
            if samples.count is not None:
                self._bucket.weight = samples.weight(votes)
            with self._bucket.on_stream():
                return self._exchange(self._bucket, transport)

        operation = self._world.engine.submit(
            self._operation,
            self._facts(),
            work,
            vote=(0 if finite else _NOT_FINITE)
            | zlib.crc32("\n".join(missing).encode()) << 1
            | samples.vote,
        )
        exchanged: Exchanged | None = operation.wait()
        self._skip = exchanged is None or not exchanged.finite
        if self._skip:
            self.skipped_steps += 1
            self._bucket.poison()
            if exchanged is not None:
                _log.warning(
                    "rank %d: step %d is skipped on every rank: the sum of finite gradients is "
                    "not finite",
                    self._world.rank,
                    self._world.step,
                )
        else:
            self._bucket.keep(missing_everywhere)
        self._synchronized = True
        self._exchange_ended = time.perf_counter()
        communicate_seconds = operation.agree_seconds
        if exchanged is not None:
            communicate_seconds += exchanged.communicate_seconds
        elsewhere = communicate_seconds + operation.queue_seconds
        self.last_step = StepReport(
            step=self._world.step,
            algorithm=exchanged.algorithm if exchanged else "",
            compute_seconds=compute_seconds,
            select_seconds=self._exchange_ended - begun - elsewhere,
            communicate_seconds=communicate_seconds,
            merge_seconds=exchanged.merge_seconds if exchanged else 0.0,
            exchange_seconds=exchanged.seconds if exchanged else 0.0,
            predicted_seconds=exchanged.predicted_seconds if exchanged else None,
            sent_bytes=operation.traffic.sent_bytes,
            sent_messages=operation.traffic.sent_messages,
            bytes_counted=exchanged.bytes_counted if exchanged else True,
            selected=exchanged.selected if exchanged else 0,
            updated=exchanged.updated if exchanged else 0,
            skipped=self._skip,
        )

    def _check_gradients(self) -> None:
        """Raise ValueError for gradients that would not be exchanged, or not as they are."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                name = self._parameter_names.get(parameter, "without a name")
                if parameter not in self._passes:
                    raise ValueError(
                        f"parameter '{name}' {list(parameter.shape)} has a gradient, but was "
                        "frozen or not there when DistributedOptimizer was made; make it anew"
                    )
                if parameter.grad.is_sparse:
                    raise ValueError(
                        f"the gradient of '{name}' is sparse (COO), and gradients are exchanged "
                        "dense; use sparse=False in its layer"
                    )

    def _report_skip(self, transport: Transport, not_finite: list[int]) -> None:
        """Warn, on every rank, of the ranks and parameters whose gradients are not finite."""
        culprits = gather_words(transport, self._not_finite())
        where = "; ".join(
            f"rank {rank}: {', '.join(map(repr, culprits[rank][:3]))}" for rank in not_finite
        )
        _log.warning(
            "rank %d: step %d is skipped on every rank, residuals untouched: the gradient is "
            "not finite on %s",
            transport.rank,
            self._world.step,
            where,
        )

    def _not_finite(self) -> list[str]:
        """Return the names of the parameters whose gradient holds NaN or infinity here."""
        return [
            name
            for name, gradient in zip(self._names, self._bucket.gradients, strict=True)
            if not bool(torch.isfinite(gradient).all())
        ]

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` apply the gradients as they are: after `synchronize()` and, say, clipping."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize, then step the wrapped optimizer with the agreed update.

        closure: called once, before synchronizing, to compute the loss and the gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): the gradients are exchanged twice. Use\n"
                    "    optimizer.synchronize()\n"
                    "    with optimizer.skip_synchronize():\n"
                    "        optimizer.step()",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        if not self._skip:
            super().step()
            self._wrapped._opt_called = True  # type: ignore[attr-defined]  # schedulers made before
        self._skip = False
        self._world.step += 1
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; what was computed towards the next step is forgotten."""
        self._forget_passes()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state, and forget what was done towards the next step.

        The parameter groups stay the same objects: schedulers made before wrapping hold them.
        """
        self._synchronized = self._skip = False
        self._forget_passes()
        groups = self.param_groups
        super().load_state_dict(state_dict)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        self.param_groups = groups


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    *,
    missing_gradients: Literal["error", "zeros"] = "error",
) -> Any:
    """Return the optimizer, its `step` reduced over all ranks.

    The result is of a class derived from the optimizer's own, and shares its parameter groups and
    state. Every rank must make its distributed optimizers in the same order, and step them alike.

    named_parameters: pairs of name and parameter, usually model.named_parameters().
    compression: Compression.none, .fp16, .topk(density=...), .gtopk(density=...), .auto(...), or a
        Compressor class. Top-k methods weight by 1/world size before they select (op=Average), keep
        what was not sent in a residual, and step with the agreed sparse update.
    backward_passes_per_step: how many backward passes add up before a step.
    op: Average or Sum.
    gradient_predivide_factor: accepted for Horovod's scripts. The weight is always applied before
        the sum, so there is no overflow left to avoid with it.
    missing_gradients: what it means when a parameter has a gradient on some ranks only: an error
        on all of them, or zeros. One that has none on any rank is passed over, as without gtopk.
    Raises ValueError for an argument out of its range, names that are missing or double, a
    momentum that would be taken twice, LBFGS; TypeError for another kind of compression.
    """
    if op not in (Average, Sum):
        raise ValueError(f"op must be Average or Sum, got {NAMES.get(op, op)}")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor is for op=Average only")
    if gradient_predivide_factor <= 0:
        raise ValueError(
            f"gradient_predivide_factor must be above 0, got {gradient_predivide_factor}"
        )
    if missing_gradients not in ("error", "zeros"):
        raise ValueError(f"missing_gradients must be 'error' or 'zeros', got {missing_gradients!r}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates its closure many times a step; use another optimizer")
    if isinstance(optimizer, _DistributedOptimizer):
        raise ValueError("the optimizer is distributed already; wrap the plain one")
    feedback = isinstance(compression, ErrorFeedback)
    correction = compression.momentum_correction if feedback else 0.0
    momentum = max(float(group.get("momentum", 0.0)) for group in optimizer.param_groups)
    if correction and momentum:
        raise ValueError(
            f"momentum_correction={correction} takes the momentum before selection: wrap an "
            f"optimizer with momentum=0, not {momentum}"
        )
    if correction and any("betas" in group for group in optimizer.param_groups):
        raise ValueError(
            f"momentum_correction={correction} is for SGD; {type(optimizer).__name__} has a "
            "momentum of its own: leave momentum_correction at 0"
        )
    kind = type(optimizer)
    distributed: Any = object.__new__(type(kind.__name__, (_DistributedOptimizer, kind), {}))
    distributed.__dict__.update(optimizer.__dict__)
    distributed._wrapped = optimizer
    # A scheduler that was made before hangs its own step on the instance; ours comes first.
    distributed.__dict__.pop("step", None)
    distributed._distribute(
        named_parameters, compression, backward_passes_per_step, op, missing_gradients
    )
    return distributed
