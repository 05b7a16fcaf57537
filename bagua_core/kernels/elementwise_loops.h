/* The loops of elementwise programs, compiled once for every instruction set as those of cpu_loops.h are. */

/* Registers may name the same memory, never memory that overlaps otherwise. ahead: how many of them are memories of which
 * the next tile follows this one; each operation has a share of it fetched into the second cache meanwhile. */
TARGET static void LOOP(elementwise)(const elementwise_step *steps, int64_t count, const float *numbers, float *const *registers,
                                     int64_t elements, int64_t ahead) {
  for (const elementwise_step *step = steps; step < steps + count; step++) {
    int64_t done = step - steps, bytes = elements * (int64_t)sizeof(float);
    for (int64_t i = 0; i < ahead; i++)
      for (int64_t at = bytes * done / count / 64 * 64; at < bytes * (done + 1) / count; at += 64)
        __builtin_prefetch((const char *)(registers[i] + elements) + at, 0, 2);
    float *to = registers[step->to];
    const float *xs = registers[step->x], *ys = registers[step->y], *zs = registers[step->z];
    const float s = numbers[step->s];
    switch (step->operation) {
#define BAGUA_CASE(name, value)                        \
  case ELEMENTWISE_##name:                             \
    _Pragma("GCC ivdep") for (int64_t i = 0; i < elements; i++) { \
      const float x = xs[i], y = ys[i], z = zs[i];     \
      (void)x, (void)y, (void)z;                       \
      to[i] = (value);                                 \
    }                                                  \
    break;
      BAGUA_ELEMENTWISE(BAGUA_CASE)
#undef BAGUA_CASE
      case ELEMENTWISE_given_sqrt:
        bagua_given.sqrt((int)elements, xs, to, bagua_given.mode);
        break;
    }
  }
}
