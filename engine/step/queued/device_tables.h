#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "sharding/arena.h"
#include "sharding/host_view.h"

namespace tessera {

/// Memory of a device for the small tables that the kernels of a step read and write. QueuedStep and its parts allocate
/// tables when they are made; the tables live as long as this object.
class DeviceTables {
 public:
  explicit DeviceTables(c10::Device device) : device_(device) {}

  /// Returns memory for `count` elements, which are zeros.
  template <class T>
  T* take(std::size_t count) {
    const auto bytes = static_cast<std::int64_t>(count * sizeof(T));
    return reinterpret_cast<T*>(memory_.emplace_back(Arena::plain("the step's tables", bytes, device_)).take(bytes));
  }
  /// Returns a copy of `values` in the device's memory.
  template <class T>
  T* put(std::span<const T> values) {
    T* const place = take<T>(values.size());
    write_state(place, values.data(), static_cast<std::int64_t>(values.size_bytes()), device_);
    return place;
  }

 private:
  const c10::Device device_;
  std::vector<Arena> memory_;
};

}  // namespace tessera
