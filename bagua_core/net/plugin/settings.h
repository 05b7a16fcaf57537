// The plugin's parameters: the one home of their names and defaults. Read from the environment at the first use.
#pragma once

#include <cstddef>
#include <string>

namespace bagua {

struct Settings {
  int streams = 16;                         // BAGUA_NET_STREAMS: connections of one communicator, 1 to 64
  std::size_t chunk_bytes = 1 << 20;        // BAGUA_NET_CHUNK_BYTES: the most that one connection takes at a time
  std::size_t least_chunk_bytes = 32 << 10; // BAGUA_NET_LEAST_CHUNK_BYTES: the least, of a message that is divided
  std::size_t unsent_bytes = 512 << 10;     // BAGUA_NET_UNSENT_BYTES: what the kernel holds unsent of a connection
  int threads = 0;                          // BAGUA_NET_THREADS: helpers of a process beside the callers of test
  std::string congestion;                   // BAGUA_NET_CONGESTION: TCP_CONGESTION; empty: the kernel's default
  double timeout_s = 60;                    // BAGUA_NET_TIMEOUT_S: begun messages and unacknowledged bytes
  double handshake_timeout_s = 10;          // BAGUA_NET_HANDSHAKE_TIMEOUT_S: a connection that says nothing
};

const Settings& settings();

// The variables that hold no valid value, each with what is used instead; empty if all are valid.
const std::string& settings_complaints();

}  // namespace bagua
