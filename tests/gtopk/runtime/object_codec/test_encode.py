"""Objects that cannot be sent raise an error with type and place, before any message."""

from __future__ import annotations

from collections import ChainMap, OrderedDict, defaultdict
from decimal import Decimal
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from gtopk.runtime.object_codec import MAX_DEPTH, decode, encode


class Point(NamedTuple):
    x: int


class Colour(Enum):
    RED = 1


class Opaque:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque)

    def __hash__(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("obj", "place"),
    [
        (Opaque(), "Opaque at its top"),
        ({"state": [{"step": Opaque()}]}, r"Opaque at \['state'\]\[0\]\['step'\]"),
        ({"state": {Opaque(): 1}}, r"Opaque at \['state'\] \(key <.*>\)"),
        ((1, {Opaque()}), r"Opaque at \[1\] \(member <.*>\)"),
        (slice(0, Opaque()), r"Opaque at \.stop"),
        ([Colour.RED], r"Colour at \[0\]"),
        ([Point(1)], r"Point at \[0\]"),
        ([Decimal("1.5")], r"decimal\.Decimal at \[0\]"),
        ([ChainMap()], r"collections\.ChainMap at \[0\]"),
        ([int], r"type at \[0\]"),
        ([defaultdict(Opaque)], r"collections\.defaultdict \(of <class .*Opaque'>\) at \[0\]"),
        ([np.array([None])], r"numpy\.ndarray \(of dtype object\) at \[0\]"),
        ([np.zeros(2, "i4,f4")], r"numpy\.ndarray \(of dtype .*\) at \[0\]"),
        ([np.ma.masked_array([1])], r"MaskedArray at \[0\]"),
        ([np.void(b"ab")], r"numpy\.void \(of dtype .*\) at \[0\]"),
        ([torch.ones(2).to_sparse()], r"torch\.Tensor \(not dense\) at \[0\]"),
        ([torch.ones(2, device="meta")], r"torch\.Tensor \(on the meta device.*\) at \[0\]"),
        ([torch.ones((1,) * 65)], r"torch\.Tensor \(of 65 dimensions\) at \[0\]"),
        ([torch.nn.Buffer(torch.ones(1)), torch.nn.Linear(1, 1)], r"Linear at \[1\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_error_names_type_and_place_of_an_unsupported_object(obj: object, place: str) -> None:
    with pytest.raises(TypeError, match=f"got a .*{place};.* set GTOPK_ALLOW_PICKLE=1 on every"):
        encode(obj)


def test_ordered_dict_with_its_own_attributes_is_refused() -> None:
    labelled: OrderedDict[str, int] = OrderedDict(a=1)
    labelled.label = "b"  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"OrderedDict \(with attributes \['label'\]\)"):
        encode(labelled)


def nested(depth: int) -> list[Any]:
    """Return `depth` lists inside one another."""
    obj: list[Any] = []
    for _ in range(depth - 1):
        obj = [obj]
    return obj


def test_objects_nested_more_than_100_deep_are_refused() -> None:
    assert decode(encode(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    with pytest.raises(TypeError, match="nested 100 deep"):
        encode(nested(MAX_DEPTH + 1))


def test_list_that_contains_itself_is_refused() -> None:
    obj: list[Any] = []
    obj.append(obj)
    with pytest.raises(TypeError, match="contains itself"):
        encode({"a": obj})
