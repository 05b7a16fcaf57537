// What a listener gives to its peer through NCCL (the handle), and what each connection says first (the hello).
// Fields are little-endian, as are all machines that NCCL runs on; addresses and ports keep the network's order.
#pragma once

#include <array>
#include <cstdint>

#include "nccl_net.h"
#include "sockets.h"

namespace bagua {

constexpr std::uint16_t PROTOCOL = 2;
constexpr int MOST_STREAMS = 64;
using Token = std::array<std::uint8_t, 16>;

struct Handle {
  char magic[8];
  std::uint16_t protocol, streams, unused, family;
  Token token;
  std::uint16_t port;
  std::uint8_t ip[16];
};
static_assert(sizeof(Handle) == 50 && sizeof(Handle) <= nccl::HANDLE_BYTES);

struct Hello {
  char magic[8];
  std::uint16_t protocol, streams, index, unused;
  Token token;
  std::uint64_t group;  // random: which connections belong together
};
static_assert(sizeof(Hello) == 40);

Token random_token();
Handle make_handle(const Token&, int streams, const Address&);

// What is wrong with a handle that came from a peer; nullptr if nothing is.
const char* fault_of(const Handle&);
// The address in a handle without fault; a link-local one is reached through the interface `scope`.
Address address_of(const Handle&, std::uint32_t scope);

Hello make_hello(const Token&, int streams, int index, std::uint64_t group);
// Takes the same time for every wrong token.
bool accepts(const Hello&, const Token&);

}  // namespace bagua
