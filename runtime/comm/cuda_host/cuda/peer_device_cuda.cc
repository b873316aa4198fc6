#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/comm/cuda_host/cuda/device_sum.h"
#include "runtime/comm/cuda_host/cuda_host_collectives.h"

namespace tessera {
namespace {

static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(PeerDevice::Handle));
static_assert(sizeof(cudaIpcEventHandle_t) == sizeof(PeerDevice::Handle));
static_assert(cuda::SumInputs::kMost == static_cast<int>(PeerDevice::kMostInputs));

/// Returns a hint for an error of memory allocation, or "" for other errors, for which CUDA's own text suffices.
std::string hint_of(cudaError_t error) {
  return error == cudaErrorMemoryAllocation
             ? ". [T0450] hint: shard over more GPUs, or give \"offload\" a tier below memory"
             : "";
}

absl::Status status_of(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const ExitCode code = error == cudaErrorMemoryAllocation ? ExitCode::kOsResource : ExitCode::kInternal;
  return make_error(code, std::string(what) + ": " + cudaGetErrorString(error) + hint_of(error));
}

template <class T>
PeerDevice::Handle bytes_of(const T& handle) {
  PeerDevice::Handle bytes;
  std::memcpy(bytes.bytes.data(), &handle, sizeof handle);
  return bytes;
}

template <class T>
T handle_of(const PeerDevice::Handle& bytes) {
  T handle;
  std::memcpy(&handle, bytes.bytes.data(), sizeof handle);
  return handle;
}

/// Calls the driver's cuMemGetAddressRange, which is found at run time. The program is not linked to the driver, since
/// a machine without a GPU has no driver.
absl::StatusOr<std::byte*> allocation_of(const void* memory) {
  using GetAddressRange = CUresult (*)(CUdeviceptr*, std::size_t*, CUdeviceptr);
  static void* const function = [] {
    void* found_function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &found_function, 12000, cudaEnableDefault, &found);
    return found_function;
  }();
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  const CUresult result =
      function ? reinterpret_cast<GetAddressRange>(function)(&base, &bytes, reinterpret_cast<CUdeviceptr>(memory))
               : CUDA_ERROR_NOT_FOUND;
  if (result == CUDA_SUCCESS) return reinterpret_cast<std::byte*>(base);
  return make_error(ExitCode::kInternal, "cuMemGetAddressRange: error " + std::to_string(result));
}

/// Peers' allocations that this process has opened, for all groups together. Each has one mapping, and the number of
/// devices (PeerDevice) that use it.
class OpenedMemory {
 public:
  static OpenedMemory& of_process() {
    static OpenedMemory opened;
    return opened;
  }

  absl::StatusOr<std::byte*> take(const PeerDevice::Handle& handle) {
    const MutexLock lock(mutex_);
    Mapping& mapping = mappings_[handle];
    if (mapping.users == 0) {
      void* memory = nullptr;
      const cudaError_t error =
          cudaIpcOpenMemHandle(&memory, handle_of<cudaIpcMemHandle_t>(handle), cudaIpcMemLazyEnablePeerAccess);
      if (error != cudaSuccess) {
        mappings_.erase(handle);
        return status_of(error, "cudaIpcOpenMemHandle");
      }
      mapping.memory = static_cast<std::byte*>(memory);
    }
    ++mapping.users;
    return mapping.memory;
  }
  void give_back(const PeerDevice::Handle& handle) {
    const MutexLock lock(mutex_);
    const auto mapping = mappings_.find(handle);
    if (mapping == mappings_.end() || --mapping->second.users > 0) return;
    cudaIpcCloseMemHandle(mapping->second.memory);
    mappings_.erase(mapping);
  }

 private:
  struct Mapping {
    std::byte* memory = nullptr;
    int users = 0;
  };
  Mutex mutex_;
  std::map<PeerDevice::Handle, Mapping> mappings_ ABSL_GUARDED_BY(mutex_);
};

class CudaEvent : public PeerDevice::Event {
 public:
  explicit CudaEvent(cudaEvent_t event) : event(event) {}
  ~CudaEvent() override { cudaEventDestroy(event); }
  const cudaEvent_t event;
};

class CudaPeerDevice : public PeerDevice {
 public:
  CudaPeerDevice(int index, cudaStream_t side) : index_(index), side_(side) {}
  ~CudaPeerDevice() override {
    if (abandoned_) return;
    for (const auto& [handle, memory] : opened_) OpenedMemory::of_process().give_back(handle);
    cudaStreamDestroy(side_);
  }

  int index() const override { return index_; }

  absl::StatusOr<std::shared_ptr<std::byte>> allocate(std::size_t bytes) override {
    void* memory = nullptr;
    TESSERA_RETURN_IF_ERROR(status_of(cudaMalloc(&memory, std::max<std::size_t>(bytes, 1)), "cudaMalloc"));
    std::shared_ptr<std::byte> owner(static_cast<std::byte*>(memory), [](std::byte* p) { cudaFree(p); });
    TESSERA_RETURN_IF_ERROR(status_of(cudaMemset(memory, 0, bytes), "cudaMemset"));
    return owner;
  }

  absl::StatusOr<Place> locate(const void* memory) override {
    TESSERA_ASSIGN_OR_RETURN(std::byte* const base, allocation_of(memory));
    Place place;
    place.offset = static_cast<std::uint64_t>(static_cast<const std::byte*>(memory) - base);
    cudaIpcMemHandle_t handle;
    TESSERA_RETURN_IF_ERROR(
        status_of(cudaIpcGetMemHandle(&handle, base),
                  "cudaIpcGetMemHandle (memory of expandable segments and of cudaMallocAsync has none)"));
    place.allocation = bytes_of(handle);
    return place;
  }

  absl::StatusOr<std::byte*> open(const Place& peers) override {
    if (const auto known = opened_.find(peers.allocation); known != opened_.end()) return known->second + peers.offset;
    TESSERA_ASSIGN_OR_RETURN(std::byte* const memory, OpenedMemory::of_process().take(peers.allocation));
    opened_[peers.allocation] = memory;
    return memory + peers.offset;
  }

  absl::StatusOr<std::unique_ptr<Event>> make_event(Handle& handle) override {
    cudaEvent_t event = nullptr;
    TESSERA_RETURN_IF_ERROR(status_of(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess),
                                      "cudaEventCreateWithFlags"));
    auto owner = std::make_unique<CudaEvent>(event);
    cudaIpcEventHandle_t ipc;
    TESSERA_RETURN_IF_ERROR(status_of(cudaIpcGetEventHandle(&ipc, event), "cudaIpcGetEventHandle"));
    handle = bytes_of(ipc);
    return std::unique_ptr<Event>(std::move(owner));
  }
  absl::StatusOr<std::unique_ptr<Event>> open_event(const Handle& peers) override {
    cudaEvent_t event = nullptr;
    TESSERA_RETURN_IF_ERROR(
        status_of(cudaIpcOpenEventHandle(&event, handle_of<cudaIpcEventHandle_t>(peers)), "cudaIpcOpenEventHandle"));
    return std::unique_ptr<Event>(std::make_unique<CudaEvent>(event));
  }

  absl::Status record(Queue queue, Event& event) override {
    return status_of(cudaEventRecord(static_cast<CudaEvent&>(event).event, stream(queue)), "cudaEventRecord");
  }
  absl::Status wait(Queue queue, Event& event) override {
    return status_of(cudaStreamWaitEvent(stream(queue), static_cast<CudaEvent&>(event).event, 0),
                     "cudaStreamWaitEvent");
  }

  absl::Status drain() override {
    TESSERA_RETURN_IF_ERROR(status_of(cudaStreamSynchronize(stream(Queue::kCompute)), "cudaStreamSynchronize"));
    return status_of(cudaStreamSynchronize(side_), "cudaStreamSynchronize");
  }
  void abandon() override { abandoned_ = true; }

  absl::Status copy(Queue queue, void* to, const void* from, std::size_t bytes) override {
    return status_of(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream(queue)), "cudaMemcpyAsync");
  }
  absl::Status sum(Queue queue, std::span<const void* const> inputs, DType dtype, float* output,
                   std::size_t numel) override {
    cuda::SumInputs addends;
    for (const void* input : inputs) addends.inputs[addends.count++] = input;
    return status_of(cuda::device_sum(addends, dtype, output, numel, stream(queue)), "device_sum");
  }

 private:
  cudaStream_t stream(Queue queue) const {
    cudaSetDevice(index_);  // any thread may call this
    return queue == Queue::kSide ? side_
                                 : c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(index_)).stream();
  }

  const int index_;
  const cudaStream_t side_;
  std::map<Handle, std::byte*> opened_;
  bool abandoned_ = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PeerDevice>> cuda_peer_device(int index) {
  if (index >= c10::cuda::device_count()) {
    return make_error(
        ExitCode::kUnavailable,
        "comm.transport is \"cuda_host\", but this machine has no usable GPU. [T0451] hint: `tessera doctor` says what "
        "there is; without a GPU take comm.transport \"host\" or \"gloo\"");
  }
  TESSERA_RETURN_IF_ERROR(status_of(cudaSetDevice(index), "cudaSetDevice"));
  int shares_events = 0;
  TESSERA_RETURN_IF_ERROR(
      status_of(cudaDeviceGetAttribute(&shares_events, cudaDevAttrIpcEventSupport, index), "cudaDeviceGetAttribute"));
  if (!shares_events) {
    return make_error(ExitCode::kUnavailable,
                      "comm.transport is \"cuda_host\", but GPU " + std::to_string(index) +
                          " cannot share events between processes. [T0452] hint: take comm.transport \"nccl\"");
  }
  int least = 0, greatest = 0;
  TESSERA_RETURN_IF_ERROR(
      status_of(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange"));
  cudaStream_t side = nullptr;
  TESSERA_RETURN_IF_ERROR(
      status_of(cudaStreamCreateWithPriority(&side, cudaStreamNonBlocking, greatest), "cudaStreamCreateWithPriority"));
  return std::unique_ptr<PeerDevice>(std::make_unique<CudaPeerDevice>(index, side));
}

}  // namespace tessera
