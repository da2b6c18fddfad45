// The checksum of a message, as defined in reference.py, by all blocks in parallel.
//
// launch: any number of blocks; a block takes stretches of 4096 bytes, strided.
//
//   message   | head: 7 words | its checksum | body: stretch 0 | stretch 1 | .. s - 1, zero padded |
//   sums                                       NH(0) STEP^s     NH(1) STEP^(s-1) ..   NH(s-1) STEP
//   result    the last block to finish adds them to (checksum of the head + bytes of the body) STEP^s
//
// Multiplying by powers of STEP replaces the reference's loop, which cannot be run in parallel.
#include "block.cuh"

constexpr u64 STEP = 0x9E3779B97F4A7C15ull;
constexpr u64 STRETCH = 4096, HEAD = 56, BODY = 64;  // bytes

static __device__ u64 mix(u64 number) {
  number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9ull;
  number = (number ^ number >> 27) * 0x94D049BB133111EBull;
  return number ^ number >> 31;
}

static __device__ u64 step_to_the(u64 power) {
  u64 result = 1;
  for (u64 factor = STEP; power; power >>= 1, factor *= factor)
    if (power & 1) result *= factor;
  return result;
}

// The term of the NH sum for a stretch's word.
static __device__ u64 keyed(u64 word, u64 place) {
  const u64 key = mix((place + 1) * STEP);
  return (u64)((u32)word + (u32)key) * (u64)((u32)(word >> 32) + (u32)(key >> 32));
}

// The 8 bytes from `at` on, padded with zeros beyond `end`; `data` is aligned.
static __device__ u64 word_at(const u8* data, u64 at, u64 end) {
  if (at + 8 <= end) return *(const u64*)(data + at);
  u64 word = 0;
  for (u64 byte = at; byte < end; ++byte) word |= (u64)data[byte] << (byte - at) * 8;
  return word;
}

// sum, ticket: must be 0, and are left 0.
__global__ __launch_bounds__(THREADS) void checksum(
    const u8* message_m, u64 m, u64* sum, u32* ticket, u64* result) {
  const u64 stretches = (m - BODY + STRETCH - 1) / STRETCH;
  u64 mine = 0;
  for (u64 stretch = blockIdx.x; stretch < stretches; stretch += gridDim.x) {
    const u64 start = BODY + stretch * STRETCH, end = start + STRETCH < m ? start + STRETCH : m;
    u64 products = 0;
    for (u64 place = threadIdx.x; start + place * 8 < end; place += THREADS)
      products += keyed(word_at(message_m, start + place * 8, end), place);
    mine += products * step_to_the(stretches - stretch);
  }
  mine = block_sum(mine);
  if (threadIdx.x == 0) atomicAdd(sum, mine);
  if (!last_block(ticket) || threadIdx.x) return;
  u64 head = 0;
  for (u64 place = 0; place < HEAD / 8; ++place)
    head += keyed(*(const u64*)(message_m + place * 8), place);
  const u64 seed = mix((head + HEAD) * STEP);
  *result = mix(*sum + (seed + (m - BODY)) * step_to_the(stretches));
  *sum = 0;
}
