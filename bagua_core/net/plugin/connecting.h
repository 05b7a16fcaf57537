// How communicators begin: listeners, and connections under way. Nothing here waits.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "handshake.h"
#include "interfaces.h"
#include "receiving.h"
#include "sending.h"

namespace bagua {

class Listener {
 public:
  // On the interface's address; writes the handle for the peer. Throws std::runtime_error.
  Listener(const Interface&, void* handle);

  // A communicator once all its connections have come and authenticated, else null. Strangers are dropped.
  std::unique_ptr<Receiver> accept();

 private:
  struct Arriving {
    Socket socket;
    Hello hello;
    std::size_t have = 0;
    Clock::time_point since;
    std::string peer;
  };
  struct Group {
    std::uint64_t id;
    std::vector<Socket> sockets;
    int count = 0;
    Clock::time_point since;
    std::string peer;
  };

  void take_connections();
  bool read_hello(Arriving&);  // whether it is still arriving
  void join_group(Arriving&);

  Socket socket_;
  Token token_;
  std::vector<Arriving> arriving_;
  std::vector<Group> groups_;
};

// What NCCL gave at init. Versions before 10 give nothing.
struct Context {
  int traffic_class = nccl::UNDEFINED;
};

// Called until `sender` is set. The connections under way are remembered by the handle and its address, as NCCL passes
// the same memory each time. context: may be null.
nccl::Result connect(const Context* context, int traffic_class, const Interface&, const void* handle,
                     std::unique_ptr<Sender>& sender);

// Ends the connections under way of `context`, as NCCL finalizes it.
void forget_connects(const Context* context);

}  // namespace bagua
