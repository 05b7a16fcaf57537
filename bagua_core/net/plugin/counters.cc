#include "counters.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <iterator>
#include <utility>

namespace bagua {
namespace {

constexpr std::size_t COUNT = sizeof(Counters) / sizeof(Counters::Count);

// Read by bagua_core/net/counters.py. A process has it as the file "/memfd:bagua-net-counters" among its descriptors.
struct Region {
  char magic[8];
  std::uint64_t count;
  Counters counters;
  char names[COUNT][32];
};
static_assert(sizeof(Region) <= 4096 && std::atomic<std::uint64_t>::is_always_lock_free);

constexpr std::pair<const char*, Counters::Count Counters::*> NAMES[] = {
    {"bytes_sent", &Counters::bytes_sent},
    {"bytes_received", &Counters::bytes_received},
    {"messages_sent", &Counters::messages_sent},
    {"messages_received", &Counters::messages_received},
    {"chunks_sent", &Counters::chunks_sent},
    {"connections_opened", &Counters::connections_opened},
    {"connections_open", &Counters::connections_open},
    {"strangers", &Counters::strangers},
    {"retransmits", &Counters::retransmits},
    {"stalls", &Counters::stalls},
    {"set_aside", &Counters::set_aside},
    {"failures", &Counters::failures},
};
static_assert(std::size(NAMES) == COUNT);

Region* shared_region() {
  int fd = memfd_create("bagua-net-counters", MFD_CLOEXEC);  // stays open: it is how others find the memory
  if (fd < 0) return nullptr;
  void* memory = MAP_FAILED;
  if (ftruncate(fd, sizeof(Region)) == 0)
    memory = mmap(nullptr, sizeof(Region), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory != MAP_FAILED) return static_cast<Region*>(memory);
  close(fd);
  return nullptr;
}

}  // namespace

Counters& place_counters() {
  static Region own{};  // where the kernel gives no shared memory: counted, and not seen from outside
  Region* region = shared_region();
  if (region == nullptr) region = &own;
  for (auto [name, counter] : NAMES) {
    auto index = &(region->counters.*counter) - &region->counters.bytes_sent;
    std::strncpy(region->names[index], name, sizeof region->names[index] - 1);
  }
  region->count = COUNT;
  std::memcpy(region->magic, "BNETCNT1", sizeof region->magic);
  return region->counters;
}

}  // namespace bagua
