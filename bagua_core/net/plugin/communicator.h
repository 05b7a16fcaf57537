// What sending and receiving communicators share: connections, their readiness, failure and the end.
//
// One mutex guards a communicator; it is not held within a system call that moves payload. A thread that makes such a
// call marks the connection busy, so that several threads work on different connections of one communicator.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nccl_net.h"
#include "sockets.h"

namespace bagua {

class Communicator;

struct Request {
  Communicator* owner = nullptr;  // null: free
};

struct Connection {
  explicit Connection(Socket s) : socket(std::move(s)) {}
  virtual ~Connection() = default;
  Socket socket;
  bool busy = false;   // a thread is in a system call on it
  bool ready = true;   // the kernel may take or have bytes
  bool event = false;  // readiness was reported since the last system call began
  bool hung_up = false;  // the kernel reported the end of the connection, or an error on it
  std::uint64_t retransmits = 0;
  Clock::time_point unanswered_since{};
};

class Communicator {
 public:
  virtual ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Moves what can be moved without waiting. Any thread.
  void progress();
  virtual nccl::Result test(Request*, int* done, int* bytes) = 0;
  // Readable when `progress` has something to do; for the helpers.
  int event_fd() const { return epoll_.fd(); }

 protected:
  using Lock = std::unique_lock<std::mutex>;
  Communicator(std::string peer, unsigned events);

  void adopt(std::unique_ptr<Connection>);
  void progress(Lock&);
  // One step on a connection that is ready and not busy. Returns whether another one may be worth it.
  virtual bool work(Connection&, Lock&) = 0;
  // Around a system call on a connection.
  void begin_call(Connection&, Lock&);
  void end_call(Connection&, Lock&);
  // After an incomplete read or write: not ready until the kernel reports it anew.
  void exhausted(Connection& c) { c.ready = c.event || c.hung_up; }

  // The first failure decides; all connections end, so that the peer learns of it.
  void fail(nccl::Result, const std::string& what);
  void fail_with_errno(int error);
  void end(bool orderly);

  std::mutex mutex_;
  std::vector<std::unique_ptr<Connection>> connections_;
  nccl::Result failure_ = nccl::Success;
  std::string peer_;
  bool closing_ = false;

 private:
  void take_events();
  void check_health(Clock::time_point now);

  std::condition_variable idle_;
  Socket epoll_;
  unsigned events_;
  int busy_ = 0;
  Clock::time_point checked_{};
};

}  // namespace bagua
