"""checksum: 64 bits of any bytes, by multiplications that every machine has.

    data      | block 0 | block 1 | ... | last, filled up with zeros |      4096 bytes each
    block     sum of ((low_i + a_i) mod 2^32) * ((high_i + b_i) mod 2^32)   over its 64-bit words
    in all    h = (h + block) * STEP for each block, from h = seed + bytes; then mixed; mod 2^64

The sum is the NH of UMAC (Black et al. 1999, section 4), its keys a_i, b_i those of SplitMix64
(Steele et al. 2014). Keys are public: a guard against accidents, not against adversaries. Of NH
over random keys two texts collide with a chance of 2^-32 at most. So here: damage to one 32-bit
half of a word is missed only where the other half is the negative of its key (one value in 2^32),
damage all over a message with a chance of about 2^-64.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ...vector import Array

BLOCK_BYTES: Final = 4096
STEP: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


def mix(number: int) -> int:
    """Return the output function of SplitMix64: a bijection of 64 bits that spreads each bit."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _MASK
    return number ^ (number >> 31)


# Key i is of the i-th word: its low half for the word's low half, its high half for the high one.
_KEYS: Final = np.array(
    [mix((i + 1) * STEP & _MASK) for i in range(BLOCK_BYTES // 8)], np.uint64
).view(np.uint32)


def checksum(data: Array, seed: int = 0) -> int:
    """Return 64 bits for `data` (uint8 [n]); seed: the checksum of the bytes before it."""
    whole = data.size // BLOCK_BYTES * BLOCK_BYTES
    rest = data[whole:]
    filled = np.zeros(-(-rest.size // 8) * 8, np.uint8)
    filled[: rest.size] = rest
    blocks = _sums(data[:whole].view(np.uint32).reshape(-1, _KEYS.size)).tolist()
    if rest.size:
        blocks += _sums(filled.view(np.uint32).reshape(1, -1)).tolist()
    total = (seed + data.size) & _MASK
    for block in blocks:
        total = (total + block) * STEP & _MASK
    return mix(total)


def _sums(words: Array) -> Array:
    """Return the NH of each row of words, uint32 [blocks, 2 m]."""
    keyed = words + _KEYS[: words.shape[1]]
    products = keyed[:, ::2].astype(np.uint64) * keyed[:, 1::2]
    sums: Array = products.sum(axis=1, dtype=np.uint64)
    return sums
