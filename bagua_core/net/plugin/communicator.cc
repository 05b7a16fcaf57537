#include "communicator.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "counters.h"
#include "log.h"
#include "settings.h"

namespace bagua {

constexpr double CHECK_EVERY_S = 1;

Communicator::Communicator(std::string peer, unsigned events)
    : peer_(std::move(peer)), epoll_(epoll_create1(EPOLL_CLOEXEC)), events_(events) {
  if (!epoll_) throw std::runtime_error("no epoll instance: " + std::string(std::strerror(errno)));
}

Communicator::~Communicator() = default;

void Communicator::adopt(std::unique_ptr<Connection> connection) {
  epoll_event event{};
  event.events = events_ | EPOLLRDHUP | EPOLLET;
  event.data.ptr = connection.get();
  if (epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, connection->socket.fd(), &event) != 0)
    throw std::runtime_error("epoll takes no connection: " + std::string(std::strerror(errno)));
  connections_.push_back(std::move(connection));
  add(counters.connections_opened);
  add(counters.connections_open);
}

void Communicator::progress() {
  Lock held(mutex_);
  try {
    progress(held);
  } catch (const std::exception& error) {  // no memory; the caller is a thread of the plugin
    fail(nccl::InternalError, error.what());
  }
}

void Communicator::progress(Lock& held) {
  if (failure_ != nccl::Success || closing_) return;
  take_events();
  for (bool again = true; again;) {
    again = false;
    for (std::size_t i = 0; i < connections_.size(); i++) {
      Connection& c = *connections_[i];
      if (c.busy || !c.ready) continue;
      again = work(c, held) || again;
      if (failure_ != nccl::Success || closing_) return;
    }
  }
  Clock::time_point now = Clock::now();
  if (seconds_since(checked_, now) >= CHECK_EVERY_S) check_health(now);
}

void Communicator::take_events() {
  bool waits = false;
  for (const auto& c : connections_) waits = waits || !c->ready;
  if (!waits) return;
  epoll_event events[64];
  int n = epoll_wait(epoll_.fd(), events, 64, 0);
  for (int i = 0; i < n; i++) {
    Connection& c = *static_cast<Connection*>(events[i].data.ptr);
    c.ready = c.event = true;
    if (events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) c.hung_up = true;
  }
}

void Communicator::begin_call(Connection& c, Lock& held) {
  c.busy = true;
  c.event = false;
  busy_++;
  held.unlock();
}

void Communicator::end_call(Connection& c, Lock& held) {
  held.lock();
  c.busy = false;
  if (--busy_ == 0 && closing_) idle_.notify_all();
}

void Communicator::check_health(Clock::time_point now) {
  // A pause of the caller is not the peer's silence.
  bool paused = seconds_since(checked_, now) > 5 * CHECK_EVERY_S;
  double since_check_s = seconds_since(checked_, now);
  checked_ = now;
  for (const auto& c : connections_) {
    Health health = health_of(c->socket.fd());
    add(counters.retransmits, health.retransmits - std::min(c->retransmits, health.retransmits));
    c->retransmits = health.retransmits;
    if (paused || !health.waits_for_peer || health.since_answer_s < since_check_s)
      c->unanswered_since = now;
    else if (seconds_since(c->unanswered_since, now) > settings().timeout_s)
      return fail(nccl::RemoteError, "its host has not answered for BAGUA_NET_TIMEOUT_S");
  }
}

void Communicator::fail(nccl::Result result, const std::string& what) {
  if (failure_ != nccl::Success) return;
  failure_ = result;
  add(counters.failures);
  if (!closing_) BAGUA_WARN("the communicator with %s failed: %s", peer_.c_str(), what.c_str());
  for (const auto& c : connections_) shutdown(c->socket.fd(), SHUT_RDWR);
}

void Communicator::fail_with_errno(int error) {
  bool local = error == ENOMEM || error == ENOBUFS || error == EBADF || error == EFAULT || error == EINVAL;
  fail(local ? nccl::SystemError : nccl::RemoteError, std::strerror(error));
}

void Communicator::end(bool orderly) {
  Lock held(mutex_);
  closing_ = true;
  idle_.wait(held, [this] { return busy_ == 0; });  // system calls on non-blocking sockets: they return
  for (const auto& c : connections_) {
    std::uint64_t all = health_of(c->socket.fd()).retransmits;
    add(counters.retransmits, all - std::min(c->retransmits, all));
    if (!orderly || failure_ != nccl::Success) reset_on_close(c->socket.fd());
    counters.connections_open--;
  }
  connections_.clear();
}

}  // namespace bagua
