"""Fixtures: decoding bytes must raise one kind of error, or return an object."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest

from gtopk.runtime.object_codec import ObjectFormatError, decode


@pytest.fixture(autouse=True, scope="module")
def without_pickle() -> Iterator[None]:
    """Keep this machine's own settings out of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GTOPK_ALLOW_PICKLE", raising=False)
        yield


@pytest.fixture(scope="session")
def refused() -> Callable[[bytes], str]:
    """Return a function that checks that bytes raise the expected error, and returns its text."""

    def text_of(data: bytes) -> str:
        with pytest.raises(ObjectFormatError) as caught:
            decode(data)
        return str(caught.value)

    return text_of


@pytest.fixture(scope="session")
def decodes_or_is_refused() -> Callable[[bytes], None]:
    """Decode bytes that may or may not be valid."""

    def check(data: bytes) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of some dtypes when a tensor is made
            try:
                decode(data)
            except ObjectFormatError:
                return

    return check
