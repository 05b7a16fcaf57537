// Says which connections take the chunks of one message, without sockets: chunk_choice.cc and flow.cc alone.
//
// Standard input: the message's bytes, then a line for each connection:
//   LEAST_ROUND_TRIP_S WINDOW_BYTES PACED_RATE QUEUED_BYTES [ROUND_TRIP_S MOVED_BYTES BUSY_S]...
// where each triple is a measurement of the past. Standard output: the bytes that each connection takes.
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "chunk_choice.h"

namespace {

void build(bagua::Flow& flow, const std::string& line, bagua::Clock::time_point now) {
  std::istringstream words(line);
  bagua::Health health;
  std::size_t queued = 0, moved = 0;
  double busy_s = 0, round_trip_s = 0;
  words >> health.least_round_trip_s >> health.window_bytes >> health.paced_rate >> queued;
  health.round_trip_s = health.least_round_trip_s;
  flow.sample(now, health);
  while (words >> round_trip_s >> moved >> busy_s) {
    flow.wrote(moved);
    health.acknowledged += moved;
    health.busy_s += busy_s;
    health.round_trip_s = round_trip_s;
    flow.sample(now, health);
  }
  flow.wrote(queued);
}

}  // namespace

int main() {
  bagua::Clock::time_point now{};
  std::string line;
  std::getline(std::cin, line);
  std::size_t left = std::stoull(line);
  std::vector<std::unique_ptr<bagua::Flow>> owned;
  std::vector<bagua::Flow*> flows;
  while (std::getline(std::cin, line)) {
    owned.push_back(std::make_unique<bagua::Flow>());
    flows.push_back(owned.back().get());
    build(*flows.back(), line, now);
  }
  std::vector<std::size_t> taken(flows.size());
  for (bool any = true; any && left > 0;) {  // as Communicator::progress: chunk after chunk on each connection
    any = false;
    for (std::size_t i = 0; i < flows.size(); i++) {
      for (std::size_t size; left > 0; left -= size) {
        size = bagua::chunk_for(*flows[i], flows, {left, left}, bagua::Settings(), now);
        if (size == bagua::NOTHING) break;
        flows[i]->wrote(size);
        taken[i] += size;
        any = true;
      }
    }
  }
  for (std::size_t bytes : taken) std::cout << bytes << ' ';
  return left > 0;
}
