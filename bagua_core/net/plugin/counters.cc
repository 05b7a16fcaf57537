#include "counters.h"

#include <cstdio>
#include <string>
#include <utility>

namespace bagua {

std::size_t write_counters(char* text, std::size_t bytes) {
  const std::pair<const char*, const Counters::Count*> all[] = {
      {"bytes_sent", &counters.bytes_sent},
      {"bytes_received", &counters.bytes_received},
      {"messages_sent", &counters.messages_sent},
      {"messages_received", &counters.messages_received},
      {"chunks_sent", &counters.chunks_sent},
      {"connections_opened", &counters.connections_opened},
      {"connections_open", &counters.connections_open},
      {"strangers", &counters.strangers},
      {"retransmits", &counters.retransmits},
      {"stalls", &counters.stalls},
      {"set_aside", &counters.set_aside},
      {"failures", &counters.failures},
  };
  std::string line;
  for (auto [name, count] : all)
    line += (line.empty() ? "{\"" : ", \"") + std::string(name) + "\": " + std::to_string(count->load());
  line += "}";
  if (text != nullptr && bytes > 0) std::snprintf(text, bytes, "%s", line.c_str());
  return line.size();
}

}  // namespace bagua
