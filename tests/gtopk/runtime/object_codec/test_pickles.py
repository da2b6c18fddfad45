"""Other types are sent as pickles, if both sides allow it."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest
import torch

from gtopk.runtime.object_codec import ObjectFormatError, decode, encode, holds_pickle


class Unpicklable:
    def __reduce__(self) -> str:
        raise RuntimeError("no way")


@pytest.fixture(autouse=True)
def allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GTOPK_ALLOW_PICKLE", "1")


def test_only_objects_without_a_code_are_pickled() -> None:
    obj = {"a": [Decimal("1.5"), 1], "b": torch.ones(2), "c": np.array([None, "x"])}
    data = encode(obj)
    assert holds_pickle(data)
    back = decode(data)
    assert back["a"] == obj["a"]
    assert torch.equal(back["b"], torch.ones(2))
    assert back["c"].tolist() == [None, "x"]


def test_objects_of_known_types_hold_no_pickle() -> None:
    assert not holds_pickle(encode({"a": [torch.ones(2), 1]}))


def test_pickle_is_used_when_cloudpickle_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert decode(encode(Decimal("1.5"))) == Decimal("1.5")
    with pytest.raises(TypeError, match=r"cannot pickle .* pip install cloudpickle to send funct"):
        encode(lambda: None)


def test_rank_that_does_not_allow_pickles_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(Decimal("1.5"))
    monkeypatch.setenv("GTOPK_ALLOW_PICKLE", "0")
    with pytest.raises(ObjectFormatError, match="set GTOPK_ALLOW_PICKLE=1 on this rank too"):
        decode(data)


def test_pickle_that_the_flags_do_not_announce_is_refused() -> None:
    data = bytearray(encode(Decimal("1.5")))
    data[6:8] = b"\0\0"
    with pytest.raises(ObjectFormatError, match="flags do not say so"):
        decode(data)


def test_error_names_the_place_of_an_object_that_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match=r"cannot pickle the .*Unpicklable at \['a'\]: no way"):
        encode({"a": Unpicklable()})


def test_allow_pickle_argument_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="GTOPK_ALLOW_PICKLE=1"):
        encode(Decimal("1.5"), allow_pickle=False)
    data = encode(Decimal("1.5"))
    with pytest.raises(ObjectFormatError, match="holds a pickle"):
        decode(data, allow_pickle=False)
    monkeypatch.delenv("GTOPK_ALLOW_PICKLE")
    assert encode(Decimal("1.5"), allow_pickle=True) == data
    assert decode(data, allow_pickle=True) == Decimal("1.5")
