#include "engine/memory/host_view.h"

#include <ATen/ops/empty.h>

#include <cstring>

#include "runtime/comm/device/device_memory.h"
#include "sharding/unrecorded.h"

namespace tessera {
namespace {

bool copies_in_every_view = false;

}  // namespace

HostView::HostView(void* memory, std::int64_t bytes, c10::Device device, Content content)
    : memory_(memory), device_(device), data_(static_cast<std::byte*>(memory)) {
  if (device.is_cpu() && !copies_in_every_view) return;
  const Unrecorded unrecorded;
  copy_ = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
  data_ = static_cast<std::byte*>(copy_.data_ptr());
  if (content == kFetch && bytes > 0) copy_.copy_(tensor_on(device, memory, static_cast<std::size_t>(bytes)));
}

void HostView::write_back() const {
  if (!copy_.defined() || copy_.numel() == 0) return;
  const Unrecorded unrecorded;
  tensor_on(device_, memory_, copy_.nbytes()).copy_(copy_);
}

void fetch_state(void* to, void* memory, std::int64_t bytes, c10::Device device) {
  if (bytes == 0) return;
  const HostView view(memory, bytes, device, HostView::kFetch);
  std::memcpy(to, view.data(), static_cast<std::size_t>(bytes));
}

void write_state(void* memory, const void* from, std::int64_t bytes, c10::Device device) {
  if (bytes == 0) return;
  const HostView view(memory, bytes, device, HostView::kUndefined);
  std::memcpy(view.data(), from, static_cast<std::size_t>(bytes));
  view.write_back();
}

void copy_in_every_host_view(bool copies) { copies_in_every_view = copies; }

}  // namespace tessera
