// TCP sockets: addresses, opening, options, and what the kernel knows of a connection.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

namespace bagua {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point then, Clock::time_point now) {
  return std::chrono::duration<double>(now - then).count();
}

struct Address {
  union {
    sockaddr any;
    sockaddr_in v4;
    sockaddr_in6 v6;
  };
  Address() : v6{} {}
  socklen_t bytes() const { return any.sa_family == AF_INET ? sizeof v4 : sizeof v6; }
  std::string text() const;  // 10.0.0.1:4711, [fe80::1%2]:4711
};

// Owns a descriptor.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : fd_(descriptor) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket();
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Both return an invalid socket, with errno set, when they fail. `address` gets the port that the kernel chose.
Socket listen_at(Address& address);
Socket begin_connect(const Address& address);

// Non-blocking, no delay, keepalive, congestion control, bound of unsent bytes. Returns false with errno set.
bool tune(int fd);

// NCCL's trafficClass as the byte of the IP header that RoCE puts it in (DSCP and ECN; TCP keeps the bits of ECN). A
// value outside of that byte, as UNDEFINED, changes nothing.
void set_traffic_class(int fd, const Address& peer, int traffic_class);

// The error of a socket whose connection was begun; 0 if none, EINPROGRESS while it lasts.
int connect_error(int fd);

// What is unread and unsent goes at once, and the peer learns of it.
void reset_on_close(int fd);

struct Health {
  std::uint64_t retransmits = 0;    // segments since the connection began
  double round_trip_s = 0;          // smoothed
  double least_round_trip_s = 0;    // without what queues add
  std::uint64_t window_bytes = 0;   // what congestion control lets be under way
  double paced_rate = 0;            // bytes a second, the most that congestion control lets out
  std::uint64_t acknowledged = 0;   // bytes since the connection began
  double busy_s = 0;                // during which bytes were not acknowledged; in steps of the kernel's clock
  bool waits_for_peer = false;      // segments or probes are unanswered
  double since_answer_s = 0;        // the peer's last acknowledgement
};
Health health_of(int fd);

}  // namespace bagua
