#include "runtime/engine/host_view.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "sharding/unrecorded.h"

namespace tessera {
namespace {

at::Tensor bytes_at(void* memory, std::int64_t bytes, c10::Device device) {
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  return at::for_blob(memory, {bytes}).options(options).target_device(device).make_tensor();
}

}  // namespace

HostView::HostView(void* memory, std::int64_t bytes, c10::Device device, Content content)
    : memory_(memory), device_(device), data_(static_cast<std::byte*>(memory)) {
  if (device.is_cpu()) return;
  const Unrecorded unrecorded;
  copy_ = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
  data_ = static_cast<std::byte*>(copy_.data_ptr());
  if (content == kFetch && bytes > 0) copy_.copy_(bytes_at(memory, bytes, device));
}

void HostView::write_back() const {
  if (!copy_.defined() || copy_.numel() == 0) return;
  const Unrecorded unrecorded;
  bytes_at(memory_, copy_.numel(), device_).copy_(copy_);
}

}  // namespace tessera
