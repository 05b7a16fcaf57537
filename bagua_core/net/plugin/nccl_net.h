// The interface between NCCL and a network plugin, versions 6 to 12, as this plugin needs it.
//
// Layouts are facts of NVIDIA's public headers (github.com/NVIDIA/nccl, src/include/plugin/net/net_v6.h to net_v12.h,
// read at NCCL 2.30); the text is this project's own. NCCL and the plugin share no header at compile time, so the
// assertions at the end pin every size and offset. A version repeats only what differs from the one before it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nccl {

enum Result : int {
  Success = 0,
  UnhandledCudaError = 1,
  SystemError = 2,
  InternalError = 3,
  InvalidArgument = 4,
  InvalidUsage = 5,
  RemoteError = 6,
  InProgress = 7,
};

enum LogLevel : int { LogNone, LogVersion, LogWarn, LogInfo, LogAbort, LogTrace };
constexpr unsigned long SUBSYSTEM_INIT = 1, SUBSYSTEM_NET = 16;
using Logger = void (*)(LogLevel, unsigned long subsystems, const char* file, int line, const char* format, ...);
using ProfilerCallback = Result (*)(void** event, int type, void* parent, std::int64_t plugin, void* extra);

constexpr std::size_t HANDLE_BYTES = 128;  // NCCL_NET_HANDLE_MAXSIZE
constexpr int MAX_REQUESTS = 32;           // of one communicator at a time, each of up to MAX_RECEIVES buffers
constexpr int MAX_RECEIVES = 8;
constexpr int POINTER_HOST = 1;
constexpr int DEVICE_HOST = 0;  // no offload of the network to the GPU
constexpr int UNDEFINED = -1;
constexpr std::int64_t MAX_MESSAGE_BYTES = std::int64_t{1} << 40;

template <int MAX_DEVICES>
struct VirtualDevice {
  int count;
  int devices[MAX_DEVICES];
};
using VirtualDeviceV9 = VirtualDevice<4>;  // versions 9 to 11
using VirtualDeviceV12 = VirtualDevice<8>;

struct PropertiesV6 {
  char* name;
  char* pci_path;
  std::uint64_t guid;
  int pointer_support;
  int speed_mbps;
  int port;
  float latency_us;
  int max_communicators;
  int max_receives;
};

struct PropertiesV7 : PropertiesV6 {
  int device_type;
  int device_version;
};

struct PropertiesV8 {
  char* name;
  char* pci_path;
  std::uint64_t guid;
  int pointer_support;
  int registration_is_global;
  int speed_mbps;
  int port;
  float latency_us;
  int max_communicators;
  int max_receives;
  int device_type;
  int device_version;
};

template <class VirtualDevices>
struct PropertiesSince9 {  // version 9 and 10 end here
  char* name;
  char* pci_path;
  std::uint64_t guid;
  int pointer_support;
  int registration_is_global;
  int force_flush;
  int speed_mbps;
  int port;
  float latency_us;
  int max_communicators;
  int max_receives;
  int device_type;
  int device_version;
  VirtualDevices virtual_devices;
  std::size_t max_p2p_bytes;
  std::size_t max_collective_bytes;
};
using PropertiesV9 = PropertiesSince9<VirtualDeviceV9>;

struct PropertiesV11 : PropertiesSince9<VirtualDeviceV9> {
  int max_multi_request_size;
};

struct PropertiesV12 : PropertiesSince9<VirtualDeviceV12> {
  int max_multi_request_size;
  std::int16_t rail_id;
  std::int16_t plane_id;
};

struct CommunicatorConfig {  // version 10 and later
  int traffic_class;
};

struct CommunicatorAttributes {
  std::int32_t max_concurrent_peers, min_concurrent_peers, max_flows_per_peer, min_flows_per_peer;
};

struct NetworkAttributes {  // version 11 and later
  CommunicatorAttributes send, receive;
  std::uint32_t operation, algorithm, protocol;
};

struct DeviceHandle;  // offload to the GPU: never given by this plugin

// The members of every version from regMr to closeListen, in their order. Sizes widen from int to size_t.
template <class Registered, class Sized, class... Events>
struct Transfers {
  Result (*regMr)(void* comm, void* data, Registered bytes, int type, void** handle);
  Result (*regMrDmaBuf)(void* comm, void* data, std::size_t bytes, int type, std::uint64_t offset, int fd, void** handle);
  Result (*deregMr)(void* comm, void* handle);
  Result (*isend)(void* comm, void* data, Sized bytes, int tag, void* handle, Events... event, void** request);
  Result (*irecv)(void* comm, int n, void** data, Sized* bytes, int* tags, void** handles, Events*... events, void** request);
  Result (*iflush)(void* comm, int n, void** data, int* bytes, void** handles, void** request);
  Result (*test)(void* request, int* done, int* bytes);
  Result (*closeSend)(void* comm);
  Result (*closeRecv)(void* comm);
  Result (*closeListen)(void* comm);
};

struct Offload {  // version 7 and later
  Result (*getDeviceMr)(void* comm, void* handle, void** device_handle);
  Result (*irecvConsumed)(void* comm, int n, void* request);
};

struct NetV6 {
  const char* name;
  Result (*init)(Logger);
  Result (*devices)(int* count);
  Result (*getProperties)(int device, PropertiesV6*);
  Result (*listen)(int device, void* handle, void** comm);
  Result (*connect)(int device, void* handle, void** comm);
  Result (*accept)(void* listen_comm, void** comm);
  Transfers<int, int> transfers;
};

// Versions 7, 8 and 9: only properties, sizes and the end differ.
template <class Properties, class Sizes>
struct NetSince7 {
  const char* name;
  Result (*init)(Logger);
  Result (*devices)(int* count);
  Result (*getProperties)(int device, Properties*);
  Result (*listen)(int device, void* handle, void** comm);
  Result (*connect)(int device, void* handle, void** comm, DeviceHandle** device_comm);
  Result (*accept)(void* listen_comm, void** comm, DeviceHandle** device_comm);
  Sizes transfers;
  Offload offload;
};
using NetV7 = NetSince7<PropertiesV7, Transfers<int, int>>;
using NetV8 = NetSince7<PropertiesV8, Transfers<std::size_t, int>>;
struct NetV9 {
  NetSince7<PropertiesV9, Transfers<std::size_t, std::size_t>> base;
  Result (*makeVDevice)(int* device, VirtualDeviceV9*);
};

struct NetV10 {
  const char* name;
  Result (*init)(Logger, ProfilerCallback);
  Result (*devices)(int* count);
  Result (*getProperties)(int device, PropertiesV9*);
  Result (*listen)(int device, void* handle, void** comm);
  Result (*connect)(int device, CommunicatorConfig*, void* handle, void** comm, DeviceHandle** device_comm);
  Result (*accept)(void* listen_comm, void** comm, DeviceHandle** device_comm);
  Transfers<std::size_t, std::size_t, void*> transfers;
  Offload offload;
  Result (*makeVDevice)(int* device, VirtualDeviceV9*);
};

template <class Properties, class VirtualDevices>
struct NetSince11 {
  const char* name;
  Result (*init)(void** context, std::uint64_t comm_id, CommunicatorConfig*, Logger, ProfilerCallback);
  Result (*devices)(int* count);
  Result (*getProperties)(int device, Properties*);
  Result (*listen)(void* context, int device, void* handle, void** comm);
  Result (*connect)(void* context, int device, void* handle, void** comm, DeviceHandle** device_comm);
  Result (*accept)(void* listen_comm, void** comm, DeviceHandle** device_comm);
  Transfers<std::size_t, std::size_t, void*> transfers;
  Offload offload;
  Result (*makeVDevice)(int* device, VirtualDevices*);
  Result (*finalize)(void* context);
  Result (*setNetAttr)(void* context, NetworkAttributes*);
};
using NetV11 = NetSince11<PropertiesV11, VirtualDeviceV9>;
using NetV12 = NetSince11<PropertiesV12, VirtualDeviceV12>;

// 64-bit Linux.
static_assert(sizeof(void*) == 8 && sizeof(std::size_t) == 8 && sizeof(int) == 4 && sizeof(Result) == 4);
#define BAGUA_AT(type, member, offset) static_assert(offsetof(type, member) == (offset))
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"  // of types with a base: the compilers supported lay them out so
static_assert(sizeof(PropertiesV6) == 48 && sizeof(PropertiesV7) == 56 && sizeof(PropertiesV8) == 64);
static_assert(sizeof(PropertiesV9) == 104 && sizeof(PropertiesV11) == 112 && sizeof(PropertiesV12) == 128);
BAGUA_AT(PropertiesV6, guid, 16);
BAGUA_AT(PropertiesV6, speed_mbps, 28);
BAGUA_AT(PropertiesV6, max_receives, 44);
BAGUA_AT(PropertiesV7, device_type, 48);
BAGUA_AT(PropertiesV8, registration_is_global, 28);
BAGUA_AT(PropertiesV8, device_version, 56);
BAGUA_AT(PropertiesV9, force_flush, 32);
BAGUA_AT(PropertiesV9, virtual_devices, 64);
BAGUA_AT(PropertiesV9, max_p2p_bytes, 88);
BAGUA_AT(PropertiesV11, max_multi_request_size, 104);
BAGUA_AT(PropertiesV12, max_p2p_bytes, 104);
BAGUA_AT(PropertiesV12, max_multi_request_size, 120);
BAGUA_AT(PropertiesV12, rail_id, 124);
BAGUA_AT(PropertiesV12, plane_id, 126);
static_assert(sizeof(VirtualDeviceV9) == 20 && sizeof(VirtualDeviceV12) == 36);
static_assert(sizeof(CommunicatorConfig) == 4 && sizeof(NetworkAttributes) == 44);
static_assert(sizeof(NetV6) == 17 * 8 && sizeof(NetV7) == 19 * 8 && sizeof(NetV8) == 19 * 8);
static_assert(sizeof(NetV9) == 20 * 8 && sizeof(NetV10) == 20 * 8 && sizeof(NetV11) == 22 * 8);
static_assert(sizeof(NetV12) == 22 * 8);
BAGUA_AT(NetV6, transfers.isend, 10 * 8);
BAGUA_AT(NetV6, transfers.closeListen, 16 * 8);
BAGUA_AT(NetV7, offload.getDeviceMr, 17 * 8);
BAGUA_AT(NetV9, makeVDevice, 19 * 8);
BAGUA_AT(NetV10, transfers.test, 13 * 8);
BAGUA_AT(NetV12, accept, 6 * 8);
BAGUA_AT(NetV12, makeVDevice, 19 * 8);
BAGUA_AT(NetV12, finalize, 20 * 8);
BAGUA_AT(NetV12, setNetAttr, 21 * 8);
#pragma GCC diagnostic pop
#undef BAGUA_AT

}  // namespace nccl
