"""The picture puts every time where it belongs."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from gtopk.cli.bench.collectives.cases import Results
from gtopk.cli.bench.collectives.command import panels, picture


def test_it_is_well_formed_and_the_same_every_time(results: Results) -> None:
    drawn = picture(results)
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert drawn == picture(results)
    assert "nan" not in drawn


def test_twice_the_time_is_the_same_way_further_everywhere(results: Results) -> None:
    rows = [row for rows in panels(results["records"]).values() for row in rows]
    places = re.findall(
        r'class="median" cx="([\d.]+)" cy="[\d.]+" r="5.5"/></g><', picture(results)
    )
    at = [float(place) for place in places][-len(rows) :]  # the first ones are the key's
    times = [math.log(row["seconds"]["median"]) for row in rows]
    slope = (at[-1] - at[0]) / (times[-1] - times[0])
    for place, time in zip(at, times, strict=True):
        assert place == pytest.approx(at[0] + slope * (time - times[0]), abs=0.5)
