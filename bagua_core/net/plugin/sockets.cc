#include "sockets.h"

#include <arpa/inet.h>
#include <linux/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "settings.h"

namespace bagua {
namespace {

constexpr std::uint64_t FIRST_WINDOW = 10;  // segments: the kernel's TCP_INIT_CWND

// What the congestion window will be when the next byte is sent: the kernel halves it for each timeout of idleness, and
// only then. Not that of BBR, which paces instead.
std::uint64_t next_window(int fd, const tcp_info& info) {
  std::uint64_t window = info.tcpi_snd_cwnd, rto_ms = std::max(info.tcpi_rto / 1000, 1U);
  std::uint64_t timeouts = info.tcpi_unacked > 0 ? 0 : info.tcpi_last_data_sent / rto_ms;
  if (timeouts == 0 || window <= FIRST_WINDOW) return window;
  char name[16] = "";
  socklen_t bytes = sizeof name;
  if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &bytes) != 0 || std::strncmp(name, "bbr", 3) == 0) return window;
  return std::max(window >> std::min<std::uint64_t>(timeouts, 63), FIRST_WINDOW);
}

bool set(int fd, int level, int option, int value) { return setsockopt(fd, level, option, &value, sizeof value) == 0; }

}  // namespace

std::string Address::text() const {
  char host[INET6_ADDRSTRLEN] = "?";
  if (any.sa_family == AF_INET) {
    inet_ntop(AF_INET, &v4.sin_addr, host, sizeof host);
    return std::string(host) + ":" + std::to_string(ntohs(v4.sin_port));
  }
  inet_ntop(AF_INET6, &v6.sin6_addr, host, sizeof host);
  std::string scope = v6.sin6_scope_id == 0 ? "" : "%" + std::to_string(v6.sin6_scope_id);
  return "[" + std::string(host) + scope + "]:" + std::to_string(ntohs(v6.sin6_port));
}

Socket::~Socket() {
  if (fd_ >= 0) close(fd_);
}

Socket listen_at(Address& address) {
  Socket socket(::socket(address.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  socklen_t bytes = address.bytes();
  if (!socket || bind(socket.fd(), &address.any, bytes) != 0 || listen(socket.fd(), 16384) != 0 ||
      getsockname(socket.fd(), &address.any, &bytes) != 0)
    return Socket();
  return socket;
}

Socket begin_connect(const Address& address) {
  Socket socket(::socket(address.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket || !tune(socket.fd())) return Socket();
  if (connect(socket.fd(), &address.any, address.bytes()) != 0 && errno != EINPROGRESS) return Socket();
  return socket;
}

bool tune(int fd) {
  const Settings& s = settings();
  // A peer that vanished while nothing is under way: probes begin after half of the timeout, ten in the other half; fewer
  // where it is so short that they would be less than a second apart.
  // Not TCP_USER_TIMEOUT: it also ends connections to a living peer that does not read for so long.
  int idle_s = std::max(1, static_cast<int>(s.timeout_s / 2)), every_s = std::max(1, static_cast<int>(s.timeout_s / 20));
  int probes = std::clamp(static_cast<int>(s.timeout_s - idle_s) / every_s, 1, 10);
  if (!set(fd, IPPROTO_TCP, TCP_NODELAY, 1) || !set(fd, SOL_SOCKET, SO_KEEPALIVE, 1) ||
      !set(fd, IPPROTO_TCP, TCP_KEEPIDLE, idle_s) || !set(fd, IPPROTO_TCP, TCP_KEEPINTVL, every_s) ||
      !set(fd, IPPROTO_TCP, TCP_KEEPCNT, probes) ||
      !set(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, static_cast<int>(s.unsent_bytes)))
    return false;
  return s.congestion.empty() ||
         setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, s.congestion.data(), s.congestion.size()) == 0;
}

void set_traffic_class(int fd, const Address& peer, int traffic_class) {
  if (traffic_class < 0 || traffic_class > 255) return;
  if (peer.any.sa_family == AF_INET6)
    set(fd, IPPROTO_IPV6, IPV6_TCLASS, traffic_class);
  else
    set(fd, IPPROTO_IP, IP_TOS, traffic_class);
}

int connect_error(int fd) {
  pollfd poll_it{fd, POLLOUT, 0};
  if (poll(&poll_it, 1, 0) == 0) return EINPROGRESS;
  int error = 0;
  socklen_t bytes = sizeof error;
  return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes) != 0 ? errno : error;
}

void reset_on_close(int fd) {
  linger now{1, 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
}

Health health_of(int fd) {
  tcp_info info{};
  socklen_t bytes = sizeof info;
  Health health;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) return health;
  health.retransmits = info.tcpi_total_retrans;
  health.round_trip_s = info.tcpi_rtt / 1e6;
  health.least_round_trip_s = std::min(info.tcpi_min_rtt, info.tcpi_rtt) / 1e6;
  health.window_bytes = next_window(fd, info) * info.tcpi_snd_mss;
  health.paced_rate = static_cast<double>(info.tcpi_pacing_rate);
  health.acknowledged = info.tcpi_bytes_acked;
  health.busy_s = static_cast<double>(info.tcpi_busy_time) / 1e6;
  // A peer whose window is closed answers each probe, so probes without an answer mean that it is gone.
  health.waits_for_peer = info.tcpi_unacked > 0 || info.tcpi_probes >= 3;
  health.since_answer_s = info.tcpi_last_ack_recv / 1000.0;
  return health;
}

}  // namespace bagua
