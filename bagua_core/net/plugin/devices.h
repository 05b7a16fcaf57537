// NCCL's devices: the interfaces of this host, each by itself.
#pragma once

#include <optional>
#include <type_traits>

#include "interfaces.h"
#include "nccl_net.h"

namespace bagua {

// Finds the interfaces at the first call, and says in NCCL's log what is used. Each call sets the logger.
nccl::Result start_devices(nccl::Logger);
int device_count();
std::optional<Interface> interface_of(int device);

struct Description {
  char* name;
  char* pci_path;
  int speed_mbps;
};
bool describe_device(int device, Description*);

template <class Properties>
nccl::Result describe(int device, Properties& p) {
  Description d;
  if (!describe_device(device, &d)) return nccl::InvalidArgument;
  p = {};
  p.name = d.name;
  p.pci_path = d.pci_path;
  p.guid = static_cast<std::uint64_t>(device);
  p.pointer_support = nccl::POINTER_HOST;
  p.speed_mbps = d.speed_mbps;
  p.max_communicators = 65536;
  p.max_receives = nccl::MAX_RECEIVES;
  constexpr bool v12 = std::is_same_v<Properties, nccl::PropertiesV12>, v11 = std::is_same_v<Properties, nccl::PropertiesV11>;
  if constexpr (v12 || v11 || std::is_same_v<Properties, nccl::PropertiesV9>) {
    p.max_p2p_bytes = p.max_collective_bytes = static_cast<std::size_t>(nccl::MAX_MESSAGE_BYTES);
    p.virtual_devices.count = 1;
    p.virtual_devices.devices[0] = device;
  }
  if constexpr (v12 || v11) p.max_multi_request_size = 1;
  if constexpr (v12) p.rail_id = p.plane_id = nccl::UNDEFINED;
  return nccl::Success;
}

}  // namespace bagua
