// A switch with a delay: passes on every frame between its ports, so long after it came.
//
//     relay_forwarder DELAY_S PORT...
//
// Runs in the network namespace of the ports, as root, until SIGTERM; then prints its account as a line of JSON. Learns
// as a switch does which hardware address is behind which port. Frames travel as the kernel hands them over, large ones
// in one piece and without checksums (the virtio header says what is left to do). How large they are is the sender's
// choice: one flow of 1 Gbit/s makes 4,000 frames a second, sixteen that share the link six times as many, because the
// kernel cuts a frame for each flow's millisecond. So a frame must cost little here. Keeps no bandwidth limit: the
// ports' own queues do.

#include <arpa/inet.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr std::size_t HEADER_BYTES = 10;  // virtio_net_hdr, before each frame
constexpr std::size_t FRAME_BYTES = HEADER_BYTES + 14 + 65536 + 64;
// Several times what a port's queue holds at 10 Gbit/s: where a link is too slow its queue drops, and not the relay.
constexpr int BUFFER_BYTES = 256 * 1024 * 1024;
constexpr int TAKEN_AT_ONCE = 16;  // frames of one port, before those that are due are sent
constexpr std::int64_t LATE_NS = 1'000'000;
constexpr std::int64_t LONGEST_WAIT_NS = 1'000'000'000;

volatile std::sig_atomic_t ended = 0;

std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

struct Frame {
  std::int64_t due_ns;
  std::size_t source;
  std::string bytes;
};

class Relay {
 public:
  explicit Relay(std::int64_t delay_ns) : delay_ns_(delay_ns) {}

  bool open(const char* name) {
    // protocol 0 receives nothing until it is bound, so no frame of another port comes in
    int fd = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), one = 1;
    sockaddr_ll address{};
    address.sll_family = AF_PACKET;
    address.sll_protocol = htons(ETH_P_ALL);
    address.sll_ifindex = static_cast<int>(if_nametoindex(name));
    if (fd < 0 || address.sll_ifindex == 0 || setsockopt(fd, SOL_PACKET, PACKET_VNET_HDR, &one, sizeof one) != 0 ||
        setsockopt(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &one, sizeof one) != 0 ||
        setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &BUFFER_BYTES, sizeof BUFFER_BYTES) != 0 ||
        setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &BUFFER_BYTES, sizeof BUFFER_BYTES) != 0 ||
        bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
      std::fprintf(stderr, "port %s: %s\n", name, std::strerror(errno));
      return false;
    }
    ports_.push_back({fd, POLLIN, 0});
    return true;
  }

  // Until SIGTERM, which only arrives while this waits.
  void run(const sigset_t& while_waiting) {
    while (!ended) {
      std::int64_t wait_ns = LONGEST_WAIT_NS;
      if (!waiting_.empty()) wait_ns = std::clamp<std::int64_t>(waiting_.front().due_ns - now_ns(), 0, LONGEST_WAIT_NS);
      timespec wait{wait_ns / 1'000'000'000, wait_ns % 1'000'000'000};
      if (ppoll(ports_.data(), ports_.size(), &wait, &while_waiting) > 0)
        for (std::size_t i = 0; i < ports_.size(); i++)
          if (ports_[i].revents != 0) take(i);
      send_due();
    }
  }

  void print_account(const char* priority) const {
    timespec used{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    std::printf("{\"forwarded\": %lld, \"dropped\": %lld, \"late\": %lld, \"latest_s\": %.9f, \"cpu_s\": %.6f, \"priority\": \"%s\"}\n",
                forwarded_, dropped_, late_, static_cast<double>(latest_ns_) / 1e9,
                static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) / 1e9, priority);
    std::fflush(stdout);
  }

 private:
  void take(std::size_t port) {
    std::int64_t due_ns = now_ns() + delay_ns_;
    for (int i = 0; i < TAKEN_AT_ONCE; i++) {
      ssize_t n = recv(ports_[port].fd, buffer_.data(), buffer_.size(), 0);
      if (n < 0) {
        if (errno != EAGAIN && errno != EINTR) dropped_++;  // the port went down: the cable was pulled
        return;
      }
      if (static_cast<std::size_t>(n) < HEADER_BYTES + 14) continue;
      behind_[std::string(buffer_.data() + HEADER_BYTES + 6, 6)] = port;
      waiting_.push_back({due_ns, port, std::string(buffer_.data(), static_cast<std::size_t>(n))});
    }
  }

  void send_due() {
    while (!waiting_.empty()) {
      std::int64_t late_ns = now_ns() - waiting_.front().due_ns;
      if (late_ns < 0) return;
      Frame frame = std::move(waiting_.front());
      waiting_.pop_front();
      latest_ns_ = std::max(latest_ns_, late_ns);
      late_ += late_ns > LATE_NS;
      auto target = behind_.find(frame.bytes.substr(HEADER_BYTES, 6));
      if (target != behind_.end()) {
        send(target->second, frame);
        continue;
      }
      for (std::size_t i = 0; i < ports_.size(); i++)  // to all, or to one that has not spoken yet
        if (i != frame.source) send(i, frame);
    }
  }

  void send(std::size_t port, const Frame& frame) {
    if (::send(ports_[port].fd, frame.bytes.data(), frame.bytes.size(), 0) >= 0)
      forwarded_++;
    else
      dropped_++;  // a full queue, or a port that is down: lost, as in any network
  }

  std::int64_t delay_ns_;
  std::vector<pollfd> ports_;
  std::vector<char> buffer_ = std::vector<char>(FRAME_BYTES);
  std::unordered_map<std::string, std::size_t> behind_;  // hardware address -> port
  std::deque<Frame> waiting_;  // the delay is the same for all, so the first to come is the first to go
  long long forwarded_ = 0, dropped_ = 0, late_ = 0;
  std::int64_t latest_ns_ = 0;
};

// Before all that trains on this machine: a late relay is a slower network. How that was reached.
const char* be_prompt() {
  sched_param first{};
  first.sched_priority = 1;
  if (sched_setscheduler(0, SCHED_FIFO, &first) == 0) return "fifo";
  return setpriority(PRIO_PROCESS, 0, -20) == 0 ? "nice" : "none";
}

}  // namespace

int main(int count, char** words) {
  if (count < 3) return std::fprintf(stderr, "usage: relay_forwarder DELAY_S PORT...\n"), 2;
  Relay relay(static_cast<std::int64_t>(std::atof(words[1]) * 1e9));
  sigset_t blocked, before;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGTERM);
  sigprocmask(SIG_BLOCK, &blocked, &before);
  std::signal(SIGTERM, [](int) { ended = 1; });
  for (int i = 2; i < count; i++)
    if (!relay.open(words[i])) return 1;
  const char* priority = be_prompt();
  std::printf("ready\n");
  std::fflush(stdout);
  relay.run(before);
  relay.print_account(priority);
  return 0;
}
