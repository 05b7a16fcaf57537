// What the plugin has done since it was loaded. The counters are in memory that `bagua_core/net/counters.py` reads through
// /proc, from outside and while the process works.
#pragma once

#include <atomic>
#include <cstdint>

namespace bagua {

struct Counters {
  using Count = std::atomic<std::uint64_t>;
  Count bytes_sent, bytes_received;        // payload
  Count messages_sent, messages_received;  // finished requests of a sender; filled buffers of a receiver
  Count chunks_sent;
  Count connections_opened, connections_open;
  Count strangers;    // connections to a listener that did not authenticate
  Count retransmits;  // segments, as TCP_INFO counts them; read once a second while a communicator works
  Count stalls;       // times that a connection had more to send than the kernel took
  Count set_aside;    // messages read into memory of the plugin, so that one of another tag could pass
  Count failures;     // communicators that failed
};

Counters& place_counters();
inline Counters& counters = place_counters();

inline void add(Counters::Count& count, std::uint64_t n = 1) { count.fetch_add(n, std::memory_order_relaxed); }

}  // namespace bagua
