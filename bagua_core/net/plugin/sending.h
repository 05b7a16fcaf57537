// The sending side of a connection between two ranks.
#pragma once

#include <array>
#include <deque>
#include <unordered_map>
#include <vector>

#include "communicator.h"
#include "flow.h"
#include "wire.h"

namespace bagua {

class Sender final : public Communicator {
 public:
  Sender(std::vector<Socket> sockets, const std::string& peer);
  ~Sender() override;

  // Null in `request` while MOST requests are unfinished.
  nccl::Result send(const void* data, std::size_t bytes, int tag, Request** request);
  nccl::Result test(Request*, int* done, int* bytes) override;

 private:
  static constexpr std::size_t MOST = nccl::MAX_REQUESTS * nccl::MAX_RECEIVES;

  struct Outgoing : Request {
    const char* data;
    std::size_t bytes, assigned, written;
    bool whole;  // written
    int tag;
    std::uint64_t number;
  };

  struct Lane : Connection {
    using Connection::Connection;
    Outgoing* message = nullptr;  // of the chunk under way
    ChunkHeader header{};
    std::size_t header_left = 0, data_left = 0;
    const char* data = nullptr;
    Flow flow;
  };

  bool work(Connection&, Lock&) override;
  bool write(Lane&, Lock&);
  bool take_chunk(Lane&);
  std::size_t chunk_of(Lane&, std::size_t left);
  void written(Lane&, std::size_t bytes);

  std::vector<Flow*> flows_;  // of the connections
  std::array<Outgoing, MOST> requests_{};
  std::deque<Outgoing*> unassigned_;  // in the order of their sends; the chunks of a connection keep this order
  std::size_t unassigned_bytes_ = 0, unfinished_ = 0, next_free_ = 0;
  std::unordered_map<int, std::uint64_t> numbers_;  // by tag
};

}  // namespace bagua
