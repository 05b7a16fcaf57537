// Faults for the tests of the sanitizers: linked into the plugin that they are compiled for, and into no other.
//
// `overflow` and `race` violate a contract of the plugin's own functions, so that the report comes from the plugin's code
// and shows that this code is instrumented. NET_SABOTAGE names the fault; it happens when the library is loaded.
#include <atomic>
#include <climits>
#include <cstdlib>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "counters.h"
#include "handshake.h"

namespace {

// A hello that ends in the middle of its token: `accepts` reads beyond it.
void overflow() {
  std::unique_ptr<char[]> part(new char[24]());
  static volatile bool accepted = bagua::accepts(*reinterpret_cast<bagua::Hello*>(part.get()), bagua::Token{});
  static_cast<void>(accepted);
}

void undefined() {
  static volatile int most = INT_MAX;
  most = most + 1;
}

// A plain write to a counter that the plugin adds to when it connects. Nothing orders the two.
void race() {
  static std::atomic<bool> written{false};
  std::thread writer([] {
    *reinterpret_cast<volatile std::uint64_t*>(&bagua::counters.connections_opened) = 0;
    written.store(true, std::memory_order_relaxed);
  });
  writer.detach();
  while (!written.load(std::memory_order_relaxed)) std::this_thread::yield();
}

void leak() {
  char* volatile lost = new char[1000];
  lost = nullptr;
}

bool sabotaged() {
  const char* wanted = std::getenv("NET_SABOTAGE");
  std::string fault = wanted ? wanted : "";
  if (fault == "overflow") overflow();
  if (fault == "undefined") undefined();
  if (fault == "race") race();
  if (fault == "leak") leak();
  return !fault.empty();
}

[[maybe_unused]] const bool loaded = sabotaged();  // after `counters`, as it is defined later here

}  // namespace
