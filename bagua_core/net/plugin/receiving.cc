#include "receiving.h"

#include <sys/epoll.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include "counters.h"
#include "helpers.h"
#include "settings.h"

namespace bagua {
namespace {

constexpr std::size_t MOST_TAGS = 4096, MOST_ASIDE_BYTES = 256 << 20;
constexpr std::uint64_t MOST_AHEAD = 1 << 16;  // messages of a tag that the peer is ahead of the buffers
constexpr double PAUSE_S = 1;                  // a caller that tests less often is itself what is slow

}  // namespace

Receiver::Receiver(std::vector<Socket> sockets, const std::string& peer) : Communicator(peer, EPOLLIN) {
  for (Socket& s : sockets) adopt(std::make_unique<Lane>(std::move(s)));
  Helpers::add(this);
}

Receiver::~Receiver() {
  Helpers::remove(this);
  end(awaited_ == 0);
}

nccl::Result Receiver::receive(int n, void** data, const std::size_t* bytes, const int* tags, Request** request) {
  Lock held(mutex_);
  *request = nullptr;
  if (failure_ != nccl::Success) return failure_;
  auto free = std::find_if(groups_.begin(), groups_.end(), [](const Group& g) { return g.owner == nullptr; });
  if (free == groups_.end()) return nccl::Success;
  Group& group = *free;
  group.owner = this;
  group.count = group.left = n;
  for (int i = 0; i < n; i++) {
    Tag& tag = tags_[tags[i]];
    std::uint64_t number = tag.posted++;
    Message& m = tag.messages[number];
    m.group = &group;
    m.index = i;
    m.capacity = bytes[i];
    tag.awaited++;
    awaited_++;
    if (m.begun && m.total > m.capacity)
      fail(nccl::InvalidUsage, "a message of " + std::to_string(m.total) + " bytes is larger than its buffer");
    m.buffer = static_cast<char*>(data[i]);
    if (m.complete) finish(tag, number);
  }
  for (const auto& c : connections_) {
    Lane& lane = static_cast<Lane&>(*c);
    if (failure_ == nccl::Success && lane.held_back) parse(lane);
  }
  if (failure_ != nccl::Success) return failure_;
  *request = &group;
  return nccl::Success;
}

nccl::Result Receiver::test(Request* request, int* done, int* bytes) {
  Lock held(mutex_);
  Group& group = *static_cast<Group*>(request);
  if (group.left > 0) {
    progress(held);
    if (group.left > 0) check_silence(group);
  }
  *done = 0;
  if (group.left > 0) return failure_;
  *done = 1;
  for (int i = 0; bytes != nullptr && i < group.count; i++)
    bytes[i] = static_cast<int>(std::min<std::size_t>(group.bytes[i], INT_MAX));
  group.owner = nullptr;
  return nccl::Success;
}

// A peer may be silent for hours between two messages. Within one it may not, nor after it ended a connection.
void Receiver::check_silence(const Group& group) {
  Clock::time_point now = Clock::now();
  if (seconds_since(tested_, now) > PAUSE_S) moved_ = now;
  tested_ = now;
  std::size_t ended = 0, held_back = 0;
  for (const auto& c : connections_) {
    ended += static_cast<Lane&>(*c).ended;
    held_back += static_cast<Lane&>(*c).held_back;
  }
  // Nothing that is awaited is behind a chunk that is held back.
  if (ended + held_back == connections_.size())
    return fail(nccl::RemoteError, "it ended, or went on to later messages, before all of one had come");
  double silent_s = seconds_since(moved_, now);
  if (ended > 0 && held_back == 0 && silent_s > settings().handshake_timeout_s)
    return fail(nccl::RemoteError, "it ended some connections and sends nothing on the others");
  if (silent_s <= settings().timeout_s) return;
  for (const auto& [id, tag] : tags_)
    for (const auto& [number, m] : tag.messages)
      if (m.group == &group && m.begun)
        return fail(nccl::RemoteError, "it has been silent within a message for BAGUA_NET_TIMEOUT_S");
}

bool Receiver::work(Connection& connection, Lock& held) {
  Lane& c = static_cast<Lane&>(connection);
  if (c.held_back || c.ended) return false;
  // While a chunk is under way `staging` is empty; it takes what follows the chunk in the same call.
  iovec parts[2] = {{c.to, c.left}, {c.staging + c.end, STAGING_BYTES - c.end}};
  msghdr message{};
  message.msg_iov = c.left > 0 ? parts : parts + 1;
  message.msg_iovlen = c.left > 0 ? 2 : 1;
  std::size_t asked = c.left + STAGING_BYTES - c.end;
  begin_call(c, held);
  ssize_t n = recvmsg(c.socket.fd(), &message, MSG_DONTWAIT);
  int error = errno;
  end_call(c, held);
  if (n < 0) {
    if (error == EINTR) return true;
    if (error == EAGAIN)
      c.ready = c.event;
    else
      fail_with_errno(error);
    return c.ready && failure_ == nccl::Success;
  }
  if (n == 0) {
    if (c.left > 0 || c.at < c.end) fail(nccl::RemoteError, "it ended a connection within a chunk");
    c.ended = true;
    return false;
  }
  moved_ = Clock::now();
  std::size_t bytes = static_cast<std::size_t>(n), direct = std::min(bytes, c.left);
  c.end += bytes - direct;
  if (direct > 0) arrived(c, direct);
  parse(c);
  if (bytes < asked) exhausted(c);
  return c.ready;
}

void Receiver::parse(Lane& c) {
  c.held_back = false;
  while (failure_ == nccl::Success) {
    if (c.left > 0) {
      std::size_t bytes = std::min(c.left, c.end - c.at);
      if (bytes > 0) {
        std::memcpy(c.to, c.staging + c.at, bytes);
        c.at += bytes;
        arrived(c, bytes);
      }
      if (c.left > 0) break;
    }
    ChunkHeader header;
    if (c.end - c.at < sizeof header) break;
    std::memcpy(&header, c.staging + c.at, sizeof header);
    if (!begin_chunk(c, header)) {
      c.held_back = true;
      return;
    }
    c.at += sizeof header;
    if (c.left == 0) arrived(c, 0);
  }
  std::memmove(c.staging, c.staging + c.at, c.end - c.at);
  c.end -= c.at;
  c.at = 0;
}

// Returns false after a failure, or when the chunk's buffer is not posted.
bool Receiver::begin_chunk(Lane& c, const ChunkHeader& header) {
  if (const char* fault = fault_of(header)) return fail(nccl::RemoteError, fault), false;
  if (tags_.size() >= MOST_TAGS && tags_.count(header.tag) == 0)
    return fail(nccl::RemoteError, "it sends too many different tags"), false;
  Tag& tag = tags_[header.tag];
  Message* m = message_for(header, tag);
  if (m == nullptr) return false;
  if (!m->begun) {
    m->begun = true;
    m->total = header.total_bytes;
  }
  if (m->total != header.total_bytes) return fail(nccl::RemoteError, "chunks of one message differ in its size"), false;
  if (m->group != nullptr && m->total > m->capacity) {
    fail(nccl::InvalidUsage, "a message of " + std::to_string(m->total) + " bytes is larger than its buffer of " +
                                 std::to_string(m->capacity));
    return false;
  }
  if (!claim(*m, header.offset, header.offset + header.bytes))
    return fail(nccl::RemoteError, "it sends a part of a message twice"), false;
  c.message = m;
  c.tag = &tag;
  c.number = header.number;
  c.to = (m->aside ? m->aside.get() : m->buffer) + header.offset;
  c.left = header.bytes;
  return true;
}

Receiver::Message* Receiver::message_for(const ChunkHeader& header, Tag& tag) {
  auto it = tag.messages.find(header.number);
  if (it != tag.messages.end() && !it->second.complete) return &it->second;
  if (it != tag.messages.end() || header.number < tag.posted) {
    fail(nccl::RemoteError, "it sends a message twice");
    return nullptr;
  }
  if (header.number - tag.posted > MOST_AHEAD) {
    fail(nccl::RemoteError, "a message's number is out of range");
    return nullptr;
  }
  // Of one tag, earlier messages are before later ones on every connection: nothing that is awaited is behind this.
  if (awaited_ == tag.awaited) return nullptr;
  if (header.total_bytes > MOST_ASIDE_BYTES - aside_bytes_) {
    fail(nccl::InternalError, "messages for which no buffer is posted need too much memory");
    return nullptr;
  }
  Message& m = tag.messages[header.number];
  m.aside = std::make_unique<char[]>(header.total_bytes + 1);
  aside_bytes_ += header.total_bytes;
  add(counters.set_aside);
  return &m;
}

bool Receiver::claim(Message& m, std::size_t begin, std::size_t end) {
  auto after = std::lower_bound(m.claimed.begin(), m.claimed.end(), std::make_pair(begin, std::size_t{0}));
  if (after != m.claimed.end() && after->first < end) return false;
  if (after != m.claimed.begin() && std::prev(after)->second > begin) return false;
  if (begin == end) return m.claimed.empty();  // an empty message has one chunk
  if (after != m.claimed.begin() && std::prev(after)->second == begin) {
    std::prev(after)->second = end;
    if (after != m.claimed.end() && after->first == end) {
      std::prev(after)->second = after->second;
      m.claimed.erase(after);
    }
  } else if (after != m.claimed.end() && after->first == end) {
    after->first = begin;
  } else {
    m.claimed.insert(after, {begin, end});
  }
  return true;
}

void Receiver::arrived(Lane& c, std::size_t bytes) {
  Message& m = *c.message;
  m.received += bytes;
  c.left -= bytes;
  c.to += bytes;
  add(counters.bytes_received, bytes);
  if (m.received < m.total || c.left > 0) return;
  m.complete = true;
  add(counters.messages_received);
  if (m.group != nullptr) finish(*c.tag, c.number);
}

void Receiver::finish(Tag& tag, std::uint64_t number) {
  auto it = tag.messages.find(number);
  Message& m = it->second;
  if (m.aside) {
    if (m.total <= m.capacity) std::memcpy(m.buffer, m.aside.get(), m.total);
    aside_bytes_ -= m.total;
  }
  m.group->bytes[m.index] = m.total;
  m.group->left--;
  tag.awaited--;
  awaited_--;
  tag.messages.erase(it);
}

}  // namespace bagua
