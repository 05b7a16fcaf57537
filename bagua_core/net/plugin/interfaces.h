// The network interfaces that become NCCL's devices, chosen by NCCL's own rules and variables.
#pragma once

#include <string>
#include <vector>

#include "sockets.h"

namespace bagua {

struct Interface {
  std::string name;
  Address address;
  int speed_mbps = 10000;  // where /sys does not know one, as NCCL's sockets assume
  std::string pci_path;    // empty: none, as of a bridge
};

// Whether NCCL_SOCKET_IFNAME's value `list` takes `name`: prefixes by comma; = names exactly; ^ excludes; ^= both.
bool takes(const std::string& list, const std::string& name);

// By NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY; without a name: ib*, then all but docker*, lo and virbr*, then those.
std::vector<Interface> find_interfaces();

}  // namespace bagua
