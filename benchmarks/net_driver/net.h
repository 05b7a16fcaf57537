// One interface over every version of NCCL's network tables, and the places such a table comes from.
//
// Calls pass their arguments on unchanged and return NCCL's result code.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

struct Properties {
  std::string name, pci_path;
  int speed_mbps, port, most_comms, most_receives, pointers;
};

class Net {
 public:
  virtual ~Net() = default;
  virtual const char* name() = 0;
  virtual int init() = 0;
  virtual int devices(int* count) = 0;
  virtual int properties(int device, Properties* found) = 0;
  virtual int listen(int device, void* handle, void** listener) = 0;
  virtual int connect(int device, void* handle, void** comm) = 0;
  virtual int accept(void* listener, void** comm) = 0;
  virtual int regMr(void* comm, void* data, size_t bytes, void** mhandle) = 0;
  virtual int deregMr(void* comm, void* mhandle) = 0;
  virtual int isend(void* comm, void* data, size_t bytes, int tag, void* mhandle, void** request) = 0;
  virtual int irecv(void* comm, int n, void** data, size_t* bytes, int* tags, void** mhandles, void** request) = 0;
  virtual int iflush(void* comm, int n, void** data, int* bytes, void** mhandles, void** request) = 0;
  virtual int test(void* request, int* done, int* bytes) = 0;
  virtual int closeSend(void* comm) = 0;
  virtual int closeRecv(void* comm) = 0;
  virtual int closeListen(void* listener) = 0;
  virtual int finalize() = 0;
};

// Each of these ends the program with a message that says what is missing.
std::unique_ptr<Net> net_of_table(void* table, int version);
std::unique_ptr<Net> net_of_plugin(const char* path, int version);   // symbol ncclNetPlugin_v<version>
std::unique_ptr<Net> net_of_nccl_sockets(const char* libnccl);       // NCCL's own socket transport
std::unique_ptr<Net> net_that_nccl_assigns(const char* libnccl);     // ncclNetInit loads NCCL_NET_PLUGIN

[[noreturn]] void fail(const std::string& why);
