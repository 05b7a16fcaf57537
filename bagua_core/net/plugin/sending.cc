#include "sending.h"

#include <sys/epoll.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>

#include "chunk_choice.h"
#include "counters.h"
#include "helpers.h"
#include "settings.h"

namespace bagua {
namespace {

constexpr std::size_t WORTH_WAKING_BYTES = 256 << 10;

}  // namespace

Sender::Sender(std::vector<Socket> sockets, const std::string& peer) : Communicator(peer, EPOLLOUT) {
  for (Socket& s : sockets) {
    auto lane = std::make_unique<Lane>(std::move(s));
    flows_.push_back(&lane->flow);
    adopt(std::move(lane));
  }
  Helpers::add(this);
}

Sender::~Sender() {
  Helpers::remove(this);
  end(unfinished_ == 0);
}

nccl::Result Sender::send(const void* data, std::size_t bytes, int tag, Request** request) {
  Lock held(mutex_);
  *request = nullptr;
  if (failure_ != nccl::Success) return failure_;
  if (unfinished_ == MOST) return nccl::Success;
  while (requests_[next_free_].owner != nullptr) next_free_ = (next_free_ + 1) % MOST;
  Outgoing& r = requests_[next_free_];
  static_cast<Request&>(r).owner = this;
  r.data = static_cast<const char*>(data);
  r.bytes = bytes;
  r.assigned = r.written = 0;
  r.whole = false;
  r.tag = tag;
  r.number = numbers_[tag]++;
  unfinished_++;
  unassigned_.push_back(&r);
  unassigned_bytes_ += bytes;
  progress(held);  // a small message is in the kernel when this returns
  if (failure_ != nccl::Success) return failure_;
  *request = &r;
  if (!r.whole && bytes >= WORTH_WAKING_BYTES) Helpers::wake();
  return nccl::Success;
}

nccl::Result Sender::test(Request* request, int* done, int* bytes) {
  Lock held(mutex_);
  Outgoing& r = *static_cast<Outgoing*>(request);
  if (!r.whole) progress(held);
  *done = 0;
  if (!r.whole) return failure_;
  *done = 1;
  if (bytes != nullptr) *bytes = static_cast<int>(std::min<std::size_t>(r.bytes, INT_MAX));
  r.owner = nullptr;
  unfinished_--;
  return nccl::Success;
}

bool Sender::take_chunk(Lane& c) {
  if (unassigned_.empty()) return false;
  Outgoing& r = *unassigned_.front();
  std::size_t left = r.bytes - r.assigned, size = left;
  if (connections_.size() > 1 && (size = chunk_of(c, left)) == NOTHING) return false;
  c.message = &r;
  c.header = {CHUNK_MAGIC, r.tag, r.number, r.bytes, r.assigned, static_cast<std::uint32_t>(size), 0};
  c.header_left = sizeof c.header;
  c.data = r.data + r.assigned;
  c.data_left = size;
  r.assigned += size;
  unassigned_bytes_ -= size;
  if (r.assigned == r.bytes) unassigned_.pop_front();
  add(counters.chunks_sent);
  return true;
}

// What a connection takes of the oldest message; all flows are known afresh.
std::size_t Sender::chunk_of(Lane& c, std::size_t left) {
  Clock::time_point now = Clock::now();
  for (const auto& one : connections_) static_cast<Lane&>(*one).flow.sample_if_due(now, one->socket.fd());
  return chunk_for(c.flow, flows_, {left, unassigned_bytes_}, settings(), now);
}

// Chunk after chunk on one connection while the kernel takes them.
bool Sender::work(Connection& connection, Lock& held) {
  Lane& c = static_cast<Lane&>(connection);
  while (write(c, held) && failure_ == nccl::Success && !closing_) {
  }
  return false;
}

// Whether the kernel took all of a chunk.
bool Sender::write(Lane& c, Lock& held) {
  if (c.message == nullptr && !take_chunk(c)) return false;
  char* header = reinterpret_cast<char*>(&c.header) + sizeof c.header - c.header_left;
  iovec parts[2] = {{header, c.header_left}, {const_cast<char*>(c.data), c.data_left}};
  msghdr message{};
  message.msg_iov = c.header_left > 0 ? parts : parts + 1;
  message.msg_iovlen = c.header_left > 0 ? 2 : 1;
  std::size_t asked = c.header_left + c.data_left;
  begin_call(c, held);
  ssize_t n = sendmsg(c.socket.fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  int error = errno;
  end_call(c, held);
  if (n < 0) {
    if (error == EINTR) return true;
    if (error != EAGAIN) {
      fail_with_errno(error);
      return false;
    }
    n = 0;
  }
  written(c, static_cast<std::size_t>(n));
  if (static_cast<std::size_t>(n) == asked) return true;
  add(counters.stalls);
  c.ready = c.event;
  if (c.hung_up) fail(nccl::RemoteError, "it closed a connection with bytes under way");
  return c.ready;
}

void Sender::written(Lane& c, std::size_t bytes) {
  c.flow.wrote(bytes);
  std::size_t of_header = std::min(bytes, c.header_left);
  bytes -= of_header;
  c.header_left -= of_header;
  c.data += bytes;
  c.data_left -= bytes;
  add(counters.bytes_sent, bytes);
  Outgoing& r = *c.message;
  r.written += bytes;
  if (c.header_left > 0 || c.data_left > 0) return;
  c.message = nullptr;
  if (r.written == r.bytes) {
    r.whole = true;
    add(counters.messages_sent);
  }
}

}  // namespace bagua
