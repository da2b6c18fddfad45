"""The algorithm selector: choose a candidate, first from predictions, then from measurements.

    begin       start with the candidate that has the lowest cost according to the calibration
    reconsider  after a window of steps: if measured and predicted seconds differ by more than a
                third, or dense was measured to be better, correct the predictions and choose again
    probe       in both: run some dense steps, so that the time to beat is measured and not
                modelled. Probe at once, unless sparse is expected to be CLEAR_FACTOR times better.
                Then probe when these steps take no more than PROBE_SHARE of the time that has
                passed: the model may be wrong by any factor, as short messages do not reveal a
                link's bandwidth. Probe again if the links prove faster than when dense was measured
    confirm     before a change, measure a second window of FIRST_WINDOW steps, which must support
                the change, too: on a busy machine one window may be twice as slow as the next. A
                candidate that takes over CLEAR_FACTOR times as long as another is dropped at once

A candidate's cost is the time by which it delays the end of training: the seconds that it adds to
each step, plus the extra steps that narrow updates need (`cost_model.prediction`). Seconds that
overlap with the backward pass add nothing: if dense fits, it is best. The time available for
overlap is unknown until a window has been measured.

The selector does not communicate: from the same numbers it makes the same choice on every rank.
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

CLEAR_FACTOR: Final = 4.0  # the model is hardly ever wrong by a larger factor
PROBE_STEPS: Final = 5
PROBE_SHARE: Final = 0.01
FIRST_WINDOW, LONGEST_WINDOW = 20, 640  # steps
TOLERANCE: Final = 1 / 3  # of the prediction: if a measurement differs by more, the model was wrong
# A switch must pay even if it takes 1 / this times the predicted seconds: less gain is noise.
WORTH_SPARSE: Final = 0.9
WORTH_DENSE: Final = 0.97


class Measured(NamedTuple):
    """Seconds of a step by part: medians over a window, of the slowest rank."""

    select_seconds: float
    merge_seconds: float  # including encoding and decoding
    communicate_seconds: float  # on the wire, and waiting
    elsewhere_seconds: float = 0.0  # the step without the seconds that the reduction adds
    room_seconds: float = 0.0  # backward time that can hide the reduction; the least of all ranks

    @property
    def seconds(self) -> float:
        """Return the seconds of the reduction."""
        return self.select_seconds + self.merge_seconds + self.communicate_seconds


class AlgorithmSelector:
    """Choose candidates for one gradient of `length` values of `value_bytes` each.

    Call `begin`, and `run` with its candidate; after each window `reconsider`, and `run` again.

    budget_share: this gradient's share of the step's budget, if that is in bytes or seconds.
    density:     the budget; None if it is in bytes or seconds.
    chosen:      the running candidate's prediction, with all corrections.
    window:      how many steps to measure before the next `reconsider`.
    corrections: measured over predicted seconds, by algorithm that has run.
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
        self._doubted = False  # the last window was evidence against the running candidate
        # By algorithm: fewest seconds on the wire since dense was measured, or predicted then.
        self._fastest: dict[str, float] = {}
        self._is_faster = False  # the last window beat that by a third
        self._default = Correction()  # for algorithms that have not run: the last measured one
        self._dense_at_best = 1.0  # for dense, while it has not run
        self._passed_seconds = 0.0  # in whole steps, over the measured windows
        self._backward_seconds = 0.0
        self._training = Training(compression.steps, share=budget_share)

    def begin(self, backward_seconds: float) -> Candidate:
        """Return the candidate to run first."""
        self._backward_seconds = backward_seconds
        # Until measured: a step takes at least its backward pass.
        self._training = self._training._replace(elsewhere_seconds=backward_seconds)
        best, *others = self._choices()
        return (self._probe(others, self._cost(best.seconds, best)) or best).candidate

    def _cost(self, seconds: float, prediction: Prediction) -> float:
        """Return the cost of a candidate that takes `seconds` per step."""
        return self._training.cost(seconds, prediction.lag_steps)

    def _probe(self, choices: Sequence[Prediction], cost: float) -> Prediction | None:
        """Return dense, to measure it, if it may cost less than `cost` or if probing is cheap.

        Return None if there is no reason to probe.
        """
        dense = next((each for each in choices if each.candidate.algorithm == "dense"), None)
        self.probing = False
        if dense is None or "dense" in self.corrections:
            return None
        # Dense may be faster than predicted, by the largest error of the model.
        may_be_better = self._cost(dense.seconds / CLEAR_FACTOR, dense) < cost
        exposed = self._training.exposed(dense.seconds)
        if not may_be_better and PROBE_STEPS * exposed >= PROBE_SHARE * self._passed_seconds:
            return None
        self.probing = True
        self.window = PROBE_STEPS
        return dense

    def run(self, candidate: Candidate) -> Prediction:
        """Record the candidate that runs from now on; return its corrected prediction."""
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
        # Seconds that backward hid are left out: they did not lengthen a step.
        self._passed_seconds += self.window * (exposed + measured.elsewhere_seconds)
        cost = self._cost(measured.seconds, running)
        wire, expected = measured.communicate_seconds, running.communicate_seconds
        mispredicted = (
            abs(measured.seconds - running.seconds) > TOLERANCE * running.seconds
            # The wire's seconds may be short, but hint at dense's.
            or abs(wire - expected) > TOLERANCE * expected
        )
        self._update_corrections(measured, mispredicted)
        # The budget is then the backward time: if that changes, other candidates may fit.
        backward_changed = self.compression.hide_behind_backward and (
            abs(backward_seconds - self._backward_seconds) > TOLERANCE * self._backward_seconds
        )
        if backward_changed:
            self._backward_seconds = backward_seconds
        change = abs(exposed - before.exposed(measured.seconds))
        overlap_changed = change > TOLERANCE * measured.seconds
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
            mispredicted
            or backward_changed
            or overlap_changed
            or probed
            or self._doubted
            or (dense_wins and "dense" in self.corrections)
        )
        if not (doubtful and self._is_worth(best, cost, backward_changed)):
            self._doubted = False
            # No evidence for a change: the next window may be twice as long.
            is_short = probed or self._is_faster
            self.window = FIRST_WINDOW if is_short else min(2 * self.window, LONGEST_WINDOW)
            return running.candidate
        at_once = probed or backward_changed or CLEAR_FACTOR * self._cost(best.seconds, best) < cost
        if not (at_once or self._doubted):
            self._doubted = True
            self.window = FIRST_WINDOW
            return running.candidate
        # More doubts may follow: each switch makes the next window longer.
        self._doubted = False
        # Returning from a probe does not count as a switch.
        self.switches += 0 if probed else 1
        self.window = min(FIRST_WINDOW * 2**self.switches, LONGEST_WINDOW)
        return best.candidate

    def _is_worth(self, best: Prediction, cost: float, backward_changed: bool) -> bool:
        new, old = best.candidate, self.chosen.candidate
        if new == old:
            return False
        same = (new.algorithm, new.widening) == (old.algorithm, old.widening)
        # A budget of bytes or seconds decides here, not the cost: run the best candidate within
        # it, unless only the density differs, and only slightly.
        if self.density is None and same:
            return backward_changed or abs(new.density - old.density) > TOLERANCE * old.density
        if self.density is None:
            return True
        return self._is_cheaper(best, cost)

    def _is_cheaper(self, prediction: Prediction, cost: float) -> bool:
        """Return whether a candidate costs less even if it takes a little longer than predicted."""
        worth = WORTH_DENSE if prediction.candidate.algorithm == "dense" else WORTH_SPARSE
        return self._cost(prediction.seconds / worth, prediction) < cost

    def _update_corrections(self, measured: Measured, mispredicted: bool) -> None:
        """Correct the prediction of the algorithm that ran; if it was wrong, of the others too."""
        algorithm = self.chosen.candidate.algorithm
        expected = self._predicted(self.chosen.candidate)
        parts = (
            expected.select_seconds,
            expected.code_seconds + expected.merge_seconds,
            expected.communicate_seconds,
        )
        correction = Correction(*map(_ratio, measured[:3], parts))
        self.corrections[algorithm] = correction
        wire, predicted = measured.communicate_seconds, self.chosen.communicate_seconds
        measured_dense = None
        if algorithm == "dense":
            self._fastest.clear()
        reference = self._fastest.setdefault(algorithm, predicted)
        was_faster, self._is_faster = self._is_faster, reference - wire > TOLERANCE * reference
        if not self._is_faster:
            self._fastest[algorithm] = min(reference, wire)
        elif was_faster and algorithm != "dense":
            # When dense was measured, the links may have been slower by this wire's factor.
            self._fastest[algorithm], self._is_faster = wire, False
            measured_dense = self.corrections.pop("dense", None)
        if mispredicted and algorithm == "dense":  # dense seconds only measure the links
            self._default = self._default._replace(communicate=correction.communicate)
        elif mispredicted:
            self._default = correction
        if measured_dense is not None:
            self._dense_at_best = measured_dense.communicate * wire / reference
        elif mispredicted and algorithm != "dense":
            # Latency or bandwidth may be wrong. Assume the best for dense: latency is as
            # calibrated, and the bytes took the rest.
            byte_seconds = expected.communicate_seconds - expected.latency_seconds
            at_most = measured.communicate_seconds - expected.latency_seconds
            self._dense_at_best = min(1.0, max(0.0, _ratio(at_most, byte_seconds)))

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
        except TooFewBytesError as error:  # counts this bucket only: name the whole step's bytes
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
            # The user's limit covers all bytes, including the engine's own messages.
            allowed = self.compression.bytes_per_step * self.budget_share
            return Budget(bytes_per_step=allowed - self._agreeing_bytes())
        return Budget(density=self.density)

    def _agreeing_bytes(self) -> int:
        """Return the bytes that a rank sends per step to agree with the others on operations."""
        # As many names as the engine's cache holds by default: its longest usual message.
        return cycle_bytes(self.calibration.network.ranks, names=1024)

    def _correction(self, algorithm: str) -> Correction:
        if algorithm in self.corrections:
            return self.corrections[algorithm]
        if algorithm == "dense":
            return Correction(communicate=self._dense_at_best)  # optimistic, so that it is measured
        return self._default

    def _predicted(self, candidate: Candidate) -> Prediction:
        """Return the prediction from the calibration alone, without corrections."""
        network, rates = self.calibration.network, self.calibration.rates
        return predict(candidate, self.length, network, rates, self.value_bytes)


def _ratio(measured: float, predicted: float) -> float:
    return measured / predicted if predicted > 0 else 1.0
