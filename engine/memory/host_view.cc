#include "engine/memory/host_view.h"

#include <ATen/ops/empty.h>

#include "runtime/comm/device/device_memory.h"
#include "sharding/unrecorded.h"

namespace tessera {
HostView::HostView(void* memory, std::int64_t bytes, c10::Device device, Content content)
    : memory_(memory), device_(device), data_(static_cast<std::byte*>(memory)) {
  if (device.is_cpu()) return;
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

}  // namespace tessera
