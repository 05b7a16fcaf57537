#include "settings.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

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
      complain(name, text, "not a number from " + std::to_string(static_cast<long long>(least)) + " to " +
                               std::to_string(static_cast<long long>(most)));
      return;
    }
    value = static_cast<Number>(given);
  }

  void congestion(const char* name) {
    const char* text = std::getenv(name);
    if (text == nullptr || *text == 0) return;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    std::string given(text);
    bool there = fd < 0 || setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, given.data(), given.size()) == 0;
    if (fd >= 0) close(fd);
    if (there)
      values.congestion = given;
    else
      complain(name, text, "none that this kernel offers to this user");
  }

  void complain(const char* name, const char* text, const std::string& what) {
    complaints += std::string(complaints.empty() ? "" : "; ") + name + "='" + std::string(text).substr(0, 32) + "' is " +
                  what + ", its default is used";
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
    r.congestion("BAGUA_NET_CONGESTION");
    return r;
  }();
  return read;
}

}  // namespace

const Settings& settings() { return read_once().values; }
const std::string& settings_complaints() { return read_once().complaints; }

}  // namespace bagua
