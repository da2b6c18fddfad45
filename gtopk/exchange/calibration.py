"""The calibration of a transport: measured once, whoever asks first."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from collectives.planning import Calibration, calibrate
from collectives.planning.formats import FORMATS
from collectives.transports import Transport

from .. import __version__

_of_transport: WeakKeyDictionary[Transport, Calibration] = WeakKeyDictionary()


def calibration_of(transport: Transport) -> Calibration:
    """Return the calibration; the first call measures, on all ranks together."""
    if transport not in _of_transport:
        _of_transport[transport] = calibrate(transport, FORMATS, facts={"gtopk": __version__})
    return _of_transport[transport]
