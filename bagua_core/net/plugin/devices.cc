#include "devices.h"

#include <mutex>
#include <string>
#include <vector>

#include "log.h"
#include "settings.h"

namespace bagua {
namespace {

std::mutex mutex;
std::vector<Interface> interfaces;  // found once: NCCL keeps pointers to their names

}  // namespace

nccl::Result start_devices(nccl::Logger logger) {
  set_logger(logger);
  std::lock_guard held(mutex);
  if (!interfaces.empty()) return nccl::Success;
  interfaces = find_interfaces();
  if (interfaces.empty()) {
    BAGUA_WARN("no network interface: see NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY");
    return nccl::SystemError;
  }
  std::string line;
  for (std::size_t i = 0; i < interfaces.size(); i++)
    line += " [" + std::to_string(i) + "]" + interfaces[i].name + ":" + interfaces[i].address.text();
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

std::optional<Interface> interface_of(int device) {
  std::lock_guard held(mutex);
  if (device < 0 || static_cast<std::size_t>(device) >= interfaces.size()) return {};
  return interfaces[static_cast<std::size_t>(device)];
}

bool describe_device(int device, Description* d) {
  std::lock_guard held(mutex);
  if (device < 0 || static_cast<std::size_t>(device) >= interfaces.size()) return false;
  Interface& one = interfaces[static_cast<std::size_t>(device)];
  d->name = one.name.data();
  d->pci_path = one.pci_path.empty() ? nullptr : one.pci_path.data();
  d->speed_mbps = one.speed_mbps;
  return true;
}

}  // namespace bagua
