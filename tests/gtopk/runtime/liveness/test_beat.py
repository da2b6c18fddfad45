"""A beat is decoded as it was signed, or rejected."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtopk.runtime.liveness.watch import BEAT_BYTES, Beat, State

SECRET, OTHER = bytes(range(32)), bytes(32)
NUMBERS = st.integers(0, 2**32 - 1)
beats = st.builds(
    Beat,
    NUMBERS,
    NUMBERS,
    st.sampled_from(State),
    st.integers(0, 2**64 - 1),
    st.floats(0, 1e9),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=100),
)


@given(beats)
def test_a_beat_arrives_as_it_was_sent(beat):
    assert Beat.decode(beat.encode(SECRET), SECRET) == beat


@given(beats)
def test_who_lacks_the_secret_makes_no_beat(beat):
    assert Beat.decode(beat.encode(OTHER), SECRET) is None


@given(beats, st.data())
def test_a_beat_with_one_bit_changed_is_none(beat, data):
    datagram = bytearray(beat.encode(SECRET))
    place = data.draw(st.integers(0, 8 * len(datagram) - 1))
    datagram[place // 8] ^= 1 << place % 8
    assert Beat.decode(bytes(datagram), SECRET) is None


@given(st.binary(max_size=2 * BEAT_BYTES))
def test_no_datagram_of_a_stranger_is_a_beat_or_an_error(datagram):
    assert Beat.decode(datagram, SECRET) is None


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1000, max_size=3000))
def test_a_long_text_is_cut(text):
    datagram = Beat(0, 0, State.ENDED, 1, 0.0, text).encode(SECRET)
    assert len(datagram) <= BEAT_BYTES
    said = Beat.decode(datagram, SECRET)
    assert said is not None
    assert text.startswith(said.text.rstrip("�"))


def test_a_text_that_is_no_utf_8_arrives_all_the_same():
    said = Beat.decode(Beat(0, 0, State.ENDED, 1, 0.0, "a\udc80").encode(SECRET), SECRET)
    assert said is not None
    assert said.text == "a?"


def signed(content: bytes) -> bytes:
    return content + hmac.digest(SECRET, content, "sha256")


WHOLE = Beat(1, 2, State.LOST, 3, 0.5, "gone").encode(SECRET)[:-32]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        WHOLE[:8],
        WHOLE[: -len("gone") - 1],  # one byte less than a head
        WHOLE[:-1],  # less text than declared
        WHOLE + b"!",
        b"X" + WHOLE[1:],  # another magic
        WHOLE[:16] + bytes([5]) + WHOLE[17:],  # not a state
        WHOLE[:20] + (601).to_bytes(4, "little") + WHOLE[24:40] + bytes(601),  # too long
    ],
)
def test_what_the_secret_has_signed_and_is_none_is_none_either(content):
    assert Beat.decode(signed(WHOLE), SECRET) is not None
    assert Beat.decode(signed(content), SECRET) is None
