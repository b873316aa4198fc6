#pragma once

// See docs/glossary.md: dealt, flat group, unit.

#include <cstdint>
#include <string>
#include <vector>

#include "sharding/layout/layout.h"
#include "tessera/dtype.h"

namespace tessera {

/// A tensor as a matrix: rows x columns elements, row by row in memory.
struct MatrixShape {
  std::int64_t rows = 0, columns = 0;
  friend bool operator==(const MatrixShape&, const MatrixShape&) = default;
};

/// States that an optimizer keeps for whole tensors (which are dealt to owners), in addition to states of single
/// elements. Each state has its own shape, for example a number for each row. States lie in a separate flat buffer: all
/// states of the first tensor, then those of the second tensor, and so on.
struct TensorStates {
  Layout layout;  ///< layout of all states
  /// [tensors + 1]: index of the first state of each tensor; empty: there are no states
  std::vector<std::size_t> first = {};

  bool empty() const { return first.empty(); }
  std::int64_t numel() const { return empty() ? 0 : layout.numel(); }
  /// Returns the extent that all states of a tensor take up, with the gaps between them.
  Extent extent_of(std::size_t tensor) const;
};

/// One flat group of a unit: parameters of one dtype. Either all of them train, or all are frozen. Either all are
/// updated element by element, or all as matrices.
struct GroupShape {
  DType dtype = DType::kF32;
  bool trainable = true;
  Layout layout;
  std::vector<MatrixShape> matrices = {};  ///< shape of each tensor, if tensors are updated as matrices; else empty
  /// Shape of each tensor as its elements lie in memory, if gradients are sent as factors; a tensor with fewer than two
  /// dimensions has no rows. The list is empty if gradients are not sent as factors.
  std::vector<MatrixShape> factored = {};
  TensorStates tensor_states = {};  ///< states of `matrices`
  std::int64_t element_bytes() const { return static_cast<std::int64_t>(size_of(dtype)); }
  std::int64_t gathered_bytes() const { return layout.numel() * element_bytes(); }
};

/// The description of a unit for plans: its name, and its flat groups. It has only sizes, and no memory of parameters.
struct UnitShape {
  std::string name;
  std::vector<GroupShape> groups;
  std::int64_t gathered_bytes() const;
  std::int64_t trainable_numel() const;  ///< number of trainable elements, padding included
  std::int64_t trainable_parameters() const;
};

/// Calls `visit(group)` for every group of the units, in their order.
template <class Visit>
void for_each_group(const std::vector<UnitShape>& units, const Visit& visit) {
  for (const UnitShape& unit : units) {
    for (const GroupShape& group : unit.groups) visit(group);
  }
}

/// Calls `visit(group)` for every group that trains.
template <class Visit>
void for_each_trainable(const std::vector<UnitShape>& units, const Visit& visit) {
  for_each_group(units, [&](const GroupShape& group) {
    if (group.trainable) visit(group);
  });
}

}  // namespace tessera
