"""The selector: which candidate to run, from predictions first and from measurements then.

    begin       with what calibration expects to cost least
    reconsider  after a window of steps: where measured and predicted seconds part by more than a
                third, or dense was measured to be better, correct the parameters and choose anew
    probe       either of them: unless sparse is CLEARLY better than dense is expected to be, some
                steps of dense first, so that the time to beat is measured, not modelled. Otherwise
                as soon as they take no more than a PREMIUM of the time that has passed, for the
                model may be wrong by any factor where short messages do not tell a link's
                bandwidth. And again where links prove faster than when it was measured
    confirm     what one window says against what runs another one has to say, too, of
                FIRST_WINDOW steps: on a busy machine a window may be twice as slow as the next.
                Only what takes over CLEARLY times as long as another is left at once

A candidate costs the seconds by which it lengthens a step, and the further steps that narrow
updates make a training of so many steps take (`cost_model.prediction`): what counts is when
the training is done. Seconds that fit the room behind the backward pass lengthen nothing: where
dense fits it is the best there is. Nothing is known of that room until a window has been measured.

It learns of other ranks nothing, and asks nobody: given the same numbers, it says the same.
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

CLEARLY: Final = 4.0  # a model is hardly wrong by more
PROBE_STEPS: Final = 5
PREMIUM: Final = 0.01
FIRST_WINDOW, LONGEST_WINDOW = 20, 640  # steps
APART: Final = 1 / 3  # of the prediction: beyond, it was wrong
# A switch must pay even if it takes 1 / this of what is expected: less is noise, or not worth it.
WORTH_SPARSE: Final = 0.9
WORTH_DENSE: Final = 0.97


class Measured(NamedTuple):
    """Seconds of a step by part, medians over a window, of the slowest rank."""

    select_seconds: float
    merge_seconds: float  # and encode and decode
    communicate_seconds: float  # on the wire, and waiting
    elsewhere_seconds: float = 0.0  # of the step, besides what the reduction adds to it
    room_seconds: float = 0.0  # of the backward pass, for it to hide in; of the rank with the least

    @property
    def seconds(self) -> float:
        """Return what the reduction takes."""
        return self.select_seconds + self.merge_seconds + self.communicate_seconds


class AlgorithmSelector:
    """Chooses for one gradient of `length` values of `value_bytes`.

    share:       of the step's budget, where it is one of bytes or seconds.
    density:     where that is the budget.
    chosen:      what runs, as predicted with all that is known.
    window:      how many steps to measure before the next judgement.
    corrections: by algorithm, measured over predicted, of those that ran.
    """

    def __init__(
        self,
        compression: Automatic,
        calibration: Calibration,
        length: int,
        value_bytes: int = 4,
        share: float = 1.0,
    ) -> None:
        self.compression = compression
        self.share = share
        self.density = compression.density_of(length / share)
        self.calibration = calibration
        self.length = length
        self.formats = compression.formats()
        self.value_bytes = value_bytes
        self.corrections: dict[str, Correction] = {}
        self.window = FIRST_WINDOW
        self.probing = False
        self.switches = 0
        self._doubted = False  # what runs, by the last window
        # By algorithm: least seconds on the wire since dense was measured, or as expected then.
        self._fastest: dict[str, float] = {}
        self._is_faster = False  # by a third than that, in the last window
        self._elsewhere = Correction()  # of what has not run: links and machine as last measured
        self._dense_at_best = 1.0  # correction of dense's seconds while it has not run
        self._passed_seconds = 0.0  # in the windows that were measured, with all else of a step
        self._backward_seconds = 0.0
        self._training = Training(compression.steps, share=share)

    def begin(self, backward_seconds: float) -> Candidate:
        """Return what to run first."""
        self._backward_seconds = backward_seconds
        # Until it is measured: a step is its backward pass at least.
        self._training = self._training._replace(elsewhere_seconds=backward_seconds)
        best, *others = self._choices()
        return (self._probe(others, self._cost(best.seconds, best)) or best).candidate

    def _cost(self, seconds: float, found: Prediction) -> float:
        """Return what a candidate costs when it takes `seconds`."""
        return self._training.cost(seconds, found.lag_steps)

    def _probe(self, choices: Sequence[Prediction], cost: float) -> Prediction | None:
        """Return dense, to be measured, where it may be as good as what costs that much."""
        dense = next((each for each in choices if each.candidate.algorithm == "dense"), None)
        self.probing = False
        if dense is None or "dense" in self.corrections:
            return None
        may_be_better = self._cost(dense.seconds / CLEARLY, dense) < cost
        exposed = self._training.exposed(dense.seconds)
        if not may_be_better and PROBE_STEPS * exposed >= PREMIUM * self._passed_seconds:
            return None
        self.probing = True
        self.window = PROBE_STEPS
        return dense

    def run(self, candidate: Candidate) -> Prediction:
        """Take note of what runs from now on, and return what it is expected to take."""
        self.chosen = self._predicted(candidate).scaled(*self._correction(candidate.algorithm))
        return self.chosen

    def reconsider(self, measured: Measured, backward_seconds: float) -> Candidate:
        """Return what to run next, often what runs now, after a window of measured steps."""
        running = self.chosen
        before = self._training
        self._training = before._replace(
            elsewhere_seconds=measured.elsewhere_seconds, room_seconds=measured.room_seconds
        )
        exposed = self._training.exposed(measured.seconds)
        self._passed_seconds += self.window * (exposed + measured.elsewhere_seconds)
        cost = self._cost(measured.seconds, running)
        wire, expected = measured.communicate_seconds, running.communicate_seconds
        apart = (
            abs(measured.seconds - running.seconds) > APART * running.seconds
            or abs(wire - expected) > APART * expected  # small beside dense's, but tells of it
        )
        self._learn(measured, apart)
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
            again = probed or self._is_faster
            self.window = FIRST_WINDOW if again else min(2 * self.window, LONGEST_WINDOW)
            return running.candidate
        at_once = probed or moved or CLEARLY * self._cost(best.seconds, best) < cost
        if not (at_once or self._doubted):
            self._doubted = True
            self.window = FIRST_WINDOW
            return running.candidate
        # Where it was in doubt it may be again: the more switches, the later the next.
        self._doubted = False
        self.switches += 0 if probed else 1
        self.window = min(FIRST_WINDOW * 2**self.switches, LONGEST_WINDOW)
        return best.candidate

    def _is_worth(self, best: Prediction, cost: float, moved: bool) -> bool:
        new, old = best.candidate, self.chosen.candidate
        if new == old:
            return False
        same = (new.algorithm, new.widening) == (old.algorithm, old.widening)
        if self.density is None and same:
            return moved or abs(new.density - old.density) > APART * old.density
        if self.density is None:
            return True
        return self._is_cheaper(best, cost)

    def _is_cheaper(self, found: Prediction, cost: float) -> bool:
        """Tell whether it is, if it takes somewhat longer than expected."""
        worth = WORTH_DENSE if found.candidate.algorithm == "dense" else WORTH_SPARSE
        return self._cost(found.seconds / worth, found) < cost

    def _learn(self, measured: Measured, apart: bool) -> None:
        """Correct the parameters of what ran; where they were wrong, those of the rest with it."""
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
            # Dense was measured while links were slower, perhaps: by as much as this wire's.
            self._fastest[algorithm], self._is_faster = wire, False
            measured_dense = self.corrections.pop("dense", None)
        if apart and algorithm == "dense":  # which tells of the links only
            self._elsewhere = self._elsewhere._replace(communicate=correction.communicate)
        elif apart:
            self._elsewhere = correction
        if measured_dense is not None:
            self._dense_at_best = measured_dense.communicate * wire / slow
        elif apart and algorithm != "dense":
            # Of links too slow or too fast by an unknown share of latency and bandwidth, the best
            # for dense: what is not latency as calibrated is the bytes'.
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
        except TooFewBytesError as error:  # for this bucket: in the words of the whole step
            assert self.compression.bytes_per_step is not None
            raise TooFewBytesError(
                (error.least_bytes + self._agreeing_bytes()) / self.share,
                self.calibration.network.ranks,
                self.compression.bytes_per_step,
            ) from None

    def _budget(self) -> Budget:
        if self.compression.hide_behind_backward:
            return Budget(seconds=self._backward_seconds * self.share)
        if self.compression.bytes_per_step is not None:
            allowed = self.compression.bytes_per_step * self.share
            return Budget(bytes_per_step=allowed - self._agreeing_bytes())
        return Budget(density=self.density)

    def _agreeing_bytes(self) -> int:
        """Return what a rank sends in a step for the ranks to agree on it."""
        return cycle_bytes(self.calibration.network.ranks, names=1024)

    def _correction(self, algorithm: str) -> Correction:
        if algorithm in self.corrections:
            return self.corrections[algorithm]
        if algorithm == "dense":
            return Correction(communicate=self._dense_at_best)  # in doubt it is tried
        return self._elsewhere

    def _predicted(self, candidate: Candidate) -> Prediction:
        """Return what the calibration alone says."""
        network, rates = self.calibration.network, self.calibration.rates
        return predict(candidate, self.length, network, rates, self.value_bytes)


def _ratio(measured: float, predicted: float) -> float:
    return measured / predicted if predicted > 0 else 1.0
