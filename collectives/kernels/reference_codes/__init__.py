"""The wire's hot loops in NumPy: the reference for their twins, and the fallback without them.

    checksum.py   any bytes -> 64 bits
    blocks.py     indices <-> 16-bit offsets in blocks of 64Ki; are they in order, and in range?
    rice.py       indices <-> Rice codes of their gaps, near the entropy bound
    floats.py     values <-> 16-bit floats
    int8.py       values <-> 8-bit integers, with a power of two for each 64 of them
    few_bits.py   values <-> integers of 4, 3 or 2 bits, with a scale for each 256 of them
    scale.py      the powers of two

`pack_...` writes into a buffer with room for `..._capacity` bytes and returns how many it took.
`unpack_...` reads bytes from any sender: a ValueError says what is wrong with them.
"""

from .blocks import blocks_capacity, in_order, pack_blocks, unpack_blocks
from .checksum import checksum
from .few_bits import (
    few_bits_bytes,
    pack_int2,
    pack_int3,
    pack_int4,
    unpack_int2,
    unpack_int3,
    unpack_int4,
)
from .floats import pack_bf16, pack_fp16, unpack_bf16, unpack_fp16
from .int8 import int8_bytes, pack_int8, unpack_int8
from .rice import pack_rice, rice_capacity, unpack_rice
from .scale import exponent_range

__all__ = [
    "blocks_capacity",
    "checksum",
    "exponent_range",
    "few_bits_bytes",
    "in_order",
    "int8_bytes",
    "pack_bf16",
    "pack_blocks",
    "pack_fp16",
    "pack_int2",
    "pack_int3",
    "pack_int4",
    "pack_int8",
    "pack_rice",
    "rice_capacity",
    "unpack_bf16",
    "unpack_blocks",
    "unpack_fp16",
    "unpack_int2",
    "unpack_int3",
    "unpack_int4",
    "unpack_int8",
    "unpack_rice",
]
