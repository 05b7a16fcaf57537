#include "interfaces.h"

#include <ifaddrs.h>
#include <net/if.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>

namespace bagua {
namespace {

constexpr std::size_t MOST = 16;

int family_asked() {
  const char* family = std::getenv("NCCL_SOCKET_FAMILY");
  if (family != nullptr && std::strcmp(family, "AF_INET") == 0) return AF_INET;
  if (family != nullptr && std::strcmp(family, "AF_INET6") == 0) return AF_INET6;
  return AF_UNSPEC;
}

int speed_of(const std::string& name) {
  std::ifstream file("/sys/class/net/" + name + "/speed");
  int speed = 0;
  return file >> speed && speed > 0 ? speed : Interface().speed_mbps;
}

std::string pci_path_of(const std::string& name) {
  std::unique_ptr<char, void (*)(void*)> path(realpath(("/sys/class/net/" + name + "/device").c_str(), nullptr), std::free);
  return path ? path.get() : "";
}

// One address of each interface that `list` takes; the first that is no link-local one of IPv6, if there is another.
std::vector<Interface> matching(const ifaddrs* all, const std::string& list) {
  std::vector<Interface> found;
  int family = family_asked();
  for (bool link_local : {false, true}) {
    for (const ifaddrs* it = all; it != nullptr; it = it->ifa_next) {
      if (it->ifa_addr == nullptr || (it->ifa_flags & (IFF_UP | IFF_RUNNING)) != (IFF_UP | IFF_RUNNING)) continue;
      int its = it->ifa_addr->sa_family;
      if ((its != AF_INET && its != AF_INET6) || (family != AF_UNSPEC && its != family)) continue;
      Interface one;
      std::memcpy(&one.address.any, it->ifa_addr, its == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
      if (its == AF_INET6) {
        const in6_addr& ip = one.address.v6.sin6_addr;
        if ((IN6_IS_ADDR_LOOPBACK(&ip) && family != AF_INET6) || bool(IN6_IS_ADDR_LINKLOCAL(&ip)) != link_local) continue;
      } else if (link_local) {
        continue;
      }
      one.name = it->ifa_name;
      bool known = false;
      for (const Interface& other : found) known = known || other.name == one.name;
      if (known || found.size() == MOST || !takes(list, one.name)) continue;
      one.speed_mbps = speed_of(one.name);
      one.pci_path = pci_path_of(one.name);
      found.push_back(one);
    }
  }
  return found;
}

}  // namespace

bool takes(const std::string& list, const std::string& name) {
  std::size_t at = 0;
  bool excludes = at < list.size() && list[at] == '^';
  if (excludes) at++;
  bool exact = at < list.size() && list[at] == '=';
  if (exact) at++;
  bool listed = false;
  while (at < list.size()) {
    std::size_t end = std::min(list.find(',', at), list.size());
    std::string word = list.substr(at, end - at);
    word.erase(std::min(word.find(':'), word.size()));  // NCCL takes NAME:PORT, of which sockets use the name
    if (!word.empty() && (exact ? name == word : name.compare(0, word.size(), word) == 0)) listed = true;
    at = end + 1;
  }
  return listed != excludes;
}

std::vector<Interface> find_interfaces() {
  ifaddrs* raw = nullptr;
  if (getifaddrs(&raw) != 0) return {};
  std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> all(raw, freeifaddrs);
  if (const char* named = std::getenv("NCCL_SOCKET_IFNAME"); named != nullptr && *named != 0)
    return matching(all.get(), named);
  for (const char* list : {"ib", "^docker,lo,virbr", "docker", "lo", "virbr"})
    if (std::vector<Interface> found = matching(all.get(), list); !found.empty()) return found;
  return {};
}

}  // namespace bagua
