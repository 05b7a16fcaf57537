// What precedes each chunk of a message on a connection.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bagua {

constexpr std::uint32_t CHUNK_MAGIC = 0x4b4e4843;  // "CHNK"

struct ChunkHeader {
  std::uint32_t magic;
  std::int32_t tag;
  std::uint64_t number;  // of the message among those of its tag
  std::uint64_t total_bytes;
  std::uint64_t offset;
  std::uint32_t bytes;  // of this chunk; 0 in the one chunk of an empty message, and in no other
  std::uint32_t unused;
};
static_assert(sizeof(ChunkHeader) == 40);

// What is wrong with a header by itself; nullptr if nothing is.
inline const char* fault_of(const ChunkHeader& h) {
  if (h.magic != CHUNK_MAGIC) return "a chunk begins with wrong bytes";
  if (h.total_bytes > (std::uint64_t{1} << 40)) return "a message is larger than any";
  if (h.offset > h.total_bytes || h.bytes > h.total_bytes - h.offset) return "a chunk reaches beyond its message";
  if (h.bytes == 0 && h.total_bytes != 0) return "a chunk is empty";
  return nullptr;
}

}  // namespace bagua
