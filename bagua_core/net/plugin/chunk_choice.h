// Which connection takes the next chunk: a pure function of what is known of the connections.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "flow.h"
#include "settings.h"

namespace bagua {

constexpr std::size_t NOTHING = SIZE_MAX;  // an empty message has a chunk of 0 bytes

struct Unassigned {
  std::size_t oldest;  // bytes of the oldest message
  std::size_t all;     // bytes of all messages
};

// Bytes of the oldest message that `taker`, one of `flows`, takes; NOTHING, if others will have moved all sooner. Every
// connection is filled to the same time of ending, in their order: the first alone while it is fast.
std::size_t chunk_for(const Flow& taker, const std::vector<Flow*>& flows, Unassigned, const Settings&,
                      Clock::time_point now);

}  // namespace bagua
