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

Handle make_handle(const Token& token, int streams, const std::vector<std::pair<Address, int>>& addresses_and_speeds) {
  Handle handle{};
  std::memcpy(handle.magic, MAGIC, sizeof MAGIC);
  handle.protocol = PROTOCOL;
  handle.addresses = static_cast<std::uint16_t>(addresses_and_speeds.size());
  handle.streams = static_cast<std::uint16_t>(streams);
  handle.token = token;
  for (std::size_t i = 0; i < addresses_and_speeds.size(); i++) {
    const auto& [address, speed] = addresses_and_speeds[i];
    PackedAddress& packed = handle.address[i];
    packed.family = address.any.sa_family;
    packed.speed_mbps = static_cast<std::uint32_t>(speed);
    if (address.any.sa_family == AF_INET) {
      packed.port = address.v4.sin_port;
      std::memcpy(packed.ip, &address.v4.sin_addr, 4);
    } else {
      packed.port = address.v6.sin6_port;
      std::memcpy(packed.ip, &address.v6.sin6_addr, 16);
    }
  }
  return handle;
}

const char* fault_of(const Handle& handle) {
  if (std::memcmp(handle.magic, MAGIC, sizeof MAGIC) != 0) return "it is no handle of Bagua-Net: the peer uses another network";
  if (handle.protocol != PROTOCOL) return "the peer's Bagua-Net speaks another version: install the same on all hosts";
  if (handle.addresses < 1 || handle.addresses > MOST_ADDRESSES) return "its number of addresses is out of range";
  if (handle.streams < 1 || handle.streams > MOST_STREAMS) return "its number of connections is out of range";
  for (std::size_t i = 0; i < handle.addresses; i++)
    if (handle.address[i].family != AF_INET && handle.address[i].family != AF_INET6) return "an address is of an unknown family";
  return nullptr;
}

Address address_of(const Handle& handle, std::size_t i, std::uint32_t scope) {
  const PackedAddress& packed = handle.address[i];
  Address address;
  address.any.sa_family = packed.family;
  if (packed.family == AF_INET) {
    address.v4.sin_port = packed.port;
    std::memcpy(&address.v4.sin_addr, packed.ip, 4);
  } else {
    address.v6.sin6_port = packed.port;
    std::memcpy(&address.v6.sin6_addr, packed.ip, 16);
    if (IN6_IS_ADDR_LINKLOCAL(&address.v6.sin6_addr)) address.v6.sin6_scope_id = scope;
  }
  return address;
}

std::vector<int> shares(const Handle& handle, int streams) {
  std::vector<int> given(handle.addresses, 1);
  double total = 0;
  for (std::size_t i = 0; i < given.size(); i++) total += std::max(1u, handle.address[i].speed_mbps);
  for (int left = streams - static_cast<int>(given.size()); left > 0; left--) {  // to the one furthest below its share
    auto lacks = [&](std::size_t i) { return std::max(1u, handle.address[i].speed_mbps) / total * streams - given[i]; };
    std::size_t most = 0;
    for (std::size_t i = 1; i < given.size(); i++)
      if (lacks(i) > lacks(most)) most = i;
    given[most]++;
  }
  return given;
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
