#pragma once

#include <torch/version.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

/// Calls of c10d::Backend that LibTorch 2.14 gave new names; LibTorch keeps the old names as deprecated aliases. Each
/// name forwards to the other one, so a user's backend may override either of them. Tessera calls them through these
/// functions.
///
/// The macro is 1 if c10d::Backend has the new names.
#define TESSERA_TORCH_HAS_SINGLE_NAMES \
  (TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 14))

namespace tessera {

/// Gathers. `output` has the shape [size * input.numel()].
inline c10::intrusive_ptr<c10d::Work> all_gather_single(c10d::Backend& backend, at::Tensor& output, at::Tensor& input) {
#if TESSERA_TORCH_HAS_SINGLE_NAMES
  return backend.all_gather_single(output, input);
#else
  return backend._allgather_base(output, input);
#endif
}

/// Reduces and scatters. `input` has the shape [size * output.numel()].
inline c10::intrusive_ptr<c10d::Work> reduce_scatter_single(c10d::Backend& backend, at::Tensor& output,
                                                            at::Tensor& input) {
#if TESSERA_TORCH_HAS_SINGLE_NAMES
  return backend.reduce_scatter_single(output, input);
#else
  return backend._reduce_scatter_base(output, input);
#endif
}

/// Exchanges equal parts. Both tensors have the shape [size * part].
inline c10::intrusive_ptr<c10d::Work> all_to_all_single(c10d::Backend& backend, at::Tensor& output, at::Tensor& input) {
  std::vector<std::int64_t> equal_parts;
#if TESSERA_TORCH_HAS_SINGLE_NAMES
  return backend.all_to_all_single(output, input, equal_parts, equal_parts);
#else
  return backend.alltoall_base(output, input, equal_parts, equal_parts);
#endif
}

}  // namespace tessera
