// Adapts each version of NCCL's table to Net. The layouts come from the plugin's own header.
#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <type_traits>

#include "net.h"
#include "nccl_net.h"

namespace {

void log(int level, unsigned long, const char* file, int line, const char* format, ...) {
  static const bool wanted = getenv("NET_DRIVER_LOG") != nullptr;
  if (!wanted) return;
  va_list words;
  va_start(words, format);
  fprintf(stderr, "[%d] %s:%d ", level, file, line);
  vfprintf(stderr, format, words);
  fputc('\n', stderr);
  va_end(words);
}

template <class Table>
auto& common(Table* table) {
  if constexpr (std::is_same_v<Table, nccl::NetV9>) {
    return table->base;
  } else {
    return *table;
  }
}

template <int V, class Table, class Props>
class Adapter final : public Net {
 public:
  explicit Adapter(Table* table) : whole_(table), net_(common(table)), transfers_(net_.transfers) {}

  const char* name() override { return net_.name; }

  int init() override {
    auto logger = reinterpret_cast<nccl::Logger>(&log);
    if constexpr (V >= 11) {
      contexts_.push_back(nullptr);
      return net_.init(&contexts_.back(), contexts_.size(), &config_, logger, nullptr);
    } else if constexpr (V == 10) {
      return net_.init(logger, nullptr);
    } else {
      return net_.init(logger);
    }
  }

  int devices(int* count) override { return net_.devices(count); }

  int properties(int device, Properties* found) override {
    Props props{};
    int result = net_.getProperties(device, &props);
    if (result != 0) return result;
    *found = {props.name ? props.name : "", props.pci_path ? props.pci_path : "", props.speed_mbps, props.port,
              props.max_communicators, props.max_receives, props.pointer_support};
    return 0;
  }

  int listen(int device, void* handle, void** listener) override {
    if constexpr (V >= 11) {
      return net_.listen(contexts_.front(), device, handle, listener);
    } else {
      return net_.listen(device, handle, listener);
    }
  }

  int connect(int device, void* handle, void** comm) override {
    nccl::DeviceHandle* offload = nullptr;
    if constexpr (V >= 11) {
      return net_.connect(contexts_.front(), device, handle, comm, &offload);
    } else if constexpr (V == 10) {
      return net_.connect(device, &config_, handle, comm, &offload);
    } else if constexpr (V >= 7) {
      return net_.connect(device, handle, comm, &offload);
    } else {
      return net_.connect(device, handle, comm);
    }
  }

  int accept(void* listener, void** comm) override {
    nccl::DeviceHandle* offload = nullptr;
    if constexpr (V >= 7) {
      return net_.accept(listener, comm, &offload);
    } else {
      return net_.accept(listener, comm);
    }
  }

  int regMr(void* comm, void* data, size_t bytes, void** mhandle) override {
    return transfers_.regMr(comm, data, bytes, nccl::POINTER_HOST, mhandle);
  }
  int deregMr(void* comm, void* mhandle) override { return transfers_.deregMr(comm, mhandle); }

  int isend(void* comm, void* data, size_t bytes, int tag, void* mhandle, void** request) override {
    if constexpr (V >= 10) {
      return transfers_.isend(comm, data, bytes, tag, mhandle, nullptr, request);
    } else {
      return transfers_.isend(comm, data, bytes, tag, mhandle, request);
    }
  }

  int irecv(void* comm, int n, void** data, size_t* bytes, int* tags, void** mhandles, void** request) override {
    if constexpr (V >= 10) {
      return transfers_.irecv(comm, n, data, bytes, tags, mhandles, nullptr, request);
    } else if constexpr (V == 9) {
      return transfers_.irecv(comm, n, data, bytes, tags, mhandles, request);
    } else {
      int sizes[nccl::MAX_RECEIVES];
      for (int i = 0; i < n; i++) sizes[i] = static_cast<int>(bytes[i]);
      return transfers_.irecv(comm, n, data, sizes, tags, mhandles, request);
    }
  }

  int iflush(void* comm, int n, void** data, int* bytes, void** mhandles, void** request) override {
    return transfers_.iflush(comm, n, data, bytes, mhandles, request);
  }
  int test(void* request, int* done, int* bytes) override { return transfers_.test(request, done, bytes); }
  int closeSend(void* comm) override { return transfers_.closeSend(comm); }
  int closeRecv(void* comm) override { return transfers_.closeRecv(comm); }
  int closeListen(void* listener) override { return transfers_.closeListen(listener); }

  int finalize() override {
    if constexpr (V >= 11) {
      void* last = contexts_.back();
      contexts_.pop_back();
      return whole_->finalize(last);
    }
    return 0;
  }

 private:
  Table* whole_;
  std::remove_reference_t<decltype(common(static_cast<Table*>(nullptr)))>& net_;
  decltype(net_.transfers)& transfers_;
  std::deque<void*> contexts_;  // one of each init; communicators use the first one, finalize ends the last one
  nccl::CommunicatorConfig config_{getenv("NET_DRIVER_TRAFFIC_CLASS") ? atoi(getenv("NET_DRIVER_TRAFFIC_CLASS"))
                                                                      : nccl::UNDEFINED};
};

}  // namespace

std::unique_ptr<Net> net_of_table(void* table, int version) {
  switch (version) {
#define TABLE(V, PROPERTIES) \
  case V:                    \
    return std::make_unique<Adapter<V, nccl::NetV##V, PROPERTIES>>(static_cast<nccl::NetV##V*>(table));
    TABLE(6, nccl::PropertiesV6)
    TABLE(7, nccl::PropertiesV7)
    TABLE(8, nccl::PropertiesV8)
    TABLE(9, nccl::PropertiesV9)
    TABLE(10, nccl::PropertiesV9)
    TABLE(11, nccl::PropertiesV11)
    TABLE(12, nccl::PropertiesV12)
#undef TABLE
    default:
      fail("no version " + std::to_string(version) + " of the table; 6 to 12");
  }
}

std::unique_ptr<Net> net_of_plugin(const char* path, int version) {
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) fail(std::string("the plugin does not load: ") + dlerror());
  std::string symbol = "ncclNetPlugin_v" + std::to_string(version);
  void* table = dlsym(handle, symbol.c_str());
  if (table == nullptr) fail(std::string(path) + " has no symbol " + symbol);
  return net_of_table(table, version);
}
