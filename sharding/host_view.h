#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace tessera {

/// The place of memory of training state: on the device that trains, or in a record in host memory.
struct MemoryPlace {
  MemoryPlace(c10::Device device_given, bool in_record_given = false)  // NOLINT: a device is a place
      : device(device_given), in_record(in_record_given) {}
  c10::Device device;      ///< the device that trains
  bool in_record = false;  ///< whether the memory is the host's, whatever device trains (FlatGroup::states_below)
};

/// Gives host code access to memory of training state: the memory itself if it is host memory, else a copy. A copy
/// waits for the device, so views are meant for set-up and rare events (checkpoints, comparisons), not for steps.
/// Throws c10::Error if the copy fails.
class HostView {
 public:
  enum Content { kFetch, kUndefined };

  /// If `content` is kFetch, data() has the memory's content. If it is kUndefined, a copy is not filled.
  HostView(void* memory, std::int64_t bytes, MemoryPlace place, Content content);

  std::byte* data() const { return data_; }
  /// Copies changes by host code back to the memory. It does nothing for host memory, which is changed in place.
  void write_back() const;

 private:
  void* const memory_;
  const c10::Device device_;
  at::Tensor copy_;  ///< the copy of device memory, or undefined
  std::byte* data_;
};

/// Calls `visit(data, bytes)` for one portion of the memory after another, so that the copy of device memory stays
/// small.
template <class Visit>
void view_in_portions(const void* memory, std::int64_t bytes, MemoryPlace place, const Visit& visit) {
  constexpr std::int64_t kPortion = 1 << 19;
  auto* const begin = static_cast<std::byte*>(const_cast<void*>(memory));
  for (std::int64_t done = 0; done < bytes; done += kPortion) {
    const std::int64_t count = std::min(kPortion, bytes - done);
    const HostView view(begin + done, count, place, HostView::kFetch);
    visit(view.data(), count);
  }
}

/// These functions copy training state to host memory (`fetch_state`), and host memory to training state
/// (`write_state`). Both wait for the device, as HostView does.
void fetch_state(void* to, void* memory, std::int64_t bytes, MemoryPlace place);
void write_state(void* memory, const void* from, std::int64_t bytes, MemoryPlace place);

/// Only tests call this: from now on, host memory is treated as device memory, so views of it are copies. `is_hosts`
/// returns whether memory is treated as host memory. A view throws if its MemoryPlace says otherwise. A call with null
/// makes views treat memory normally again.
void let_host_memory_be_a_devices(std::function<bool(const void*)> is_hosts);

}  // namespace tessera
