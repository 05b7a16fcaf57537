// Reaches into a real libnccl through its ELF symbol table: its own socket transport, and its loading of plugins.
//
// Nothing of CUDA is emulated. The socket transport asks for the current device and sets it again in its helper threads;
// without a GPU both calls fail, so their first instructions are replaced by "success, device 0".
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <vector>

#include "net.h"

namespace {

constexpr int kSocketVersion = 12;              // of the table in libnccl 2.30
constexpr size_t kSocketTableBytes = 22 * 8;    // of that version
constexpr size_t kCommunicatorBytes = 1 << 22;  // more than ncclComm takes

class Library {
 public:
  explicit Library(const char* path) : path_(path) {
    void* handle = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (handle == nullptr) fail(std::string("libnccl does not load: ") + dlerror());
    link_map* map = nullptr;
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0) fail(std::string("dlinfo: ") + dlerror());
    base_ = map->l_addr;
    read_symbols();
  }

  // The address of a symbol that only .symtab names.
  char* at(const std::string& symbol, size_t least_bytes) const {
    auto found = symbols_.find(symbol);
    if (found == symbols_.end() || found->second.st_size < least_bytes) {
      fail(path_ + " has no symbol " + symbol + " of " + std::to_string(least_bytes) +
           " bytes in .symtab; this driver is written for libnccl 2.30.7");
    }
    return reinterpret_cast<char*>(base_ + found->second.st_value);
  }

  void replace_code(const std::string& symbol, const std::vector<unsigned char>& code) const {
    char* target = at(symbol, code.size());
    auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    auto first = reinterpret_cast<uintptr_t>(target) & ~(page - 1);
    auto bytes = reinterpret_cast<uintptr_t>(target) + code.size() - first;
    if (mprotect(reinterpret_cast<void*>(first), bytes, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) {
      fail("the code of " + symbol + " can't be made writable: " + strerror(errno));
    }
    memcpy(target, code.data(), code.size());
    mprotect(reinterpret_cast<void*>(first), bytes, PROT_READ | PROT_EXEC);
  }

 private:
  void read_symbols() {
    int descriptor = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat status {};
    if (descriptor < 0 || fstat(descriptor, &status) != 0) fail(path_ + ": " + strerror(errno));
    auto bytes = static_cast<size_t>(status.st_size);
    void* mapped = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, descriptor, 0);
    close(descriptor);
    if (mapped == MAP_FAILED) fail(path_ + ": " + strerror(errno));
    auto* file = static_cast<const char*>(mapped);
    auto* header = reinterpret_cast<const Elf64_Ehdr*>(file);
    auto* sections = reinterpret_cast<const Elf64_Shdr*>(file + header->e_shoff);
    for (int i = 0; i < header->e_shnum; i++) {
      if (sections[i].sh_type != SHT_SYMTAB) continue;
      auto* symbols = reinterpret_cast<const Elf64_Sym*>(file + sections[i].sh_offset);
      const char* names = file + sections[sections[i].sh_link].sh_offset;
      for (size_t s = 0; s < sections[i].sh_size / sizeof(Elf64_Sym); s++) {
        if (symbols[s].st_size > 0) symbols_[names + symbols[s].st_name] = symbols[s];
      }
    }
    munmap(mapped, bytes);
    if (symbols_.empty()) fail(path_ + " has no symbol table (.symtab); it was stripped");
  }

  std::string path_;
  uintptr_t base_ = 0;
  std::map<std::string, Elf64_Sym> symbols_;
};

}  // namespace

std::unique_ptr<Net> net_of_nccl_sockets(const char* libnccl) {
#ifndef __x86_64__
  fail("the replaced instructions are those of x86_64");
#endif
  static Library library(libnccl);
  library.replace_code("cudaGetDevice", {0xc7, 0x07, 0, 0, 0, 0, 0x31, 0xc0, 0xc3});  // *device = 0; return 0
  library.replace_code("cudaSetDevice", {0x31, 0xc0, 0xc3});                          // return 0
  return net_of_table(library.at("ncclNetSocket", kSocketTableBytes), kSocketVersion);
}

std::unique_ptr<Net> net_that_nccl_assigns(const char* libnccl) {
  static Library library(libnccl);
  // A communicator of zeros: ncclNetInit reads only its configuration there, and every field of that is optional.
  static std::vector<uintptr_t> communicator(kCommunicatorBytes / sizeof(uintptr_t));
  auto init = reinterpret_cast<int (*)(void*)>(library.at("_Z11ncclNetInitP8ncclComm", 1));
  int result = init(communicator.data());
  if (result != 0) fail("ncclNetInit returned " + std::to_string(result));
  for (size_t i = 0; i < communicator.size(); i++) {
    if (communicator[i] == 0) continue;
    // ncclNet is the first field that ncclNetInit writes; the version of the plugin follows the context
    return net_of_table(reinterpret_cast<void*>(communicator[i]), kSocketVersion);
  }
  fail("ncclNetInit succeeded and assigned nothing");
}
