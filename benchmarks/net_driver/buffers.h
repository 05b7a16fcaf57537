// Named memory of the driver, and the lines that fill, check and show it.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "patterns.h"
#include "words.h"

inline std::string as_hex(const unsigned char* data, size_t bytes) {
  static const char digits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes);
  for (size_t i = 0; i < bytes; i++) {
    text += digits[data[i] >> 4];
    text += digits[data[i] & 15];
  }
  return text;
}

class Buffers {
 public:
  std::vector<char>& memory(const std::string& name) {
    auto found = buffers_.find(name);
    if (found == buffers_.end()) throw Wrong("no such buffer");
    return found->second;
  }

  std::string fill(Words& words) {  // buffer NAME BYTES SEED; a seed below 0: zeros
    std::string name = words.word();
    auto bytes = static_cast<size_t>(words.number());
    long seed = words.number();
    auto& data = buffers_[name];
    data.assign(bytes, 0);
    if (seed >= 0) fill_pattern(data.data(), bytes, static_cast<uint64_t>(seed));
    return "ok";
  }

  std::string check(Words& words) {  // check NAME BYTES SEED: the pattern's first bytes, and zeros after them
    auto& data = memory(words.word());
    auto bytes = static_cast<size_t>(words.number());
    size_t same = first_difference(data.data(), bytes, static_cast<uint64_t>(words.number()));
    while (same >= bytes && same < data.size() && data[same] == 0) same++;
    return same == data.size() ? "ok same" : "ok differs at " + std::to_string(same);
  }

  std::string show(Words& words) {  // bytes NAME: in hexadecimal digits
    auto& data = memory(words.word());
    return "ok " + as_hex(reinterpret_cast<unsigned char*>(data.data()), data.size());
  }

 private:
  std::map<std::string, std::vector<char>> buffers_;
};
