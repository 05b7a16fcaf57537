#include "devices.h"

#include <deque>
#include <mutex>
#include <string>

#include "handshake.h"
#include "log.h"
#include "settings.h"

namespace bagua {
namespace {

struct Device {
  std::string name, pci_path;
  std::vector<int> members;  // of the interfaces
};

std::mutex mutex;
std::vector<Interface> interfaces;
std::deque<Device> devices;  // NCCL keeps pointers to their names

}  // namespace

nccl::Result start_devices(nccl::Logger logger) {
  set_logger(logger);
  std::lock_guard held(mutex);
  if (!devices.empty()) return nccl::Success;
  interfaces = find_interfaces();
  if (interfaces.empty()) {
    BAGUA_WARN("no network interface: see NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY");
    return nccl::SystemError;
  }
  std::string line;
  for (std::size_t i = 0; i < interfaces.size(); i++) {
    devices.push_back({interfaces[i].name, interfaces[i].pci_path, {static_cast<int>(i)}});
    line += " [" + std::to_string(i) + "]" + interfaces[i].name + ":" + interfaces[i].address.text();
  }
  const Settings& s = settings();
  if (!settings_complaints().empty()) BAGUA_WARN("%s", settings_complaints().c_str());
  BAGUA_INFO("Using%s; %d connections per communicator, chunks of at most %zu bytes, %d threads, congestion control %s",
             line.c_str(), s.streams, s.chunk_bytes, s.threads, s.congestion.empty() ? "of the kernel" : s.congestion.c_str());
  return nccl::Success;
}

int device_count() {
  std::lock_guard held(mutex);
  return static_cast<int>(interfaces.size());
}

std::vector<Interface> interfaces_of(int device) {
  std::lock_guard held(mutex);
  std::vector<Interface> found;
  if (device < 0 || static_cast<std::size_t>(device) >= devices.size()) return found;
  for (int i : devices[static_cast<std::size_t>(device)].members) found.push_back(interfaces[static_cast<std::size_t>(i)]);
  return found;
}

nccl::Result merge_devices(int* device, int count, const int* members) {
  std::lock_guard held(mutex);
  if (count < 1 || count > static_cast<int>(MOST_ADDRESSES)) return nccl::InvalidUsage;
  Device merged;
  for (int i = 0; i < count; i++) {
    if (members[i] < 0 || static_cast<std::size_t>(members[i]) >= interfaces.size()) return nccl::InvalidArgument;
    merged.members.push_back(members[i]);
    merged.name += (i == 0 ? "" : "+") + interfaces[static_cast<std::size_t>(members[i])].name;
  }
  merged.pci_path = interfaces[static_cast<std::size_t>(members[0])].pci_path;
  *device = static_cast<int>(devices.size());
  devices.push_back(merged);
  return nccl::Success;
}

bool describe_device(int device, Description* d) {
  std::lock_guard held(mutex);
  if (device < 0 || static_cast<std::size_t>(device) >= devices.size()) return false;
  Device& one = devices[static_cast<std::size_t>(device)];
  d->name = one.name.data();
  d->pci_path = one.pci_path.empty() ? nullptr : one.pci_path.data();
  d->speed_mbps = 0;
  d->count = static_cast<int>(one.members.size());
  for (int i = 0; i < d->count; i++) {
    d->members[i] = one.members[static_cast<std::size_t>(i)];
    d->speed_mbps += interfaces[static_cast<std::size_t>(d->members[i])].speed_mbps;
  }
  return true;
}

}  // namespace bagua
