#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sharding/layout/layout.h"
#include "tessera/dtype.h"

namespace tessera {

struct MatrixShape {
  std::int64_t rows = 0, columns = 0;
  friend bool operator==(const MatrixShape&, const MatrixShape&) = default;
};

/// What an optimizer keeps of whole tensors that are dealt to owners, beside what it keeps of each element: states of shapes of their own,
/// such as a number for each row. They lie in a flat buffer of their own, all of the first tensor's, then the second one's, ...
struct TensorStates {
  Layout layout;                        ///< of all states
  std::vector<std::size_t> first = {};  ///< [tensors + 1]: the first one of each tensor; empty: there are none

  bool empty() const { return first.empty(); }
  std::int64_t numel() const { return empty() ? 0 : layout.numel(); }
  /// Of all states of a tensor, and what lies between them.
  Extent extent_of(std::size_t tensor) const;
};

/// One flat group of a unit: parameters of one dtype that all train or are all frozen, and are all updated element by element or all as
/// matrices.
struct GroupShape {
  DType dtype = DType::kF32;
  bool trainable = true;
  Layout layout;
  std::vector<MatrixShape> matrices = {};  ///< of each tensor, where they are updated as matrices; else empty
  /// Of each tensor, where gradients are sent as factors: as its elements lie in memory, no rows where it has fewer than two dimensions.
  /// Else empty.
  std::vector<MatrixShape> factored = {};
  TensorStates tensor_states = {};  ///< of `matrices`
  std::int64_t gathered_bytes() const { return layout.numel() * static_cast<std::int64_t>(size_of(dtype)); }
};

struct UnitShape {
  std::string name;
  std::vector<GroupShape> groups;
  std::int64_t gathered_bytes() const;
  std::int64_t trainable_numel() const;  ///< with padding
  std::int64_t trainable_parameters() const;
};

}  // namespace tessera
