#include "handshake.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace bagua {
namespace {

constexpr char MAGIC[8] = {'B', 'A', 'G', 'U', 'A', 'N', 'E', 'T'};

}  // namespace

Token random_token() {
  Token token;
  std::size_t have = 0;
  while (have < token.size()) {
    ssize_t n = getrandom(token.data() + have, token.size() - have, 0);
    if (n < 0 && errno != EINTR) throw std::runtime_error("the kernel gives no random bytes");
    if (n > 0) have += static_cast<std::size_t>(n);
  }
  return token;
}

Handle make_handle(const Token& token, int streams, const Address& address) {
  Handle handle{};
  std::memcpy(handle.magic, MAGIC, sizeof MAGIC);
  handle.protocol = PROTOCOL;
  handle.streams = static_cast<std::uint16_t>(streams);
  handle.token = token;
  handle.family = address.any.sa_family;
  if (address.any.sa_family == AF_INET) {
    handle.port = address.v4.sin_port;
    std::memcpy(handle.ip, &address.v4.sin_addr, 4);
  } else {
    handle.port = address.v6.sin6_port;
    std::memcpy(handle.ip, &address.v6.sin6_addr, 16);
  }
  return handle;
}

const char* fault_of(const Handle& handle) {
  if (std::memcmp(handle.magic, MAGIC, sizeof MAGIC) != 0) return "it is no handle of Bagua-Net: the peer uses another network";
  if (handle.protocol != PROTOCOL) return "the peer's Bagua-Net speaks another version: install the same on all hosts";
  if (handle.streams < 1 || handle.streams > MOST_STREAMS) return "its number of connections is out of range";
  if (handle.family != AF_INET && handle.family != AF_INET6) return "its address is of an unknown family";
  return nullptr;
}

Address address_of(const Handle& handle, std::uint32_t scope) {
  Address address;
  address.any.sa_family = handle.family;
  if (handle.family == AF_INET) {
    address.v4.sin_port = handle.port;
    std::memcpy(&address.v4.sin_addr, handle.ip, 4);
  } else {
    address.v6.sin6_port = handle.port;
    std::memcpy(&address.v6.sin6_addr, handle.ip, 16);
    if (IN6_IS_ADDR_LINKLOCAL(&address.v6.sin6_addr)) address.v6.sin6_scope_id = scope;
  }
  return address;
}

Hello make_hello(const Token& token, int streams, int index, std::uint64_t group) {
  Hello hello{};
  std::memcpy(hello.magic, MAGIC, sizeof MAGIC);
  hello.protocol = PROTOCOL;
  hello.streams = static_cast<std::uint16_t>(streams);
  hello.index = static_cast<std::uint16_t>(index);
  hello.token = token;
  hello.group = group;
  return hello;
}

bool accepts(const Hello& hello, const Token& token) {
  unsigned difference = 0;
  for (std::size_t i = 0; i < token.size(); i++) difference |= hello.token[i] ^ token[i];
  return difference == 0 && std::memcmp(hello.magic, MAGIC, sizeof MAGIC) == 0 && hello.protocol == PROTOCOL &&
         hello.streams >= 1 && hello.streams <= MOST_STREAMS && hello.index < hello.streams;
}

}  // namespace bagua
