// Content of buffers that tells where it came from: eight bytes depend on their offset and on a seed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

inline uint64_t pattern_word(uint64_t seed, uint64_t word) {
  uint64_t z = (seed << 40) + word + 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

inline void fill_pattern(char* data, size_t bytes, uint64_t seed) {
  for (size_t at = 0; at < bytes; at += 8) {
    uint64_t word = pattern_word(seed, at / 8);
    memcpy(data + at, &word, bytes - at < 8 ? bytes - at : 8);
  }
}

// Offset of the first byte that is not the pattern's; `bytes` if all are.
inline size_t first_difference(const char* data, size_t bytes, uint64_t seed) {
  for (size_t at = 0; at < bytes; at += 8) {
    uint64_t word = pattern_word(seed, at / 8);
    size_t part = bytes - at < 8 ? bytes - at : 8;
    if (memcmp(data + at, &word, part) == 0) continue;
    for (size_t i = 0; i < part; i++) {
      if (data[at + i] != reinterpret_cast<char*>(&word)[i]) return at + i;
    }
  }
  return bytes;
}
