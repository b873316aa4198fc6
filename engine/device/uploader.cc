#include "engine/device/uploader.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <exception>
#include <utility>

#include "engine/device/data_seconds.h"
#include "runtime/base/log.h"
#include "tessera/error.h"
#include "tessera/span.h"

namespace tessera {

struct Upload::State {
  std::vector<at::Tensor> tensors;
  std::shared_ptr<DeviceKernels::Mark> copied;  ///< null after later computation was ordered behind the copy
};

Upload::Upload(std::unique_ptr<State> state) : state_(std::move(state)) {}
Upload::Upload(Upload&&) noexcept = default;
Upload& Upload::operator=(Upload&& other) noexcept {
  std::swap(state_, other.state_);
  return *this;
}

/// Joins the copy first, because LibTorch's allocator gets the memory back, and takes only the stream that computes
/// into account.
Upload::~Upload() {
  try {
    if (state_) tensors();
  } catch (const std::exception& error) {
    log_error(std::string("Upload: ") + error.what());
  }
}

const std::vector<at::Tensor>& Upload::tensors() {
  const Span span("upload", {}, &data_seconds_of_this_thread().uploads);
  if (const auto copied = std::exchange(state_->copied, nullptr)) copied->join();
  return state_->tensors;
}

namespace {

constexpr std::size_t kAlign = 64;

std::size_t staged_bytes(const at::Tensor& tensor) {
  return tensor.is_pinned() ? 0 : (tensor.nbytes() + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

/// Returns a staging buffer that no copy reads any more: the smallest that is large enough, or a new one.
Uploader::Source& Uploader::idle_source(std::size_t bytes) {
  Source* best = nullptr;
  for (Source& source : sources_) {
    if (source.copied && !source.copied->passed()) continue;
    source.copied.reset();
    source.tensors.clear();
    if (source.bytes >= bytes && (!best || source.bytes < best->bytes)) best = &source;
  }
  if (best) return *best;
  return sources_.emplace_back(Source{kernels_->pinned_memory(bytes), bytes, {}, nullptr});
}

Upload Uploader::start(const std::vector<at::Tensor>& host) {
  const Span span("upload", {}, &data_seconds_of_this_thread().uploads);
  auto state = std::make_unique<Upload::State>();
  if (!device_.is_queued) {
    state->tensors = host;
    return Upload(std::move(state));
  }
  std::vector<at::Tensor> dense;
  std::size_t bytes = 0;
  for (const at::Tensor& tensor : host) {
    if (!tensor.is_cpu()) {
      throw Error(ExitCode::kUsage,
                  c10::str("upload takes tensors of the CPU, got one of ", tensor.device(),
                           ". [T0099] hint: what is on the GPU already needs no upload; others move by .cpu()"));
    }
    bytes += staged_bytes(dense.emplace_back(tensor.contiguous()));
  }
  Source& source = idle_source(bytes);
  std::vector<DeviceKernels::UploadPiece> pieces;
  std::byte* staging = source.staging.get();
  for (const at::Tensor& tensor : dense) {
    const auto* from = static_cast<const std::byte*>(tensor.const_data_ptr());
    if (const std::size_t staged = staged_bytes(tensor)) {
      std::memcpy(staging, from, tensor.nbytes());
      from = std::exchange(staging, staging + staged);
    } else {
      source.tensors.push_back(tensor);
    }
    const at::Tensor& there =
        state->tensors.emplace_back(at::empty(tensor.sizes(), tensor.options().device(device_.device)));
    if (tensor.nbytes() > 0) pieces.push_back({there.data_ptr(), from, tensor.nbytes()});
  }
  // Work that was queued earlier may still read the memory that the allocator has given out for this copy.
  const std::unique_ptr<DeviceKernels::Mark> free = kernels_->mark();
  state->copied = source.copied = kernels_->upload(pieces, free.get());
  return Upload(std::move(state));
}

}  // namespace tessera
