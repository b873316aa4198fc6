#include "sharding/host_view.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <utility>

#include "runtime/torch/tensor_on.h"
#include "sharding/unrecorded.h"

namespace tessera {
namespace {

std::function<bool(const void*)> is_the_hosts;  ///< null except in tests

}  // namespace

HostView::HostView(void* memory, std::int64_t bytes, MemoryPlace place, Content content)
    : memory_(memory), device_(place.device), data_(static_cast<std::byte*>(memory)) {
  if (is_the_hosts && bytes > 0) {
    TORCH_INTERNAL_ASSERT(is_the_hosts(memory) == place.in_record, "a view takes memory of ",
                          place.in_record ? "the device for the host's" : "the host for the device's");
  }
  if (place.in_record || (place.device.is_cpu() && !is_the_hosts)) return;
  const Unrecorded unrecorded;
  copy_ = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
  data_ = static_cast<std::byte*>(copy_.data_ptr());
  if (content == kFetch && bytes > 0) copy_.copy_(tensor_on(device_, memory, static_cast<std::size_t>(bytes)));
}

void HostView::write_back() const {
  if (!copy_.defined() || copy_.numel() == 0) return;
  const Unrecorded unrecorded;
  tensor_on(device_, memory_, copy_.nbytes()).copy_(copy_);
}

void fetch_state(void* to, void* memory, std::int64_t bytes, MemoryPlace place) {
  if (bytes == 0) return;
  const HostView view(memory, bytes, place, HostView::kFetch);
  std::memcpy(to, view.data(), static_cast<std::size_t>(bytes));
}

void write_state(void* memory, const void* from, std::int64_t bytes, MemoryPlace place) {
  if (bytes == 0) return;
  const HostView view(memory, bytes, place, HostView::kUndefined);
  std::memcpy(view.data(), from, static_cast<std::size_t>(bytes));
  view.write_back();
}

void let_host_memory_be_a_devices(std::function<bool(const void*)> is_hosts) { is_the_hosts = std::move(is_hosts); }

}  // namespace tessera
