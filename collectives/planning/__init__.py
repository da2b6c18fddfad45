"""Will it pay? What every algorithm is expected to take here, and which one to use.

network, rates = calibrate(transport)          measured once, the same on every rank
best, *others = rank_candidates(...)           predicted, the cheapest first
"""

from ..wire import EXACT, Format
from .calibrated import calibrate
from .calibration import Calibration
from .choice import Budget, Correction, choose
from .network import Network
from .prediction import Candidate, Prediction, Traffic, predict
from .rates import DEFAULT_RATES, CodingRate, Rates

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
    "calibrate",
    "choose",
    "predict",
]
