// What NCCL finds in the library: a table of functions for each version of the interface, over one implementation.
#include <climits>
#include <exception>
#include <type_traits>

#include "connecting.h"
#include "devices.h"
#include "log.h"
#include "nccl_net.h"

#define BAGUA_EXPORT extern "C" __attribute__((visibility("default")))

namespace bagua {
namespace {

using nccl::Result;

// Nothing is thrown into NCCL.
template <class Work>
Result guarded(Work work) noexcept {
  try {
    return work();
  } catch (const std::exception& error) {
    BAGUA_WARN("%s", error.what());
    return nccl::SystemError;
  }
}

Result init(nccl::Logger logger) {
  return guarded([&] { return start_devices(logger); });
}
Result init_v10(nccl::Logger logger, nccl::ProfilerCallback) { return init(logger); }
int traffic_class_of(const nccl::CommunicatorConfig* config) {
  return config == nullptr ? nccl::UNDEFINED : config->traffic_class;
}
Result init_v11(void** context, std::uint64_t, nccl::CommunicatorConfig* config, nccl::Logger logger,
                nccl::ProfilerCallback) {
  if (context == nullptr) return nccl::InvalidArgument;
  return guarded([&] {
    *context = nullptr;
    Result result = init(logger);
    if (result == nccl::Success) *context = new Context{traffic_class_of(config)};
    return result;
  });
}

Result devices(int* count) {
  if (count == nullptr) return nccl::InvalidArgument;
  *count = device_count();
  return nccl::Success;
}

template <class Properties>
Result properties(int device, Properties* p) {
  return guarded([&] { return p == nullptr ? nccl::InvalidArgument : describe(device, *p); });
}

Result listen(int device, void* handle, void** comm) {
  return guarded([&] {
    std::optional<Interface> interface = interface_of(device);
    if (!interface || handle == nullptr || comm == nullptr) return nccl::InvalidArgument;
    *comm = new Listener(*interface, handle);
    return nccl::Success;
  });
}
Result listen_v11(void*, int device, void* handle, void** comm) { return listen(device, handle, comm); }

Result connect_any(const Context* context, int traffic_class, int device, void* handle, void** comm) {
  return guarded([&] {
    std::optional<Interface> interface = interface_of(device);
    if (!interface || handle == nullptr || comm == nullptr) return nccl::InvalidArgument;
    *comm = nullptr;
    std::unique_ptr<Sender> sender;
    Result result = connect(context, traffic_class, *interface, handle, sender);
    *comm = static_cast<Communicator*>(sender.release());
    return result;
  });
}
Result connect_v6(int device, void* handle, void** comm) {
  return connect_any(nullptr, nccl::UNDEFINED, device, handle, comm);
}
// None offloads the network to the GPU, so a device's communicator stays null.
Result connect_v7(int device, void* handle, void** comm, nccl::DeviceHandle**) { return connect_v6(device, handle, comm); }
Result connect_v10(int device, nccl::CommunicatorConfig* config, void* handle, void** comm, nccl::DeviceHandle**) {
  return connect_any(nullptr, traffic_class_of(config), device, handle, comm);
}
Result connect_v11(void* given, int device, void* handle, void** comm, nccl::DeviceHandle**) {
  const Context* context = static_cast<Context*>(given);
  return connect_any(context, context == nullptr ? nccl::UNDEFINED : context->traffic_class, device, handle, comm);
}

Result accept_v6(void* listener, void** comm) {
  return guarded([&] {
    if (listener == nullptr || comm == nullptr) return nccl::InvalidArgument;
    *comm = static_cast<Communicator*>(static_cast<Listener*>(listener)->accept().release());
    return nccl::Success;
  });
}
Result accept_v7(void* listener, void** comm, nccl::DeviceHandle**) { return accept_v6(listener, comm); }

template <class Bytes>
Result register_memory(void*, void*, Bytes, int type, void** handle) {
  if (type != nccl::POINTER_HOST) return nccl::InvalidUsage;
  if (handle != nullptr) *handle = nullptr;
  return nccl::Success;
}
Result register_dma_buffer(void*, void*, std::size_t, int, std::uint64_t, int, void**) { return nccl::InvalidUsage; }
Result deregister(void*, void*) { return nccl::Success; }

template <class Bytes, class... Events>
Result send(void* comm, void* data, Bytes bytes, int tag, void*, Events..., void** request) {
  return guarded([&] {
    if (comm == nullptr || request == nullptr || (std::is_signed_v<Bytes> && bytes < 0)) return nccl::InvalidArgument;
    Request* begun = nullptr;
    Sender& sender = static_cast<Sender&>(*static_cast<Communicator*>(comm));
    Result result = sender.send(data, static_cast<std::size_t>(bytes), tag, &begun);
    *request = begun;
    return result;
  });
}

template <class Bytes, class... Events>
Result receive(void* comm, int n, void** data, Bytes* bytes, int* tags, void**, Events*..., void** request) {
  return guarded([&] {
    if (comm == nullptr || request == nullptr || n < 1 || n > nccl::MAX_RECEIVES) return nccl::InvalidArgument;
    std::size_t sizes[nccl::MAX_RECEIVES];
    for (int i = 0; i < n; i++) {
      if (std::is_signed_v<Bytes> && bytes[i] < 0) return nccl::InvalidArgument;
      sizes[i] = static_cast<std::size_t>(bytes[i]);
    }
    Request* begun = nullptr;
    Receiver& receiver = static_cast<Receiver&>(*static_cast<Communicator*>(comm));
    Result result = receiver.receive(n, data, sizes, tags, &begun);
    *request = begun;
    return result;
  });
}

Result flush(void*, int, void**, int*, void**, void** request) {  // host memory is visible when it is written
  if (request != nullptr) *request = nullptr;
  return nccl::Success;
}

Result test(void* request, int* done, int* bytes) {
  return guarded([&] {
    Request* r = static_cast<Request*>(request);
    if (r == nullptr || done == nullptr || r->owner == nullptr) return nccl::InvalidArgument;
    return r->owner->test(r, done, bytes);
  });
}

Result close_communicator(void* comm) {
  return guarded([&] { return delete static_cast<Communicator*>(comm), nccl::Success; });
}
Result close_listener(void* comm) {
  return guarded([&] { return delete static_cast<Listener*>(comm), nccl::Success; });
}

Result finalize(void* given) {
  return guarded([&] {
    std::unique_ptr<Context> context(static_cast<Context*>(given));
    forget_connects(context.get());
    return nccl::Success;
  });
}
Result set_attributes(void*, nccl::NetworkAttributes*) { return nccl::Success; }

template <class Registered, class Sized, class... Events>
constexpr nccl::Transfers<Registered, Sized, Events...> transfers() {
  return {register_memory<Registered>, register_dma_buffer,  deregister,         send<Sized, Events...>,
          receive<Sized, Events...>,   flush,                test,               close_communicator,
          close_communicator,          close_listener};
}

constexpr nccl::Offload NO_OFFLOAD{nullptr, nullptr};
// As NCCL's own sockets: it would merge any two NICs that are no PCI devices, also one that leads to no other host.
constexpr std::nullptr_t NO_MERGING = nullptr;
constexpr char NAME[] = "Bagua";
using Size = std::size_t;

}  // namespace
}  // namespace bagua

using namespace bagua;

BAGUA_EXPORT const nccl::NetV6 ncclNetPlugin_v6 = {
    NAME, init, devices, properties<nccl::PropertiesV6>, bagua::listen, connect_v6, accept_v6, transfers<int, int>()};
BAGUA_EXPORT const nccl::NetV7 ncclNetPlugin_v7 = {
    NAME, init, devices, properties<nccl::PropertiesV7>, bagua::listen, connect_v7, accept_v7, transfers<int, int>(), NO_OFFLOAD};
BAGUA_EXPORT const nccl::NetV8 ncclNetPlugin_v8 = {
    NAME, init, devices, properties<nccl::PropertiesV8>, bagua::listen, connect_v7, accept_v7, transfers<Size, int>(), NO_OFFLOAD};
BAGUA_EXPORT const nccl::NetV9 ncclNetPlugin_v9 = {
    {NAME, init, devices, properties<nccl::PropertiesV9>, bagua::listen, connect_v7, accept_v7, transfers<Size, Size>(), NO_OFFLOAD},
    NO_MERGING};
BAGUA_EXPORT const nccl::NetV10 ncclNetPlugin_v10 = {
    NAME, init_v10, devices, properties<nccl::PropertiesV9>, bagua::listen, connect_v10, accept_v7,
    transfers<Size, Size, void*>(), NO_OFFLOAD, NO_MERGING};
BAGUA_EXPORT const nccl::NetV11 ncclNetPlugin_v11 = {
    NAME, init_v11, devices, properties<nccl::PropertiesV11>, listen_v11, connect_v11, accept_v7,
    transfers<Size, Size, void*>(), NO_OFFLOAD, NO_MERGING, finalize, set_attributes};
BAGUA_EXPORT const nccl::NetV12 ncclNetPlugin_v12 = {
    NAME, init_v11, devices, properties<nccl::PropertiesV12>, listen_v11, connect_v11, accept_v7,
    transfers<Size, Size, void*>(), NO_OFFLOAD, NO_MERGING, finalize, set_attributes};

#ifndef BAGUA_SOURCE
#define BAGUA_SOURCE "unknown"
#endif
BAGUA_EXPORT const char* bagua_source() { return BAGUA_SOURCE; }
