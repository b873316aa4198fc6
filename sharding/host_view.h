#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace tessera {

/// Says where memory of training state is: on the device that trains, or in a record in host memory.
struct MemoryPlace {
  MemoryPlace(c10::Device device_given, bool in_record_given = false)  // NOLINT: a device is a place
      : device(device_given), in_record(in_record_given) {}
  c10::Device device;      ///< the device that trains
  bool in_record = false;  ///< the memory is that of the host, whatever device trains (FlatGroup::states_below)
};

/// Gives host code access to memory of training state: the memory itself if it is host memory, else a copy. A copy
/// waits for the device, so views serve set-up and rare events (checkpoints, comparisons), not steps. Throws c10::Error
/// where the copy fails.
class HostView {
 public:
  enum Content { kFetch, kUndefined };

  /// kFetch: data() has the memory's content; kUndefined: a copy is not filled.
  HostView(void* memory, std::int64_t bytes, MemoryPlace place, Content content);

  std::byte* data() const { return data_; }
  /// Copies changes of host code back to the memory. Host memory has them already.
  void write_back() const;

 private:
  void* const memory_;
  const c10::Device device_;
  at::Tensor copy_;  ///< the copy of device memory, or undefined
  std::byte* data_;
};

/// Calls `visit(data, bytes)` for one portion of the memory after the other, so that a copy of device memory stays
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

/// Copy training state to host memory (`fetch_state`), and host memory to training state (`write_state`). Both wait for
/// the device, like HostView.
void fetch_state(void* to, void* memory, std::int64_t bytes, MemoryPlace place);
void write_state(void* memory, const void* from, std::int64_t bytes, MemoryPlace place);

/// Only tests call this: host memory stands for a device's memory from now on, so views of it are copies. `is_hosts`
/// says which memory stands for host memory; a view that takes host memory for device memory, or the reverse, is an
/// error. null ends this.
void let_host_memory_be_a_devices(std::function<bool(const void*)> is_hosts);

}  // namespace tessera
