/* The kernels' loops over blocks, compiled once for every instruction set (see cpu.c, which includes this several times).
 *
 * Before including: LOOP(name) names the function for this instruction set, TARGET is its attribute, and
 * BAGUA_AVX2 tells that intrinsics of AVX2 and F16C may be used. Loops are plain so that the compiler
 * vectorizes them; intrinsics stand only where it does that badly, and give the bits of arithmetic.h.
 */

/* ---- values of any dtype as floats, and back ---- */

TARGET static void LOOP(floats_from)(const void *restrict from, int dtype, int64_t count, float *restrict to) {
  const uint16_t *restrict narrow = from;
  int64_t i = 0;
  if (dtype == BF16) {
    for (; i < count; i++) to[i] = float_from_bf16(narrow[i]);
    return;
  }
#ifdef BAGUA_AVX2
  for (; i + 8 <= count; i += 8) {
    __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(narrow + i)));
    __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    _mm256_storeu_ps(to + i, _mm256_blendv_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(BAGUA_NAN_BITS)), is_nan));
  }
#endif
  for (; i < count; i++) to[i] = float_from_half(narrow[i]);
}

TARGET static void LOOP(floats_to)(const float *restrict from, int64_t count, void *restrict to, int dtype) {
  uint16_t *restrict narrow = to;
  int64_t i = 0;
  if (dtype == BF16) {
    for (; i < count; i++) narrow[i] = bf16_from_float(from[i]);
    return;
  }
#ifdef BAGUA_AVX2
  for (; i + 8 <= count; i += 8) {
    __m256 x = _mm256_loadu_ps(from + i);
    __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    x = _mm256_blendv_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(BAGUA_NAN_BITS)), is_nan);
    _mm_storeu_si128((__m128i *)(narrow + i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  for (; i < count; i++) narrow[i] = half_from_float(from[i]);
}

/* The floats themselves where they are floats, else converted into `space`. */
TARGET static const float *LOOP(as_floats)(const void *values, int dtype, int64_t at, int64_t count, float *space) {
  if (dtype == F32) return (const float *)values + at;
  LOOP(floats_from)((const uint16_t *)values + at, dtype, count, space);
  return space;
}

/* ---- min-max uint8 ---- */

TARGET static minmax_grid LOOP(grid_over)(const float *restrict x, int64_t count) {
  int32_t least = INT32_MAX, most = INT32_MIN;
  for (int64_t i = 0; i < count; i++) {
    int32_t key = order_key(x[i]);
    least = key < least ? key : least;
    most = key > most ? key : most;
  }
  return minmax_grid_of(float_of_key(least), float_of_key(most));
}

TARGET static minmax_grid LOOP(grid_over_narrow)(const uint16_t *restrict x, int dtype, int64_t count) {
  int16_t least = INT16_MAX, most = INT16_MIN;
  for (int64_t i = 0; i < count; i++) {
    int16_t key = narrow_key(x[i]);
    least = key < least ? key : least;
    most = key > most ? key : most;
  }
  uint16_t low = narrow_of_key(least), high = narrow_of_key(most);
  return dtype == BF16 ? minmax_grid_of(float_from_bf16(low), float_from_bf16(high))
                       : minmax_grid_of(float_from_half(low), float_from_half(high));
}

/* Every x lies in the grid's range, so that no code is far outside 0 to 255 before it is clamped. */
TARGET static void LOOP(encode)(const float *restrict x, int64_t count, float low, float inverse, uint8_t *restrict codes) {
  int64_t i = 0;
#ifdef BAGUA_AVX2
  __m256 lows = _mm256_set1_ps(low), inverses = _mm256_set1_ps(inverse);
  __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* packing works within halves of a register */
  for (; i + 32 <= count; i += 32) {
    __m256i code[4];
    for (int j = 0; j < 4; j++) /* rounds to nearest, ties to even, and packing clamps */
      code[j] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(x + i + 8 * j), lows), inverses));
    __m256i first = _mm256_packs_epi32(code[0], code[1]), second = _mm256_packs_epi32(code[2], code[3]);
    __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), order);
    _mm256_storeu_si256((__m256i *)(codes + i), bytes);
  }
#endif
  for (; i < count; i++) codes[i] = minmax_encode(x[i], low, inverse);
}

TARGET static int LOOP(write_header)(minmax_grid grid, int64_t count, float *header, uint8_t *codes) {
  header[0] = grid.low;
  header[1] = grid.step;
  if (!minmax_is_poisoned(grid.low)) return 1;
  memset(codes, 0, (size_t)count);
  return 0;
}

TARGET static void LOOP(minmax_compress_floats)(const float *x, int64_t count, float *header, uint8_t *codes) {
  minmax_grid grid = LOOP(grid_over)(x, count);
  if (LOOP(write_header)(grid, count, header, codes)) LOOP(encode)(x, count, grid.low, grid.inverse, codes);
}

TARGET static void LOOP(minmax_compress)(const void *values, int dtype, int64_t at, int64_t count, float *header,
                                         uint8_t *codes) {
  if (dtype == F32) {
    LOOP(minmax_compress_floats)((const float *)values + at, count, header, codes);
    return;
  }
  const uint16_t *narrow = (const uint16_t *)values + at;
  minmax_grid grid = LOOP(grid_over_narrow)(narrow, dtype, count);
  if (!LOOP(write_header)(grid, count, header, codes)) return;
  float space[BAGUA_NEAR] __attribute__((aligned(64)));
  for (int64_t i = 0; i < count; i += BAGUA_NEAR) {
    int64_t here = count - i < BAGUA_NEAR ? count - i : BAGUA_NEAR;
    LOOP(floats_from)(narrow + i, dtype, here, space);
    LOOP(encode)(space, here, grid.low, grid.inverse, codes + i);
  }
}

TARGET static void LOOP(fill_nan)(float *restrict x, int64_t count) {
  for (int64_t i = 0; i < count; i++) x[i] = canonical_nan();
}

/* x = scale * decoded, or x + decoded where `onto`. Multiplying by a scale of 1 changes no bit. */
TARGET static void LOOP(minmax_decode_block)(const float *header, const uint8_t *restrict codes, int64_t count, int onto,
                                             float scale, float *restrict x) {
  float low = header[0], step = header[1];
  if (minmax_is_poisoned(low)) {
    LOOP(fill_nan)(x, count);
  } else if (onto) {
    for (int64_t i = 0; i < count; i++) x[i] += minmax_decode(codes[i], low, step);
  } else if (scale == 1.0f) {
    for (int64_t i = 0; i < count; i++) x[i] = minmax_decode(codes[i], low, step);
  } else {
    for (int64_t i = 0; i < count; i++) x[i] = minmax_decode(codes[i], low, step) * scale;
  }
}

/* ---- one bit ---- */

/* The block's sum in the order that arithmetic.h fixes: strided lanes, then folds by halves. */
TARGET static float LOOP(sum_of_magnitudes)(const float *restrict x, int64_t count) {
  float lanes[BAGUA_SUM_LANES] __attribute__((aligned(64)));
  int64_t width = BAGUA_SUM_LANES;
  while (width >= 2 && width / 2 >= count) width /= 2; /* the lanes left out would add +0 */
  for (int64_t j = 0; j < width; j++) lanes[j] = 0.0f;
  for (int64_t at = 0; at < count; at += width) {
    int64_t here = count - at < width ? count - at : width;
    for (int64_t j = 0; j < here; j++) lanes[j] += magnitude_of(x[at + j]);
  }
  for (width /= 2; width > 0; width /= 2)
    for (int64_t j = 0; j < width; j++) lanes[j] += lanes[j + width];
  return lanes[0];
}

TARGET static void LOOP(pack_signs)(const float *restrict t, int64_t count, uint8_t *restrict bits) {
  int64_t i = 0;
#if defined(BAGUA_AVX2)
  for (; i + 8 <= count; i += 8)
    bits[i / 8] = (uint8_t)_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(t + i), _mm256_setzero_ps(), _CMP_LT_OQ));
#elif defined(__SSE2__)
  for (; i + 8 <= count; i += 8) {
    int first = _mm_movemask_ps(_mm_cmplt_ps(_mm_loadu_ps(t + i), _mm_setzero_ps()));
    int second = _mm_movemask_ps(_mm_cmplt_ps(_mm_loadu_ps(t + i + 4), _mm_setzero_ps()));
    bits[i / 8] = (uint8_t)(first | second << 4);
  }
#endif
  for (; i < count; i += 8) {
    uint32_t byte = 0;
    for (int64_t j = 0; j < 8 && i + j < count; j++) byte |= one_bit_encode(t[i + j]) << j;
    bits[i / 8] = (uint8_t)byte;
  }
}

/* left may be error itself. */
TARGET static void LOOP(one_bit_compress)(const void *values, int dtype, int64_t at, int64_t count, const float *error,
                                          float *left, float *header, uint8_t *restrict bits) {
  float space[BAGUA_MAX_BLOCK] __attribute__((aligned(64)));
  float t[BAGUA_MAX_BLOCK] __attribute__((aligned(64)));
  const float *restrict x = LOOP(as_floats)(values, dtype, at, count, space);
  for (int64_t i = 0; i < count; i++) t[i] = x[i] + error[i];
  float scale = one_bit_scale(LOOP(sum_of_magnitudes)(t, count), count);
  header[0] = scale;
  if (scale != scale) {
    memset(bits, 0, (size_t)((count + 7) / 8));
    for (int64_t i = 0; i < count; i++) left[i] = finite_or_zero(error[i]);
    return;
  }
  LOOP(pack_signs)(t, count, bits);
  for (int64_t i = 0; i < count; i++) left[i] = t[i] - one_bit_decode(one_bit_encode(t[i]), scale);
}

TARGET static void LOOP(one_bit_decode_block)(const float *header, const uint8_t *restrict bits, int64_t count, int onto,
                                              float scale, float *restrict x) {
  float magnitude = header[0];
  if (magnitude != magnitude) {
    LOOP(fill_nan)(x, count);
    return;
  }
  if (!onto) magnitude *= scale; /* the same as scaling the decoded value: only the sign differs */
  int64_t i = 0;
#ifdef BAGUA_AVX2
  __m256i plus = _mm256_castps_si256(_mm256_set1_ps(magnitude)), sign = _mm256_set1_epi32(INT32_MIN);
  __m256i places = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
  for (; i + 8 <= count; i += 8) {
    __m256i signs = _mm256_and_si256(_mm256_sllv_epi32(_mm256_set1_epi32(bits[i / 8]), places), sign);
    __m256 decoded = _mm256_castsi256_ps(_mm256_xor_si256(plus, signs));
    _mm256_storeu_ps(x + i, onto ? _mm256_add_ps(_mm256_loadu_ps(x + i), decoded) : decoded);
  }
#endif
  for (; i < count; i++) {
    float decoded = one_bit_decode((uint32_t)bits[i / 8] >> (i & 7) & 1u, magnitude);
    x[i] = onto ? x[i] + decoded : decoded;
  }
}

/* ---- what is done with decoded blocks ---- */

typedef void (*LOOP(decode_function))(const float *, const uint8_t *, int64_t, int, float, float *);

/* out[at...] = scale * sum over peers, or out + that where `add`. header and codes: of the first peer; others follow at
 * `stride` bytes. One peer: plain decompression. */
TARGET static void LOOP(decode_sum_near)(LOOP(decode_function) decode, const uint8_t *header, const uint8_t *codes,
                                         int64_t stride, int64_t peers, int64_t count, float scale, int add, void *out,
                                         int dtype, int64_t at) {
  float space[BAGUA_NEAR] __attribute__((aligned(64)));
  int direct = dtype == F32 && !add;
  float *restrict sum = direct ? (float *)out + at : space;
  int alone = peers == 1 && !add;
  decode((const float *)header, codes, count, 0, alone ? scale : 1.0f, sum);
  for (int64_t p = 1; p < peers; p++) decode((const float *)(header + p * stride), codes + p * stride, count, 1, 1.0f, sum);
  if (add) {
    float old_space[BAGUA_NEAR] __attribute__((aligned(64)));
    const float *old = LOOP(as_floats)(out, dtype, at, count, old_space);
    for (int64_t i = 0; i < count; i++) sum[i] = scaled_onto(old[i], scale, sum[i]);
    if (dtype == F32) memcpy((float *)out + at, sum, (size_t)count * sizeof(float));
  } else if (!alone) {
    for (int64_t i = 0; i < count; i++) sum[i] = canonical(sum[i] * scale);
  }
  if (dtype != F32) LOOP(floats_to)(sum, count, (uint16_t *)out + at, dtype);
}

TARGET static void LOOP(decode_sum)(int one_bit, const uint8_t *header, const uint8_t *codes, int64_t stride, int64_t peers,
                                    int64_t count, float scale, int add, void *out, int dtype, int64_t at) {
  LOOP(decode_function) decode = one_bit ? LOOP(one_bit_decode_block) : LOOP(minmax_decode_block);
  for (int64_t i = 0; i < count; i += BAGUA_NEAR) {
    int64_t here = count - i < BAGUA_NEAR ? count - i : BAGUA_NEAR;
    LOOP(decode_sum_near)(decode, header, codes + (one_bit ? i / 8 : i), stride, peers, here, scale, add, out, dtype, at + i);
  }
}

TARGET static void LOOP(minmax_reduce)(const uint8_t *header, const uint8_t *codes, int64_t stride, int64_t peers,
                                       int64_t count, float scale, float *out_header, uint8_t *out_codes) {
  float sum[BAGUA_MAX_BLOCK] __attribute__((aligned(64)));
  for (int64_t p = 0; p < peers; p++)
    LOOP(minmax_decode_block)((const float *)(header + p * stride), codes + p * stride, count, p > 0, 1.0f, sum);
  if (scale != 1.0f)
    for (int64_t i = 0; i < count; i++) sum[i] *= scale;
  LOOP(minmax_compress_floats)(sum, count, out_header, out_codes);
}

/* ---- values against values; count is at most BAGUA_MAX_BLOCK ---- */

TARGET static void LOOP(weighted_average)(void *x, int x_dtype, const void *y, int y_dtype, int64_t at, int64_t count,
                                          float x_weight, float y_weight) {
  float x_space[BAGUA_MAX_BLOCK] __attribute__((aligned(64)));
  float y_space[BAGUA_MAX_BLOCK] __attribute__((aligned(64)));
  const float *ys = LOOP(as_floats)(y, y_dtype, at, count, y_space);
  float *xs = (float *)LOOP(as_floats)(x, x_dtype, at, count, x_space);
  for (int64_t i = 0; i < count; i++) xs[i] = weighted(xs[i], x_weight, ys[i], y_weight);
  if (x_dtype != F32) LOOP(floats_to)(xs, count, (uint16_t *)x + at, x_dtype);
}

TARGET static void LOOP(add_difference)(void *x, int x_dtype, const void *newer, const void *older, int other_dtype,
                                        int64_t at, int64_t count, float scale) {
  float x_space[BAGUA_MAX_BLOCK] __attribute__((aligned(64)));
  float newer_space[BAGUA_MAX_BLOCK] __attribute__((aligned(64)));
  float older_space[BAGUA_MAX_BLOCK] __attribute__((aligned(64)));
  const float *news = LOOP(as_floats)(newer, other_dtype, at, count, newer_space);
  const float *olds = LOOP(as_floats)(older, other_dtype, at, count, older_space);
  float *xs = (float *)LOOP(as_floats)(x, x_dtype, at, count, x_space);
  for (int64_t i = 0; i < count; i++) xs[i] = moved_by_difference(xs[i], news[i], olds[i], scale);
  if (x_dtype != F32) LOOP(floats_to)(xs, count, (uint16_t *)x + at, x_dtype);
}

/* before, after: NULL if nothing is smoothed. count is at most BAGUA_STEPS_BLOCK here: one block. */
TARGET static void LOOP(adam_steps)(void *x, int dtype, const void *second, const float *before, float *after, int64_t at,
                                    int64_t count, float eps, float reach, float decay) {
  float x_space[BAGUA_STEPS_BLOCK] __attribute__((aligned(64)));
  float second_space[BAGUA_STEPS_BLOCK] __attribute__((aligned(64)));
  float steps[BAGUA_STEPS_BLOCK] __attribute__((aligned(64)));
  const float *xs = LOOP(as_floats)(x, dtype, at, count, x_space);
  const float *seconds = LOOP(as_floats)(second, dtype, at, count, second_space);
  for (int64_t i = 0; i < count; i++) steps[i] = adam_step_of(xs[i], seconds[i], eps);
  float limit = reach * (LOOP(sum_of_magnitudes)(steps, count) / (float)count);
  for (int64_t i = 0; i < count; i++) steps[i] = cut_to(steps[i], limit);
  if (before) {
    for (int64_t i = 0; i < count; i++) {
      steps[i] = smoothed(before[at + i], decay, steps[i]);
      after[at + i] = finite_or_zero(steps[i]);
    }
  }
  if (dtype == F32)
    for (int64_t i = 0; i < count; i++) ((float *)x)[at + i] = canonical(steps[i]);
  else
    LOOP(floats_to)(steps, count, (uint16_t *)x + at, dtype);
}

TARGET static void LOOP(adam_gradients)(void *x, int dtype, const void *second, int64_t at, int64_t count, float eps) {
  float x_space[BAGUA_MAX_BLOCK] __attribute__((aligned(64)));
  float second_space[BAGUA_MAX_BLOCK] __attribute__((aligned(64)));
  const float *seconds = LOOP(as_floats)(second, dtype, at, count, second_space);
  float *xs = (float *)LOOP(as_floats)(x, dtype, at, count, x_space);
  for (int64_t i = 0; i < count; i++) xs[i] = gradient_of_step(xs[i], seconds[i], eps);
  if (dtype != F32) LOOP(floats_to)(xs, count, (uint16_t *)x + at, dtype);
}

TARGET static void LOOP(adam_update)(void *parameter, int dtype, const void *gradient, void *first, const void *second,
                                     int64_t at, int64_t count, float share, float weight_decay, float eps, float rate) {
  float parameter_space[BAGUA_NEAR] __attribute__((aligned(64)));
  float gradient_space[BAGUA_NEAR] __attribute__((aligned(64)));
  float first_space[BAGUA_NEAR] __attribute__((aligned(64)));
  float second_space[BAGUA_NEAR] __attribute__((aligned(64)));
  const float *gradients = LOOP(as_floats)(gradient, dtype, at, count, gradient_space);
  const float *seconds = LOOP(as_floats)(second, dtype, at, count, second_space);
  float *parameters = (float *)LOOP(as_floats)(parameter, dtype, at, count, parameter_space);
  float *firsts = (float *)LOOP(as_floats)(first, dtype, at, count, first_space);
  for (int64_t i = 0; i < count; i++) {
    firsts[i] = adam_first(firsts[i], gradients[i], parameters[i], share, weight_decay);
    parameters[i] = adam_moved(parameters[i], firsts[i], seconds[i], eps, rate);
  }
  if (dtype == F32) return;
  LOOP(floats_to)(firsts, count, (uint16_t *)first + at, dtype);
  LOOP(floats_to)(parameters, count, (uint16_t *)parameter + at, dtype);
}

/* ---- copies with a cast; RAW is bytes ---- */

TARGET static void LOOP(cast)(const void *from, int from_dtype, void *to, int to_dtype, int64_t count) {
  float space[BAGUA_MAX_BLOCK] __attribute__((aligned(64)));
  for (int64_t at = 0; at < count; at += BAGUA_MAX_BLOCK) {
    int64_t here = count - at < BAGUA_MAX_BLOCK ? count - at : BAGUA_MAX_BLOCK;
    if (to_dtype == F32) {
      LOOP(floats_from)((const uint16_t *)from + at, from_dtype, here, (float *)to + at);
    } else {
      const float *x = LOOP(as_floats)(from, from_dtype, at, here, space);
      LOOP(floats_to)(x, here, (uint16_t *)to + at, to_dtype);
    }
  }
}

static const loops LOOP(table) = {
    LOOP(minmax_compress), LOOP(minmax_reduce),    LOOP(one_bit_compress), LOOP(decode_sum),
    LOOP(weighted_average), LOOP(add_difference), LOOP(adam_steps),        LOOP(adam_gradients),
    LOOP(adam_update),      LOOP(cast),
};
