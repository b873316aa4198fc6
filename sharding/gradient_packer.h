#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "sharding/compute_device.h"
#include "sharding/unit.h"

namespace tessera {

/// Packs the gradients of one unit into its bucket, and knows which have come. `bucket` is where the group's part of the
/// bucket begins, as elements of `dtype` in the group's layout.
class GradientPacker {
 public:
  GradientPacker(const Unit& unit, DType dtype, ComputeDevice device);

  /// Gradients that one of each trainable parameter makes.
  std::int64_t expected() const { return expected_; }
  bool is_complete() const { return arrived_count_ == expected_; }
  /// Has this parameter's gradient come since `reset`?
  bool used(const FlatGroup& group, std::size_t parameter) const { return parts_[group.index].used[parameter] != 0; }

  /// An empty bucket comes: of it, nothing has arrived.
  void begin();
  void reset();
  /// Copies `gradient` to its place, or adds it to one that came before. On a GPU the small ones wait for `flush`.
  /// `is_usual`: the bucket is one of the few that this unit gets again and again.
  void take(const FlatGroup& group, std::size_t parameter, const at::Tensor& gradient, std::byte* bucket,
            bool is_usual);
  void flush();
  /// Zeros where no gradient came, and, unless they are zero already, in the layout's gaps.
  void fill_missing(const FlatGroup& group, std::byte* bucket, bool gaps_are_zero) const;

 private:
  /// What there is of a group.
  struct Part {
    std::vector<char> arrived, used;             ///< [parameter]: since `begin`, since `reset`
    std::vector<at::Tensor> places, gradients;   ///< to be copied together
    std::vector<std::vector<at::Tensor>> views;  ///< [parameter]: on a GPU, of each usual place
  };

  at::Tensor view_of(const FlatGroup& group, std::size_t parameter, std::byte* place, bool is_usual);
  void clear(std::byte* memory, std::int64_t bytes) const;

  const DType dtype_;
  const ComputeDevice device_;
  std::int64_t expected_ = 0, arrived_count_ = 0;
  std::vector<Part> parts_;
};

}  // namespace tessera
