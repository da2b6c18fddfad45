"""OwnSteps: what the steps of a mode cost whose optimizer does not exchange gradients each time.

Every second of the wall clock is in one step, computed or waited, and so is every byte of the
mode's operations. What ranks take samples by (a `Counter`) counts its own bytes, and none of them
are here.
"""

from __future__ import annotations

from typing import Any

from ...optim.expected_step import ExpectedStep
from ...optim.peers import Peers
from ...runtime.coordinator import Operation
from ...runtime.world.state import World
from ...telemetry import looks
from ...telemetry.start import balance_of, recorder_of
from ...telemetry.step_report import Seen, StepReport, report
from ...telemetry.timeline import Span, Step, timeline_of
from .round_exchange import RoundExchange
from .spent import Bounds, Spent


class OwnSteps:
    """Reports each step as the optimizer's last one, to the run's record, too.

    covers: what a step is; see `StepReport`.
    spent:  where this rank's time goes.
    """

    def __init__(self, world: World, optimizer: Any, covers: str) -> None:
        self._world, self._optimizer, self._covers = world, optimizer, covers
        self._seen = Seen()
        self._computed: list[Bounds] = []
        self._exchanged = 0  # times, with an update
        self._expected: ExpectedStep | None = None
        self.spent = Spent()

    def expect(self, exchange: RoundExchange, name: str) -> None:
        """Know what this exchange, one of all ranks, is to take; they call it together.

        name: of what concerns it, equal on all ranks.
        """
        self._optimizer._tell_of_compression(by_mode=True)
        here, compression = self._world, self._optimizer._compression
        peers = Peers(here, here.engine, name, range(here.size), takes_part=True)
        self._expected = ExpectedStep(compression, exchange.progress, self._covers)
        with self.spent.waiting():
            self._expected.measure([exchange], peers)

    def submitted(self, operation: Operation) -> None:
        """Count what an operation sends to the step under way."""
        self._seen.operations[len(self._seen.operations)] = operation

    def computed(self) -> None:
        """Count what was computed up to now to the step under way, and what follows to the next."""
        self._computed += self.spent.take_computed()

    def arrived(self, exchange: RoundExchange) -> None:
        """Note what an exchange has done whose operation is over, and the residual after it."""
        seen, ran = self._seen, exchange.take_ran()
        seen.bucket_exchanges.append(exchange)
        if ran is not None:
            seen.exchanged[len(seen.exchanged)] = ran.exchanged
            seen.spans.append((ran.began, ran.ended))
            self._exchanged += ran.exchanged.finite
            recorder = recorder_of(self._world)
            if recorder is not None and ran.exchanged.finite and looks.is_due(self._exchanged):
                looks.look(recorder, [exchange])

    def close(self, step: int, samples: int, local_steps: int = 1, skipped: bool = False) -> None:
        """Report the step, of what was computed until `computed`, and begin another."""
        seen, self._seen = self._seen, Seen()
        computed, self._computed = self._computed, []
        waits = self.spent.take_waits()
        self._optimizer.last_step = done = report(
            seen,
            step=step,
            compute_seconds=sum(ended - began for began, ended in computed),
            waits=waits,
            synchronize_seconds=sum(ended - began for began, ended in waits),
            apply_seconds=0.0,  # the engine's thread does it
            predicted_seconds=self._expected.seconds if self._expected else None,
            skipped=skipped,
            samples=samples,
            local_steps=local_steps,
            covers=self._covers,
            dense_seconds=self._expected.dense_seconds if self._expected else None,
        )
        balance_of(self._world).note(done)
        if (recorder := recorder_of(self._world)) is not None:
            recorder.note_step(done)
        if (timeline := timeline_of(self._world)) is not None:
            timeline.note_step(self._drawn(done, computed, waits))

    def _drawn(self, done: StepReport, computed: list[Bounds], waits: list[Bounds]) -> Step:
        """Return the step as the timeline shows it: whole, and what was computed and waited."""
        said = {"step": done.step, "local steps": done.local_steps, "samples": done.samples}
        spans = [Span(self._covers.upper(), computed[0][0], computed[-1][1], said)]
        spans += [Span("COMPUTE", *bounds) for bounds in computed]
        spans += [Span("WAIT", *bounds) for bounds in waits]
        kind = f"each {self._covers}"
        name = self._optimizer._reducer.peers.name
        return Step(name, spans, done.working_seconds, done.hidden_seconds, kind)
