#include "settings.h"

#include <cerrno>
#include <cmath>
#include <cstdlib>

namespace bagua {
namespace {

struct Read {
  Settings values;
  std::string complaints;

  // Keeps the default, and says so, where the variable holds no number from `least` to `most`.
  template <class Number>
  void number(const char* name, Number& value, double least, double most) {
    const char* text = std::getenv(name);
    if (text == nullptr || *text == 0) return;
    char* end = nullptr;
    errno = 0;
    double given = std::strtod(text, &end);
    if (*end != 0 || errno != 0 || !std::isfinite(given) || given < least || given > most) {
      complaints += std::string(complaints.empty() ? "" : "; ") + name + "='" + std::string(text).substr(0, 32) +
                    "' is not a number from " + std::to_string(static_cast<long long>(least)) + " to " +
                    std::to_string(static_cast<long long>(most)) + ", its default is used";
      return;
    }
    value = static_cast<Number>(given);
  }
};

const Read& read_once() {
  static const Read read = [] {
    Read r;
    Settings& v = r.values;
    r.number("BAGUA_NET_STREAMS", v.streams, 1, 64);
    r.number("BAGUA_NET_CHUNK_BYTES", v.chunk_bytes, 4096, 1 << 30);
    r.number("BAGUA_NET_LEAST_CHUNK_BYTES", v.least_chunk_bytes, 4096, 1 << 30);
    r.number("BAGUA_NET_UNSENT_BYTES", v.unsent_bytes, 4096, 1 << 30);
    r.number("BAGUA_NET_THREADS", v.threads, 0, 16);
    r.number("BAGUA_NET_TIMEOUT_S", v.timeout_s, 0.1, 86400);
    r.number("BAGUA_NET_HANDSHAKE_TIMEOUT_S", v.handshake_timeout_s, 0.1, 86400);
    if (v.least_chunk_bytes > v.chunk_bytes) v.least_chunk_bytes = v.chunk_bytes;
    if (const char* name = std::getenv("BAGUA_NET_CONGESTION")) v.congestion = name;
    return r;
  }();
  return read;
}

}  // namespace

const Settings& settings() { return read_once().values; }
const std::string& settings_complaints() { return read_once().complaints; }

}  // namespace bagua
