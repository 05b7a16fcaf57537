#include "chunk_choice.h"

#include <algorithm>

namespace bagua {
namespace {

constexpr double CHUNK_S = 0.001;           // a chunk is what a connection moves in about this time
constexpr double STICK_S = 0.0005;          // what another connection must save before it takes a part of a message
constexpr double FIRST_BANDWIDTH = 128e6;   // bytes a second, while no connection was measured

// The bandwidth of a connection that was not measured.
double assumed_bandwidth(const std::vector<Flow*>& flows) {
  double sum = 0, known = 0;
  for (const Flow* flow : flows)
    if (flow->bandwidth() >= 0) sum += flow->bandwidth(), known++;
  return known > 0 ? sum / known : FIRST_BANDWIDTH;
}

}  // namespace

std::size_t chunk_for(const Flow& taker, const std::vector<Flow*>& flows, Unassigned unassigned, const Settings& s,
                      Clock::time_point now) {
  std::size_t left = unassigned.oldest;
  if (left <= s.least_chunk_bytes && taker.ends_in_s(now, left, FIRST_BANDWIDTH) <= STICK_S) return left;
  double assumed = assumed_bandwidth(flows), rates = 0, all = static_cast<double>(unassigned.all);
  for (const Flow* flow : flows) {
    all += flow->queued(now, assumed);
    rates += flow->rate(assumed);
  }
  auto moves = static_cast<std::size_t>(taker.rate(assumed) * CHUNK_S);
  std::size_t size = std::min(std::clamp(moves, s.least_chunk_bytes, s.chunk_bytes), left);
  if (left < size + s.least_chunk_bytes / 2 && left <= s.chunk_bytes) size = left;
  double ends_s = taker.ends_in_s(now, size, assumed);
  if (ends_s <= all / rates + STICK_S) return size;
  for (const Flow* flow : flows)  // the soonest takes it, however slow all are
    if (flow->ends_in_s(now, size, assumed) < ends_s) return NOTHING;
  return size;
}

}  // namespace bagua
