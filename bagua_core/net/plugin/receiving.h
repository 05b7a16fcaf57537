// The receiving side of a connection between two ranks.
//
// The k-th message of a tag fills the k-th buffer that was posted for this tag. A chunk whose buffer is not posted yet
// waits in the kernel. Where buffers of another tag are awaited meanwhile, it is set aside in memory instead: their
// chunks may be behind it.
#pragma once

#include <array>
#include <map>
#include <utility>

#include "communicator.h"
#include "wire.h"

namespace bagua {

class Receiver final : public Communicator {
 public:
  Receiver(std::vector<Socket> sockets, const std::string& peer);
  ~Receiver() override;

  // Null in `request` while MAX_REQUESTS groups are unfinished.
  nccl::Result receive(int n, void** data, const std::size_t* bytes, const int* tags, Request** request);
  nccl::Result test(Request*, int* done, int* bytes) override;

 private:
  struct Group : Request {
    int count, left;
    std::size_t bytes[nccl::MAX_RECEIVES];
  };

  struct Message {
    Group* group = nullptr;  // null: not posted yet, set aside
    int index = 0;
    char* buffer = nullptr;
    std::size_t capacity = 0;
    std::size_t total = 0, received = 0;
    bool begun = false, complete = false;
    std::vector<std::pair<std::size_t, std::size_t>> claimed;  // [begin, end) of chunks begun, in order and merged
    std::unique_ptr<char[]> aside;
  };

  struct Tag {
    std::uint64_t posted = 0;
    int awaited = 0;                            // posted and not complete
    std::map<std::uint64_t, Message> messages;  // posted and not complete, or set aside; by number
  };

  static constexpr std::size_t STAGING_BYTES = 4096;
  struct Lane : Connection {
    using Connection::Connection;
    Message* message = nullptr;  // of the chunk under way
    Tag* tag = nullptr;
    std::uint64_t number = 0;
    char* to = nullptr;
    std::size_t left = 0;        // of the chunk
    std::size_t at = 0, end = 0;  // bytes in `staging` that were not looked at
    bool held_back = false;       // the next chunk's buffer is not posted
    bool ended = false;           // by the peer, between two chunks
    char staging[STAGING_BYTES];
  };

  bool work(Connection&, Lock&) override;
  void parse(Lane&);
  bool begin_chunk(Lane&, const ChunkHeader&);
  Message* message_for(const ChunkHeader&, Tag&);
  bool claim(Message&, std::size_t begin, std::size_t end);
  void arrived(Lane&, std::size_t bytes);
  void finish(Tag&, std::uint64_t number);
  void check_silence(const Group&);

  std::array<Group, nccl::MAX_REQUESTS> groups_{};
  std::map<int, Tag> tags_;
  int awaited_ = 0;  // of all tags
  std::size_t aside_bytes_ = 0;
  Clock::time_point moved_ = Clock::now(), tested_ = moved_;  // the last byte; the last call of test
};

}  // namespace bagua
