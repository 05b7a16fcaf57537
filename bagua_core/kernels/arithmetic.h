/* The arithmetic of all kernels, on scalars: compiled for CUDA and for the CPU, equal bit for bit.
 *
 * What makes the results equal: every operation is one that IEEE 754 rounds in one way only (+, -, *, /, square roots and
 * comparisons of floats, and integers); compilers may not contract a * b + c (-ffp-contract=off, --fmad=false), flush
 * denormals or approximate divisions; reductions have an order of their own; no NaN that an operation made is
 * ever stored, since processors differ in its bits. Knows nothing of memory, threads and dtypes' names. C11 and CUDA C++.
 */
#ifndef BAGUA_ARITHMETIC_H
#define BAGUA_ARITHMETIC_H

#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
#define BAGUA_FUNCTION static __device__ __forceinline__
BAGUA_FUNCTION uint32_t bits_of(float x) { return __float_as_uint(x); }
BAGUA_FUNCTION float float_of(uint32_t bits) { return __uint_as_float(bits); }
BAGUA_FUNCTION float root_of(float x) { return __fsqrt_rn(x); }
#else
#include <math.h>
#include <stdint.h>
#include <string.h>
#define BAGUA_FUNCTION static inline __attribute__((always_inline))
BAGUA_FUNCTION uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
BAGUA_FUNCTION float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
BAGUA_FUNCTION float root_of(float x) { return sqrtf(x); }
#endif

#define BAGUA_MAX_BLOCK 8192 /* elements; the CPU keeps a block on the stack, CUDA in registers or shared memory */
#define BAGUA_ALIGNMENT 16   /* bytes; parts of a compressed tensor begin at multiples of it */
#define BAGUA_SUM_LANES 1024 /* one_bit: lane j sums the elements j, j + 1024, ..., then lanes fold by halves */

#define BAGUA_NAN_BITS 0x7fc00000u
#define BAGUA_LARGEST_BITS 0x7e800000u /* 2**126: twice it is still finite, and so is every sum in a grid */

/* ---- layout: [headers, padded to 16 bytes][payload, padded with zeros to 16 bytes] ---- */

BAGUA_FUNCTION int64_t blocks_in(int64_t count, int64_t block_size) { return (count + block_size - 1) / block_size; }
BAGUA_FUNCTION int64_t aligned(int64_t bytes) { return (bytes + BAGUA_ALIGNMENT - 1) / BAGUA_ALIGNMENT * BAGUA_ALIGNMENT; }

/* Min-max: a header is (low, step), fp32. */
BAGUA_FUNCTION int64_t minmax_payload_at(int64_t count, int64_t block_size) {
  return aligned(8 * blocks_in(count, block_size));
}
BAGUA_FUNCTION int64_t minmax_bytes(int64_t count, int64_t block_size) {
  return minmax_payload_at(count, block_size) + aligned(count);
}

/* One bit: a header is the mean magnitude, fp32. */
BAGUA_FUNCTION int64_t one_bit_payload_at(int64_t count, int64_t block_size) {
  return aligned(4 * blocks_in(count, block_size));
}
BAGUA_FUNCTION int64_t one_bit_bytes(int64_t count, int64_t block_size) {
  return one_bit_payload_at(count, block_size) + aligned((count + 7) / 8);
}

/* ---- NaN, fp16, bf16 ---- */

BAGUA_FUNCTION float canonical_nan(void) { return float_of(BAGUA_NAN_BITS); }
BAGUA_FUNCTION float canonical(float x) { return x == x ? x : canonical_nan(); }

BAGUA_FUNCTION float magnitude_of(float x) { return float_of(bits_of(x) & 0x7fffffffu); }

/* For what is remembered from step to step: nothing in it may poison all steps to come. */
BAGUA_FUNCTION float finite_or_zero(float x) { return magnitude_of(x) <= 3.40282347e38f ? x : 0.0f; }

BAGUA_FUNCTION float float_from_bf16(uint16_t b) { return canonical(float_of((uint32_t)b << 16)); }

BAGUA_FUNCTION uint16_t bf16_from_float(float x) {
  uint32_t bits = bits_of(x);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16; /* to nearest, ties to even; may carry to infinity */
  return (uint16_t)(x == x ? rounded : BAGUA_NAN_BITS >> 16);
}

BAGUA_FUNCTION float float_from_half(uint16_t h) {
  uint32_t magnitude = (uint32_t)(h & 0x7fffu) << 13;
  /* 2**112 moves the exponent from half's bias to float's, denormals included, and is exact. */
  float finite = float_of(magnitude) * 5.192296858534828e33f;
  uint32_t special = magnitude > 0x0f800000u ? BAGUA_NAN_BITS : 0x7f800000u;
  uint32_t bits = magnitude >= 0x0f800000u ? special : bits_of(finite);
  uint32_t sign = bits > 0x7f800000u ? 0u : (uint32_t)(h & 0x8000u) << 16; /* a NaN has no sign here */
  return float_of(bits | sign);
}

BAGUA_FUNCTION uint16_t half_from_float(float x) {
  uint32_t bits = bits_of(x);
  uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t sign = (bits >> 16) & 0x8000u;
  /* 0.5 has the distance between denormal halfs as the distance to its next float, so adding it rounds as needed. */
  uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  uint32_t finite = magnitude < 0x38800000u ? denormal : normal;
  uint32_t rounded = magnitude >= 0x477ff000u ? 0x7c00u : finite; /* from 65520 on: infinity */
  return (uint16_t)(magnitude > 0x7f800000u ? 0x7e00u : (rounded | sign));
}

/* ---- min-max uint8 ---- */

/* A signed integer that orders as the float does, with -0 below +0 and NaNs outside the infinities: minima and maxima of
 * keys need no order of reduction, and a NaN cannot hide. Narrow floats, being signed magnitudes too, have 16-bit keys. */
BAGUA_FUNCTION int32_t order_key(float x) {
  int32_t bits = (int32_t)bits_of(x);
  return bits ^ (int32_t)((uint32_t)(bits >> 31) >> 1);
}
BAGUA_FUNCTION float float_of_key(int32_t key) { return float_of((uint32_t)(key ^ (int32_t)((uint32_t)(key >> 31) >> 1))); }
BAGUA_FUNCTION int16_t narrow_key(uint16_t bits) {
  int16_t number = (int16_t)bits;
  return (int16_t)(number ^ (int16_t)((uint16_t)(number >> 15) >> 1));
}
BAGUA_FUNCTION uint16_t narrow_of_key(int16_t key) { return (uint16_t)(key ^ (int16_t)((uint16_t)(key >> 15) >> 1)); }

/* Codes 0 to 255 stand for low + code * step. */
typedef struct {
  float low, step; /* low is NaN for a block that cannot be represented */
  float inverse;   /* of step */
} minmax_grid;

/* least, most: the floats of a block's smallest and greatest key. */
BAGUA_FUNCTION minmax_grid minmax_grid_of(float least, float most) {
  minmax_grid grid = {canonical_nan(), 0.0f, 0.0f};
  float largest = float_of(BAGUA_LARGEST_BITS);
  if (!(magnitude_of(least) <= largest) || !(magnitude_of(most) <= largest)) return grid;
  float step = (most - least) / 255.0f;
  step = step < 1.17549435e-38f ? 1.17549435e-38f : step; /* 2**-126: the inverse stays finite, equal values have a grid */
  float inverse = 1.0f / step;
  /* A range that holds zero has zero on the grid: parameters without a gradient must get none. It is moved by at most
   * half a step for that, and the bound of half a step holds all the same: only ends that moved inwards are clamped. */
  float zero_code = (-least * inverse + 12582912.0f) - 12582912.0f;
  grid.low = least <= 0.0f && most >= 0.0f ? 0.0f - zero_code * step : least;
  grid.step = step;
  grid.inverse = inverse;
  return grid;
}

BAGUA_FUNCTION int minmax_is_poisoned(float low) { return low != low; }

BAGUA_FUNCTION uint8_t minmax_encode(float x, float low, float inverse) {
  float code = (x - low) * inverse;
  code = code > 0.0f ? code : 0.0f;
  code = code < 255.0f ? code : 255.0f;
  /* 1.5 * 2**23: the sum's last bits are the nearest integer, ties to even. */
  return (uint8_t)(bits_of(code + 12582912.0f) & 255u);
}

/* Not a fused multiply-add: the two roundings make zero's code give exactly zero. */
BAGUA_FUNCTION float minmax_decode(uint8_t code, float low, float step) { return low + (float)code * step; }

/* ---- one bit ---- */

/* sum: of the magnitudes of the block's `count` elements. */
BAGUA_FUNCTION float one_bit_scale(float sum, int64_t count) {
  return sum <= 3.40282347e38f ? sum / (float)count : canonical_nan();
}

BAGUA_FUNCTION uint32_t one_bit_encode(float t) { return t < 0.0f ? 1u : 0u; }

/* bit: 1 for minus. A poisoned scale stays NaN without a sign. */
BAGUA_FUNCTION float one_bit_decode(uint32_t bit, float scale) {
  return float_of(bits_of(scale) ^ (scale == scale ? bit << 31 : 0u));
}

/* ---- averages ---- */

BAGUA_FUNCTION float scaled_onto(float old, float scale, float x) { return canonical(old + scale * x); }
BAGUA_FUNCTION float weighted(float x, float x_weight, float y, float y_weight) {
  return canonical(x_weight * x + y_weight * y);
}
BAGUA_FUNCTION float moved_by_difference(float x, float newer, float older, float scale) {
  return canonical(x + scale * (newer - older));
}

/* ---- Adam whose second moment rests ---- */

#define BAGUA_STEPS_BLOCK 4096 /* elements whose mean magnitude says how far one of them may go */

/* How large a step Adam takes to be one, up to a factor; infinite for what rests. */
BAGUA_FUNCTION float adam_scale(float second, float eps) { return root_of(second) + eps; }

BAGUA_FUNCTION float adam_step_of(float gradient, float second, float eps) { return gradient / adam_scale(second, eps); }

/* No comparison holds for NaN, so neither a NaN nor its block is hidden. */
BAGUA_FUNCTION float cut_to(float x, float limit) { return x > limit ? limit : (x < -limit ? -limit : x); }

BAGUA_FUNCTION float smoothed(float before, float decay, float x) { return decay * before + x; }

BAGUA_FUNCTION float gradient_of_step(float step, float second, float eps) {
  float scale = adam_scale(second, eps);
  return canonical(step * (scale <= 3.40282347e38f ? scale : 0.0f));
}

BAGUA_FUNCTION float adam_first(float first, float gradient, float parameter, float share, float weight_decay) {
  return canonical(first + share * ((gradient + weight_decay * parameter) - first));
}
BAGUA_FUNCTION float adam_moved(float parameter, float first, float second, float eps, float rate) {
  return canonical(parameter - rate * (first / adam_scale(second, eps)));
}

#endif
