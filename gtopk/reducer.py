"""Reducer: an optimizer's gradients become what all ranks agreed on, while backward goes on.

first step   nothing is known of the order of gradients: all ranks plan, then exchange
later        a lane is submitted when its gradients are complete, the last by `reduce`
any time     a rank has a gradient that belongs to no lane (a layer was added or unfrozen, an
             embedding became sparse): the round is void, all ranks plan anew and exchange
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from collectives.transports import Transport

from . import world
from .agreement import gather_words
from .bucket_plan import ONE_BUCKET, Part, Sizes, arrange, sizes_for
from .compression import Automatic, NoneCompressor, SparseCompression
from .engine import Work
from .exchange import DenseExchange, Progress, open_residual
from .hooks import BackwardHooks
from .lanes import Lane, open_lane
from .optimizer_options import Options
from .reductions import Average
from .residual_state import Held, put_in, take_out
from .rounds import AnyLane, Round
from .samples import Samples
from .sparse_gradients import SparseGradientLane
from .world import World

_log = logging.getLogger("gtopk")


class Reducer:
    """Reduces the gradients of an optimizer's parameters.

    name:     of the operations: every rank's optimizer of these parameters has the same.
    names:    of all parameters; those that come later are added.
    progress: what exchanges go by; its steps are counted by whoever applies the rounds.
    lanes:    in the order in which backward completes them; none before the first step.
    scaler:   the GradScaler that the gradients are scaled by, where there is one.
    samples:  that this rank's gradients come from; where nobody says, op weighs them.
    ranks:    of the world that reduce together, in order; rank: this one's place among them.
    takes_part: whether this rank is one of them: it steps by itself otherwise.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        names: dict[torch.nn.Parameter, str],
        options: Options,
        here: World,
        scaler: Any,
    ) -> None:
        self.names = names
        self.options = options
        self.progress = Progress()
        self.lanes: list[AnyLane] = []
        self.scaler = scaler
        self.samples = Samples()
        self.overlaps = options.overlap and options.local_clip_norm is None
        self._param_groups = param_groups
        self._lane_of: dict[torch.nn.Parameter, int] = {}
        self._awaited: list[set[torch.nn.Parameter]] = []
        self._facts = ""
        self._round: Round | None = None
        self._held: dict[str, Held] = {}  # loaded, and not in a lane yet
        self._wanted: list[dict[str, Any]] | None = None  # records loaded with it
        self.hooks = BackwardHooks(names, on_complete=weakref.WeakMethod(self._complete))
        self.enter(here)

    def enter(self, here: World) -> None:
        """Take part in a world: the first, or the next one after `shutdown`, or a failure.

        What this rank held back stays; the ranks plan anew.
        """
        round, self._round = self._round, None
        if round is not None:
            round.drop()
        if self.lanes:
            self._held, self._wanted = self.take_state_out()
            self.lanes, self._lane_of = [], {}
        self.name = f"gradients.{here.name_optimizer(self.names.values())}"
        self._world = here
        self.takes_part = bool(self.options.process_set.included())
        self.ranks: Sequence[int] = [here.rank]
        self._engine = here.engine
        if self.takes_part:
            members = self.options.process_set.members
            self.ranks, self._engine = members.ranks, self.options.process_set.engine
        self._size, self.rank = len(self.ranks), self.ranks.index(here.rank)
        if self._size > 1:
            self.hooks.watch(self.trained())

    def trained(self) -> list[torch.nn.Parameter]:
        """Return the parameters that may have a gradient, in the optimizer's order."""
        return [p for group in self._param_groups for p in group["params"] if p.requires_grad]

    def reduce(self) -> Round:
        """Exchange all gradients; the round that counts is to be applied, or skipped.

        Raises HorovodInternalError, on every rank alike, when the ranks disagree.
        """
        if self.hooks.order:
            self.progress.backward_seconds = self.hooks.seconds
        round, self._round = self._round, None
        order = self.hooks.order
        self.hooks.forget()  # also where this fails: the next step counts
        if round is not None and round.samples != self.samples:  # said after backward
            round.invalidate()
        self._make_dense()
        if not self.lanes:
            self._plan(order)
        while True:
            round = round or self._open()
            try:
                round.finish(unplanned=self._has_unplanned())
            finally:
                self._await_all()
            if not round.void:
                return round
            round.drop()
            if round.changed:
                self._stop_overlapping(
                    "gradients are changed or dropped, or their samples told, after backward()"
                )
            if round.unplanned:
                self._plan(order)
            round = None

    def drop(self) -> None:
        """Forget what was computed towards the next step.

        A round that has begun goes on until `reduce`: the other ranks may be in it. By then other
        gradients will be there, so that it will be void.
        """
        self.hooks.forget()
        self._await_all()

    def in_flight(self) -> dict[torch.nn.Parameter, Any]:
        """Return the operations on their way, by parameter."""
        if self._round is None:
            return {}
        return {
            parameter: operation
            for index, operation in self._round.operations.items()
            for parameter in self.lanes[index].parameters
        }

    def run_on_all(self, what: str, facts: Sequence[str], work: Work) -> Any:
        """Run something else that concerns these parameters on all ranks together."""
        return self._engine.submit(f"{self.name}.{what}", facts, work).wait()

    def take_state_out(self) -> tuple[dict[str, Held], list[dict[str, Any]]]:
        """Return what was held back of each parameter after the last step, and lanes' records."""
        if not self.lanes:
            return self._held, self._wanted or []
        if self._round is not None:
            self._round.settle()
        return take_out(self.lanes), [lane.record() for lane in self.lanes]

    def put_state_in(self, held: Mapping[str, Held], lanes: list[dict[str, Any]]) -> None:
        """Hold this back from now on; before the first step, make lanes like these, too."""
        if self._round is not None:
            self._round.invalidate()
        if self.lanes:  # other ranks may load nothing: the plan stays theirs
            put_in(self.lanes, held)
        else:
            self._held, self._wanted = dict(held), lanes or None

    # ---- while backward goes on

    def _complete(self, parameter: torch.nn.Parameter) -> None:
        index = self._lane_of.get(parameter)
        if index is None or not self.overlaps or not self._is_here():
            return
        if self.samples.count == 0:
            return  # what weighs nothing is overwritten; not before it is sure that it does
        self._awaited[index].discard(parameter)
        if self._awaited[index] or index == len(self.lanes) - 1:
            return
        if self._round is not None and index in self._round.operations:
            return
        self._make_dense()
        if self._round is None:
            self._round = self._open()
        self._round.submit_early(index)

    def _is_here(self) -> bool:
        """Tell whether this is still the world that was entered; `reduce` enters another."""
        return world.is_initialized() and world.current() is self._world

    def _await_all(self) -> None:
        self._awaited = [set(lane.parameters) for lane in self.lanes]

    def _stop_overlapping(self, why: str) -> None:
        if self.overlaps:
            self.overlaps = False
            _log.info(
                "rank %d: %s: from now on %s are exchanged after backward, without overlap; "
                "change them between synchronize() and step() to have it back",
                self.ranks[self.rank],
                why,
                self.name,
            )

    def _make_dense(self) -> None:
        if self.options.sparse_as_dense:
            for parameter in self.trained():
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()

    # ---- weights

    def _open(self) -> Round:
        alike = self.samples.count is None and self.options.op == Average
        weight = 1.0 / self._size if alike else 1.0
        scale = self.options.gradient_predivide_factor * self.loss_scale()
        return Round(
            self.lanes,
            self._engine,
            self._facts,
            self.samples,
            missing_is_zero=self.options.missing_gradients == "zeros",
            weight=weight * self._local_clip() / scale,
            scale=scale,
        )

    def loss_scale(self) -> float:
        """Return what the gradients are multiplied with: residuals are kept without it."""
        if self.scaler is None or not self.scaler.is_enabled():
            return 1.0
        return float(self.scaler.get_scale())

    def _local_clip(self) -> float:
        """Return the factor that shortens this rank's gradient to its share of the norm allowed.

        The share is 1/sqrt(ranks): sums of as many independent gradients have the norm allowed
        (Lin et al. 2018, section 3.2).
        """
        allowed = self.options.local_clip_norm
        if allowed is None:
            return 1.0
        gradients = [p.grad for p in self.trained() if p.grad is not None]
        parts = [g._values() if g.is_sparse else g for g in gradients]
        if not parts:
            return 1.0
        norms = torch.stack([norm.double().cpu() for norm in torch._foreach_norm(parts)])
        samples = (self.samples.count or 1) if self.samples.summed else 1
        norm = float(norms.norm()) / self.loss_scale() / samples
        share = allowed / math.sqrt(self._size)
        return min(1.0, share / norm) if 0.0 < norm < math.inf else 1.0

    # ---- the plan

    def _has_unplanned(self) -> bool:
        for parameter in self.trained():
            if parameter.grad is None:
                continue
            index = self._lane_of.get(parameter)
            if index is None:
                return True
            if parameter.grad.is_sparse and isinstance(self.lanes[index], Lane):
                return True
        return False

    def _plan(self, order: Sequence[torch.nn.Parameter]) -> None:
        """Make the lanes, the same on every rank: rank 0 says which."""
        trained = self.trained()
        self._name_new(trained)
        names = [self.names[p] for p in trained]
        facts = self._describe(trained)
        numbers = {p: number for number, p in enumerate(trained)}
        seen = [numbers[p] for p in order if p in numbers]
        seen += [n for n in reversed(range(len(trained))) if n not in set(seen)]
        sparse_here = [
            self.names[p]
            for p in trained
            if (p.grad is not None and p.grad.is_sparse)
            or isinstance(self._lane(p), SparseGradientLane)
        ]

        def work(transport: Transport, votes: list[int]) -> list[Part]:
            sparse = set().union(*gather_words(transport, sparse_here))
            mine = self._arrange(trained, names, seen, sparse) if transport.rank == 0 else []
            said = json.dumps([[part.how, part.numbers] for part in mine]).encode()
            said = transport.broadcast(np.frombuffer(said, np.uint8), root=0).tobytes()
            return [Part(how, numbers) for how, numbers in json.loads(said)]

        parts = self.run_on_all("plan", facts, work)
        held = take_out(self.lanes) if self.lanes else self._held
        self._held = {}
        self.lanes = [
            self._open_lane(part, index, trained, names) for index, part in enumerate(parts)
        ]
        put_in(self.lanes, held)
        records = {tuple(record["names"]): record for record in self._wanted or ()}
        for lane in self.lanes:
            if tuple(lane.names) in records:
                lane.resume(records[tuple(lane.names)])
        self._wanted = None
        self._lane_of = {p: i for i, lane in enumerate(self.lanes) for p in lane.parameters}
        self._await_all()
        said = json.dumps([facts, [[part.how, part.numbers] for part in parts]])
        self._facts = f"plan {hashlib.blake2b(said.encode(), digest_size=8).hexdigest()}"
        if self._size > 1:
            self.hooks.watch(trained)

    def _lane(self, parameter: torch.nn.Parameter) -> AnyLane | None:
        index = self._lane_of.get(parameter)
        return None if index is None else self.lanes[index] if self.lanes else None

    def _name_new(self, trained: Sequence[torch.nn.Parameter]) -> None:
        for i, group in enumerate(self._param_groups):
            for j, parameter in enumerate(group["params"]):
                if parameter not in self.names:
                    self.names[parameter] = f"noname.{i}.{j}"

    def _describe(self, trained: Sequence[torch.nn.Parameter]) -> list[str]:
        """Return what must be equal on all ranks."""
        facts = self.options.facts()
        for parameter in trained:
            said = f"parameter '{self.names[parameter]}' {list(parameter.shape)} {parameter.dtype}"
            if not parameter.is_contiguous():
                strides = torch.empty_like(parameter, device="meta").stride()
                said += f" of strides {list(strides)}"
            facts.append(said)
        return facts

    def _arrange(
        self,
        trained: Sequence[torch.nn.Parameter],
        names: list[str],
        order: list[int],
        sparse: set[str],
    ) -> list[Part]:
        """Return rank 0's plan."""
        feedback, groups = self.options.feedback, self.options.groups
        value_bytes = 8 if any(p.dtype == torch.float64 for p in trained) else 4
        if isinstance(self.options.compression, Automatic) or self._size == 1:
            sizes = ONE_BUCKET  # it is judged as one, or there is nothing to hide
        elif self.options.bucket_bytes is not None:
            elements = max(1, self.options.bucket_bytes // value_bytes)
            sizes = Sizes(elements, elements)
        else:
            elements = sum(p.numel() for p in trained)
            sizes = sizes_for(self.options.compression, elements, self._size, value_bytes)
        numbers = {p: number for number, p in enumerate(trained)}
        by_hand: list[list[int]] | int = []
        if isinstance(groups, int):
            by_hand = groups
        elif groups is not None:
            by_hand = [[numbers[p] for p in group if p in numbers] for group in groups]
        elif self._wanted is not None:
            places = {name: number for number, name in enumerate(names)}
            by_hand = [[places[n] for n in lane["names"] if n in places] for lane in self._wanted]
            order = [n for bucket in by_hand for n in bucket] + order
            order = list(dict.fromkeys(order))
        return arrange(
            order,
            [p.numel() for p in trained],
            sizes,
            groups=by_hand,
            dense={
                number
                for number, p in enumerate(trained)
                if feedback is not None and feedback.is_dense(names[number], p)
            },
            sparse={number for number, name in enumerate(names) if name in sparse},
        )

    def _open_lane(
        self, part: Part, index: int, trained: Sequence[torch.nn.Parameter], names: list[str]
    ) -> AnyLane:
        parameters = [trained[number] for number in part.numbers]
        of = [names[number] for number in part.numbers]
        name = f"{self.name}.{index}"
        if part.how == "sparse":
            return SparseGradientLane(name, parameters[0], of[0])
        compression = self.options.compression if part.how == "compressed" else NoneCompressor
        lane = open_lane(name, parameters, of, compression, self.progress)
        feedback = self.options.feedback
        if part.how == "dense" and feedback is not None and feedback.momentum_correction:
            # The wrapped optimizer has no momentum: these parameters take theirs here, too.
            lane.exchange = DenseExchange(open_residual(lane.bucket, feedback))
        return lane


def warn_of_few_entries(options: Options, elements: int, rank: int) -> None:
    """Warn of a density that leaves too few entries of a model to train well."""
    if rank == 0 and isinstance(options.compression, SparseCompression):
        kept = elements * options.compression.density
        if kept < _FEW_ENTRIES < elements:
            _log.warning(
                "density=%g leaves %d of %d entries a step; under about %d accuracy suffers: "
                "density=%.2g has as many",
                options.compression.density,
                max(1, round(kept)),
                elements,
                _FEW_ENTRIES,
                _FEW_ENTRIES / elements,
            )


_FEW_ENTRIES = 500
