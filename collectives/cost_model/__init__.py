"""Predict the time of every algorithm on the measured network, and choose the one to use.

calibration = calibrate(transport)                  measured once, the same on every rank
best, *others = choose(length, calibration, ...)    predictions, the cheapest first

prediction.py         seconds and bytes of a reduction
schedules.py          its messages, round by round
network.py            inputs of a prediction: ranks, nodes, links and rates of the machines
calibration.py        measures the inputs, by probes.py and per_call_overhead.py
cache.py              keeps the calibration in a file
choice.py             orders the candidates under a budget
"""

from ..wire import EXACT, Format
from .cache import calibrate
from .calibration import Calibration
from .choice import Budget, Correction, choose
from .network import DEFAULT_RATES, CodingRate, Network, Rates
from .prediction import Candidate, Prediction, Traffic, Training, lag_steps, predict

__all__ = [
    "DEFAULT_RATES",
    "EXACT",
    "Budget",
    "Calibration",
    "Candidate",
    "CodingRate",
    "Correction",
    "Format",
    "Network",
    "Prediction",
    "Rates",
    "Traffic",
    "Training",
    "calibrate",
    "choose",
    "lag_steps",
    "predict",
]
