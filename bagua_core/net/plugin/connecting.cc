#include "connecting.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <random>
#include <stdexcept>

#include "counters.h"
#include "log.h"
#include "settings.h"

namespace bagua {
namespace {

constexpr std::size_t MOST_ARRIVING = 512;

struct Connecting {
  const Context* context;
  const void* memory;  // of the handle
  Handle handle;
  std::vector<Socket> sockets;
  std::vector<std::size_t> said;  // bytes of each connection's hello
  std::uint64_t group;
  std::string peer;
  Clock::time_point since, asked;
};

std::mutex mutex;
std::vector<std::unique_ptr<Connecting>> under_way;

std::unique_ptr<Connecting> begin(int traffic_class, const Interface& interface, const void* memory, const Handle& handle) {
  auto c = std::make_unique<Connecting>();
  c->memory = memory;
  c->handle = handle;
  Token random = random_token();
  std::memcpy(&c->group, random.data(), sizeof c->group);
  const Address& own = interface.address;
  Address address = address_of(handle, own.any.sa_family == AF_INET6 ? own.v6.sin6_scope_id : 0);
  c->peer = address.text();
  int streams = std::min<int>(settings().streams, handle.streams);
  for (int i = 0; i < streams; i++) {
    c->sockets.push_back(begin_connect(address));
    if (!c->sockets.back()) throw std::runtime_error("can't connect to " + c->peer + ": " + std::strerror(errno));
    set_traffic_class(c->sockets.back().fd(), address, traffic_class);
  }
  c->said.assign(c->sockets.size(), 0);
  c->since = Clock::now();
  return c;
}

// 0: all are connected and have said their hello. EINPROGRESS, or what went wrong.
int proceed(Connecting& c) {
  int result = 0;
  for (std::size_t i = 0; i < c.sockets.size(); i++) {
    if (c.said[i] == sizeof(Hello)) continue;
    int fd = c.sockets[i].fd();
    if (int error = connect_error(fd); error != 0) {
      if (error != EINPROGRESS) return error;
      result = error;
      continue;
    }
    Hello hello = make_hello(c.handle.token, static_cast<int>(c.sockets.size()), static_cast<int>(i), c.group);
    ssize_t n = send(fd, reinterpret_cast<char*>(&hello) + c.said[i], sizeof hello - c.said[i], MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno != EAGAIN && errno != EINTR) return errno;
    if (n > 0) c.said[i] += static_cast<std::size_t>(n);
    if (c.said[i] < sizeof hello) result = EINPROGRESS;
  }
  return result;
}

void forget_old(Clock::time_point now) {
  for (std::size_t i = under_way.size(); i-- > 0;)
    if (seconds_since(under_way[i]->asked, now) > settings().timeout_s) under_way.erase(under_way.begin() + static_cast<long>(i));
}

}  // namespace

nccl::Result connect(const Context* context, int traffic_class, const Interface& interface, const void* memory,
                     std::unique_ptr<Sender>& sender) {
  Handle handle;
  std::memcpy(&handle, memory, sizeof handle);
  if (const char* fault = fault_of(handle)) {
    BAGUA_WARN("a peer's handle is refused: %s", fault);
    return nccl::RemoteError;
  }
  std::lock_guard held(mutex);
  Clock::time_point now = Clock::now();
  std::size_t at = 0;
  while (at < under_way.size() &&
         (under_way[at]->memory != memory || std::memcmp(&under_way[at]->handle, &handle, sizeof handle) != 0))
    at++;
  if (at == under_way.size()) {
    forget_old(now);
    at = under_way.size();
    under_way.push_back(begin(traffic_class, interface, memory, handle));
    under_way.back()->context = context;
  }
  Connecting& c = *under_way[at];
  c.asked = now;
  int error = proceed(c);
  if (error == EINPROGRESS && seconds_since(c.since, now) > settings().timeout_s) error = ETIMEDOUT;
  if (error == EINPROGRESS) return nccl::Success;
  std::unique_ptr<Connecting> mine = std::move(under_way[at]);
  under_way.erase(under_way.begin() + static_cast<long>(at));
  if (error != 0) {
    BAGUA_WARN("can't connect to %s: %s", mine->peer.c_str(), std::strerror(error));
    return nccl::RemoteError;
  }
  sender = std::make_unique<Sender>(std::move(mine->sockets), mine->peer);
  return nccl::Success;
}

void forget_connects(const Context* context) {
  std::lock_guard held(mutex);
  for (std::size_t i = under_way.size(); i-- > 0;)
    if (under_way[i]->context == context) under_way.erase(under_way.begin() + static_cast<long>(i));
}

Listener::Listener(const Interface& interface, void* handle) : token_(random_token()) {
  Address address = interface.address;
  socket_ = listen_at(address);
  if (!socket_) throw std::runtime_error("can't listen at " + interface.name + ": " + std::strerror(errno));
  Handle mine = make_handle(token_, settings().streams, address);
  std::memset(handle, 0, nccl::HANDLE_BYTES);
  std::memcpy(handle, &mine, sizeof mine);
}

std::unique_ptr<Receiver> Listener::accept() {
  take_connections();
  for (std::size_t i = 0; i < arriving_.size();) {
    if (read_hello(arriving_[i]))
      i++;
    else
      arriving_.erase(arriving_.begin() + static_cast<long>(i));
  }
  Clock::time_point now = Clock::now();
  for (std::size_t i = 0; i < groups_.size(); i++) {
    Group& g = groups_[i];
    bool whole = static_cast<std::size_t>(g.count) == g.sockets.size();
    if (!whole && seconds_since(g.since, now) <= settings().timeout_s) continue;
    Group mine = std::move(g);
    groups_.erase(groups_.begin() + static_cast<long>(i--));
    if (whole) return std::make_unique<Receiver>(std::move(mine.sockets), mine.peer);
    BAGUA_WARN("only %d of %zu connections came from %s: dropped", mine.count, mine.sockets.size(), mine.peer.c_str());
  }
  return nullptr;
}

void Listener::take_connections() {
  for (std::size_t i = 0; i < MOST_ARRIVING; i++) {
    Address from;
    socklen_t bytes = sizeof from;
    Socket socket(accept4(socket_.fd(), &from.any, &bytes, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      if (errno == EAGAIN) break;
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
        throw std::runtime_error(std::string("can't accept connections: ") + std::strerror(errno));
      continue;  // one that ended before it was accepted
    }
    if (!tune(socket.fd())) continue;
    if (arriving_.size() == MOST_ARRIVING) {  // the one that has been silent longest
      arriving_.erase(arriving_.begin());
      add(counters.strangers);
    }
    arriving_.push_back({std::move(socket), {}, 0, Clock::now(), from.text()});
  }
}

bool Listener::read_hello(Arriving& a) {
  ssize_t n = recv(a.socket.fd(), reinterpret_cast<char*>(&a.hello) + a.have, sizeof a.hello - a.have, MSG_DONTWAIT);
  bool goes_on = n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
  if (n > 0) a.have += static_cast<std::size_t>(n);
  if (a.have == sizeof a.hello && accepts(a.hello, token_)) {
    join_group(a);
    return false;
  }
  if (goes_on && a.have < sizeof a.hello && seconds_since(a.since, Clock::now()) <= settings().handshake_timeout_s)
    return true;
  add(counters.strangers);
  BAGUA_INFO("a connection from %s did not authenticate: dropped", a.peer.c_str());
  return false;
}

void Listener::join_group(Arriving& a) {
  std::size_t at = 0;
  while (at < groups_.size() && groups_[at].id != a.hello.group) at++;
  if (at == groups_.size()) groups_.push_back({a.hello.group, std::vector<Socket>(a.hello.streams), 0, Clock::now(), a.peer});
  Group& g = groups_[at];
  if (g.sockets.size() != a.hello.streams || g.sockets[a.hello.index]) {
    BAGUA_WARN("a connection from %s contradicts its others: dropped", a.peer.c_str());
    return;
  }
  g.sockets[a.hello.index] = std::move(a.socket);
  g.count++;
}

}  // namespace bagua
