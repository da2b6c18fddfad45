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
def test_beat_survives_round_trip(beat):
    assert Beat.decode(beat.encode(SECRET), SECRET) == beat


@given(beats)
def test_beat_with_another_secret_is_rejected(beat):
    assert Beat.decode(beat.encode(OTHER), SECRET) is None


@given(beats, st.data())
def test_beat_with_one_changed_bit_is_rejected(beat, data):
    datagram = bytearray(beat.encode(SECRET))
    place = data.draw(st.integers(0, 8 * len(datagram) - 1))
    datagram[place // 8] ^= 1 << place % 8
    assert Beat.decode(bytes(datagram), SECRET) is None


@given(st.binary(max_size=2 * BEAT_BYTES))
def test_random_datagram_is_rejected_without_an_error(datagram):
    assert Beat.decode(datagram, SECRET) is None


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1000, max_size=3000))
def test_long_text_of_a_beat_is_truncated(text):
    datagram = Beat(0, 0, State.ENDED, 1, 0.0, text).encode(SECRET)
    assert len(datagram) <= BEAT_BYTES
    beat = Beat.decode(datagram, SECRET)
    assert beat is not None
    assert text.startswith(beat.text.rstrip("�"))


def test_text_that_is_not_utf_8_is_sent_with_a_replacement_character():
    beat = Beat.decode(Beat(0, 0, State.ENDED, 1, 0.0, "a\udc80").encode(SECRET), SECRET)
    assert beat is not None
    assert beat.text == "a?"


def signed(content: bytes) -> bytes:
    return content + hmac.digest(SECRET, content, "sha256")


VALID = Beat(1, 2, State.LOST, 3, 0.5, "gone").encode(SECRET)[:-32]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        VALID[:8],
        VALID[: -len("gone") - 1],  # one byte less than a head
        VALID[:-1],  # less text than declared
        VALID + b"!",
        b"X" + VALID[1:],  # another magic
        VALID[:16] + bytes([5]) + VALID[17:],  # not a state
        VALID[:20] + (601).to_bytes(4, "little") + VALID[24:40] + bytes(601),  # too long
    ],
)
def test_signed_but_malformed_beat_is_rejected(content):
    assert Beat.decode(signed(VALID), SECRET) is not None
    assert Beat.decode(signed(content), SECRET) is None
