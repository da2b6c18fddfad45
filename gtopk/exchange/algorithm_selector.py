"""The selector: chooses a candidate, at first by predictions, then by measurements.

    begin       with the candidate that calibration expects to cost least
    reconsider  after a window of steps: where measured and predicted seconds differ by more than a
                third, or dense was measured to be better, correct the predictions and choose anew
    probe       as a part of both, run some dense steps, so that the time to beat is measured, not
                modelled. At once, unless sparse is expected to be CLEARLY better. Else as soon as
                they take no more than a PREMIUM of the time that has passed: the model may be
                wrong by any factor, as short messages do not show a link's bandwidth. And again
                where links prove faster than when dense was measured
    confirm     before a change, measure a second window, of FIRST_WINDOW steps, that also speaks
                for it: on a busy machine one window may be twice as slow as the next. A candidate
                that takes over CLEARLY times as long as another is left at once

A candidate's cost is the time by which it delays the end of the training: the seconds by which it
lengthens a step, and the further steps that narrow updates need (`cost_model.prediction`). Seconds
that fit the room behind the backward pass lengthen no step: where dense fits, it is the best. The
room is not known until a window has been measured.

The selector communicates with no other rank: from the same numbers it chooses the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from collectives.cost_model import (
    Budget,
    Calibration,
    Candidate,
    Correction,
    Prediction,
    Training,
    choose,
    predict,
)
from collectives.cost_model.choice import SPARSE, TooFewBytesError

from ..compression import Automatic
from ..runtime.coordinator.operation import cycle_bytes

CLEARLY: Final = 4.0  # a factor by which the model is hardly ever wrong
PROBE_STEPS: Final = 5
PREMIUM: Final = 0.01
FIRST_WINDOW, LONGEST_WINDOW = 20, 640  # steps
APART: Final = 1 / 3  # of the prediction: where a measurement differs by more, it was wrong
# A switch must pay even if it takes 1 / this times the expected seconds: a smaller gain is noise.
WORTH_SPARSE: Final = 0.9
WORTH_DENSE: Final = 0.97


class Measured(NamedTuple):
    """Seconds of a step by part, medians over a window, of the slowest rank."""

    select_seconds: float
    merge_seconds: float  # encoding and decoding included
    communicate_seconds: float  # on the wire, and waiting
    elsewhere_seconds: float = 0.0  # the step without the seconds that the reduction adds to it
    room_seconds: float = 0.0  # of backward, for the reduction to hide in; the least of all ranks

    @property
    def seconds(self) -> float:
        """Return the seconds of the reduction."""
        return self.select_seconds + self.merge_seconds + self.communicate_seconds


class AlgorithmSelector:
    """Chooses candidates for one gradient of `length` values of `value_bytes` each.

    Call `begin`, and `run` with its candidate; after each window `reconsider`, and `run` again.

    budget_share: this gradient's, of the step's budget, where that is of bytes or seconds.
    density:     the budget; None: it is of bytes or seconds.
    chosen:      the running candidate's prediction, with all corrections.
    window:      how many steps to measure before the next `reconsider`.
    corrections: by algorithm that has run, its measured over its predicted seconds.
    """

    def __init__(
        self,
        compression: Automatic,
        calibration: Calibration,
        length: int,
        value_bytes: int = 4,
        budget_share: float = 1.0,
    ) -> None:
        self.compression = compression
        self.budget_share = budget_share
        self.density = compression.density_of(length / budget_share)
        self.calibration = calibration
        self.length = length
        self.formats = compression.formats()
        self.value_bytes = value_bytes
        self.corrections: dict[str, Correction] = {}
        self.window = FIRST_WINDOW
        self.probing = False
        self.switches = 0
        self._doubted = False  # the last window spoke against the running candidate
        # By algorithm: least seconds on the wire since dense was measured, or as expected then.
        self._fastest: dict[str, float] = {}
        self._is_faster = False  # the last window was faster than that by a third
        self._elsewhere = Correction()  # for algorithms that have not run: as last measured
        self._dense_at_best = 1.0  # for dense, while it has not run
        self._passed_seconds = 0.0  # of whole steps, in the measured windows
        self._backward_seconds = 0.0
        self._training = Training(compression.steps, share=budget_share)

    def begin(self, backward_seconds: float) -> Candidate:
        """Return the candidate to run first."""
        self._backward_seconds = backward_seconds
        # Until it is measured: a step takes at least its backward pass.
        self._training = self._training._replace(elsewhere_seconds=backward_seconds)
        best, *others = self._choices()
        return (self._probe(others, self._cost(best.seconds, best)) or best).candidate

    def _cost(self, seconds: float, found: Prediction) -> float:
        """Return the cost of a candidate that takes `seconds` a step."""
        return self._training.cost(seconds, found.lag_steps)

    def _probe(self, choices: Sequence[Prediction], cost: float) -> Prediction | None:
        """Return dense, to be measured, where it may cost less than `cost`, or probing is cheap.

        None: do not probe.
        """
        dense = next((each for each in choices if each.candidate.algorithm == "dense"), None)
        self.probing = False
        if dense is None or "dense" in self.corrections:
            return None
        # Dense may take less time than modelled, by as much as the model is ever wrong.
        may_be_better = self._cost(dense.seconds / CLEARLY, dense) < cost
        exposed = self._training.exposed(dense.seconds)
        if not may_be_better and PROBE_STEPS * exposed >= PREMIUM * self._passed_seconds:
            return None
        self.probing = True
        self.window = PROBE_STEPS
        return dense

    def run(self, candidate: Candidate) -> Prediction:
        """Note the candidate that runs from now on, and return its corrected prediction."""
        self.chosen = self._predicted(candidate).scaled(*self._correction(candidate.algorithm))
        return self.chosen

    def reconsider(self, measured: Measured, backward_seconds: float) -> Candidate:
        """Return the candidate to run next, often the same, after a window of measured steps."""
        running = self.chosen
        before = self._training
        self._training = before._replace(
            elsewhere_seconds=measured.elsewhere_seconds, room_seconds=measured.room_seconds
        )
        exposed = self._training.exposed(measured.seconds)
        # Without what hid behind backward: that has lengthened no step.
        self._passed_seconds += self.window * (exposed + measured.elsewhere_seconds)
        cost = self._cost(measured.seconds, running)
        wire, expected = measured.communicate_seconds, running.communicate_seconds
        apart = (
            abs(measured.seconds - running.seconds) > APART * running.seconds
            or abs(wire - expected) > APART * expected  # may be short, but tells of dense's wire
        )
        self._learn(measured, apart)
        # The budget is backward's time then: where that changes, so does what fits it.
        moved = self.compression.hide_behind_backward and (
            abs(backward_seconds - self._backward_seconds) > APART * self._backward_seconds
        )
        if moved:
            self._backward_seconds = backward_seconds
        hides_otherwise = abs(exposed - before.exposed(measured.seconds)) > APART * measured.seconds
        probed = self.probing
        choices = self._choices()
        if (dense := self._probe(choices, cost)) is not None:
            self.switches += 1
            self._doubted = False
            return dense.candidate
        dense_wins = any(
            each.candidate.algorithm == "dense" and self._is_cheaper(each, cost) for each in choices
        )
        best = choices[0]
        doubtful = (
            apart
            or moved
            or hides_otherwise
            or probed
            or self._doubted
            or (dense_wins and "dense" in self.corrections)
        )
        if not (doubtful and self._is_worth(best, cost, moved)):
            self._doubted = False
            # Nothing speaks for a change: the next look may come after twice as many steps.
            again = probed or self._is_faster
            self.window = FIRST_WINDOW if again else min(2 * self.window, LONGEST_WINDOW)
            return running.candidate
        at_once = probed or moved or CLEARLY * self._cost(best.seconds, best) < cost
        if not (at_once or self._doubted):
            self._doubted = True
            self.window = FIRST_WINDOW
            return running.candidate
        # Doubts may come again: the more switches there were, the later the next.
        self._doubted = False
        # To go back from a probe is no change of mind.
        self.switches += 0 if probed else 1
        self.window = min(FIRST_WINDOW * 2**self.switches, LONGEST_WINDOW)
        return best.candidate

    def _is_worth(self, best: Prediction, cost: float, moved: bool) -> bool:
        new, old = best.candidate, self.chosen.candidate
        if new == old:
            return False
        same = (new.algorithm, new.widening) == (old.algorithm, old.widening)
        # A budget of bytes or seconds decides here, not the cost: the best within it is run, unless
        # it is the same way at nearly the same density.
        if self.density is None and same:
            return moved or abs(new.density - old.density) > APART * old.density
        if self.density is None:
            return True
        return self._is_cheaper(best, cost)

    def _is_cheaper(self, found: Prediction, cost: float) -> bool:
        """Tell whether a candidate costs less even if it takes somewhat longer than expected."""
        worth = WORTH_DENSE if found.candidate.algorithm == "dense" else WORTH_SPARSE
        return self._cost(found.seconds / worth, found) < cost

    def _learn(self, measured: Measured, apart: bool) -> None:
        """Correct the prediction of the algorithm that ran; if it was wrong, the others', too."""
        algorithm = self.chosen.candidate.algorithm
        expected = self._predicted(self.chosen.candidate)
        parts = (
            expected.select_seconds,
            expected.code_seconds + expected.merge_seconds,
            expected.communicate_seconds,
        )
        correction = Correction(*map(_ratio, measured[:3], parts))
        self.corrections[algorithm] = correction
        wire, believed = measured.communicate_seconds, self.chosen.communicate_seconds
        measured_dense = None
        if algorithm == "dense":
            self._fastest.clear()
        slow = self._fastest.setdefault(algorithm, believed)
        was_faster, self._is_faster = self._is_faster, slow - wire > APART * slow
        if not self._is_faster:
            self._fastest[algorithm] = min(slow, wire)
        elif was_faster and algorithm != "dense":
            # Links may have been slower when dense was measured, by as much as this wire was.
            self._fastest[algorithm], self._is_faster = wire, False
            measured_dense = self.corrections.pop("dense", None)
        if apart and algorithm == "dense":  # dense seconds tell of the links only
            self._elsewhere = self._elsewhere._replace(communicate=correction.communicate)
        elif apart:
            self._elsewhere = correction
        if measured_dense is not None:
            self._dense_at_best = measured_dense.communicate * wire / slow
        elif apart and algorithm != "dense":
            # Whether latency or bandwidth is wrong is not known. Assume the best for dense: latency
            # is as calibrated, and the bytes took the rest.
            of_bytes = expected.communicate_seconds - expected.latency_seconds
            at_most = measured.communicate_seconds - expected.latency_seconds
            self._dense_at_best = min(1.0, max(0.0, _ratio(at_most, of_bytes)))

    def _choices(self) -> list[Prediction]:
        try:
            return choose(
                self.length,
                self.calibration,
                self._budget(),
                self.formats,
                {name: self._correction(name) for name in ("dense", *SPARSE)},
                self.value_bytes,
                self._training,
            )
        except TooFewBytesError as error:  # for this bucket: name the whole step's bytes
            assert self.compression.bytes_per_step is not None
            raise TooFewBytesError(
                (error.least_bytes + self._agreeing_bytes()) / self.budget_share,
                self.calibration.network.ranks,
                self.compression.bytes_per_step,
            ) from None

    def _budget(self) -> Budget:
        if self.compression.hide_behind_backward:
            return Budget(seconds=self._backward_seconds * self.budget_share)
        if self.compression.bytes_per_step is not None:
            # The user's number is of all bytes, those of the engine's own messages included.
            allowed = self.compression.bytes_per_step * self.budget_share
            return Budget(bytes_per_step=allowed - self._agreeing_bytes())
        return Budget(density=self.density)

    def _agreeing_bytes(self) -> int:
        """Return the bytes that a rank sends in a step to agree with the others on operations."""
        # As many names as the engine's cache holds by default: its longest usual message.
        return cycle_bytes(self.calibration.network.ranks, names=1024)

    def _correction(self, algorithm: str) -> Correction:
        if algorithm in self.corrections:
            return self.corrections[algorithm]
        if algorithm == "dense":
            return Correction(communicate=self._dense_at_best)  # optimistic: then it is measured
        return self._elsewhere

    def _predicted(self, candidate: Candidate) -> Prediction:
        """Return the prediction of the calibration alone, without corrections."""
        network, rates = self.calibration.network, self.calibration.rates
        return predict(candidate, self.length, network, rates, self.value_bytes)


def _ratio(measured: float, predicted: float) -> float:
    return measured / predicted if predicted > 0 else 1.0
