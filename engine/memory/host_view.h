#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace tessera {

/// Where memory of training state is.
struct MemoryPlace {
  MemoryPlace(c10::Device device_given, bool in_record_given = false)  // NOLINT: a device is a place
      : device(device_given), in_record(in_record_given) {}
  c10::Device device;      ///< that trains
  bool in_record = false;  ///< host memory, whatever trains (FlatGroup::below)
};

/// Memory of training state as host code sees it: the memory itself if it is the host's, else a copy. Making a copy waits
/// for the device, so it is for set-up and rare events.
class HostView {
 public:
  enum Content { kFetch, kUndefined };

  HostView(void* memory, std::int64_t bytes, MemoryPlace place, Content content);

  std::byte* data() const { return data_; }
  /// Puts what host code wrote into the memory itself. On the CPU it is there already.
  void write_back() const;

 private:
  void* const memory_;
  const c10::Device device_;
  at::Tensor copy_;  ///< of device memory
  std::byte* data_;
};

/// Visits memory as host code sees it, one portion after the other, so that a copy of a device's takes little.
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

/// Copies training state to host memory, and the reverse. Both wait for the device, as HostView.
void fetch_state(void* to, void* memory, std::int64_t bytes, MemoryPlace place);
void write_state(void* memory, const void* from, std::int64_t bytes, MemoryPlace place);

/// For tests, where the host's memory stands for a device's: from now on views of it are copies, as a device's are. `is_hosts` says
/// which memory stands for the host's, and views that take one for the other are errors. Null: as before.
void let_host_memory_be_a_devices(std::function<bool(const void*)> is_hosts);

}  // namespace tessera
