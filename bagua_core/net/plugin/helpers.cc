#include "helpers.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "communicator.h"
#include "log.h"
#include "settings.h"

namespace bagua::Helpers {
namespace {

// Every helper serves every communicator. The threads exist while a communicator does.
class Pool {
 public:
  void add(Communicator* c) {
    std::lock_guard held(mutex_);
    if (served_.empty()) start();
    served_.push_back({c, 0, false});
    epoll_event event{};
    event.events = EPOLLIN | EPOLLET;
    event.data.ptr = c;
    if (epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, c->event_fd(), &event) != 0)
      BAGUA_WARN("helpers don't serve a communicator: its caller alone moves its bytes");
  }

  void remove(Communicator* c) {
    std::unique_lock held(mutex_);
    auto it = find(c);
    if (it == served_.end()) return;
    epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, c->event_fd(), nullptr);
    it->ending = true;
    left_.wait(held, [&] { return find(c)->users == 0; });
    served_.erase(find(c));
    if (!served_.empty()) return;
    std::vector<std::thread> ending = std::move(threads_);
    threads_.clear();
    stopping_ = true;
    wake();
    held.unlock();
    for (std::thread& t : ending) t.join();
    held.lock();
    stopping_ = false;
    if (!served_.empty() && threads_.empty()) start();
  }

  void wake() {
    std::uint64_t one = 1;
    [[maybe_unused]] ssize_t n = write(wake_.fd(), &one, sizeof one);
  }

 private:
  struct Served {
    Communicator* communicator;
    int users;
    bool ending;
  };

  std::vector<Served>::iterator find(Communicator* c) {
    return std::find_if(served_.begin(), served_.end(), [c](const Served& s) { return s.communicator == c; });
  }

  void start() {
    if (stopping_) return;  // remove starts them when the old ones have ended
    if (!epoll_) {
      epoll_ = Socket(epoll_create1(EPOLL_CLOEXEC));
      wake_ = Socket(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
      epoll_event event{};
      event.events = EPOLLIN | EPOLLET;
      epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, wake_.fd(), &event);
    }
    for (int i = 0; i < settings().threads; i++) threads_.emplace_back([this] { run(); });
  }

  void run() {
    std::unique_lock held(mutex_);
    while (!stopping_) {
      held.unlock();
      epoll_event event{};
      int n = epoll_wait(epoll_.fd(), &event, 1, -1);
      held.lock();
      if (n < 1) continue;
      if (event.data.ptr != nullptr) {
        serve(static_cast<Communicator*>(event.data.ptr), held);
      } else {
        if (stopping_) break;  // the eventfd stays readable, and `remove` wakes the next one
        for (std::size_t i = 0; i < served_.size(); i++) serve(served_[i].communicator, held);
      }
    }
    wake();
  }

  void serve(Communicator* c, std::unique_lock<std::mutex>& held) {
    auto it = find(c);
    if (it == served_.end() || it->ending) return;
    it->users++;
    held.unlock();
    c->progress();
    held.lock();
    find(c)->users--;
    left_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable left_;
  std::vector<Served> served_;
  std::vector<std::thread> threads_;
  Socket epoll_, wake_;
  bool stopping_ = false;
};

Pool& pool() {
  static Pool* one = new Pool;  // outlives the threads of a process that ends with communicators open
  return *one;
}

}  // namespace

void add(Communicator* c) {
  if (settings().threads > 0) pool().add(c);
}

void remove(Communicator* c) {
  if (settings().threads > 0) pool().remove(c);
}

void wake() {
  if (settings().threads > 0) pool().wake();
}

}  // namespace bagua::Helpers
