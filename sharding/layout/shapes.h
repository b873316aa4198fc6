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

/// One flat group of a unit: parameters of one dtype that all train or are all frozen, and are all updated element by element or all as
/// matrices.
struct GroupShape {
  DType dtype = DType::kF32;
  bool trainable = true;
  Layout layout;
  std::vector<MatrixShape> matrices = {};  ///< of each tensor, where they are updated as matrices; else empty
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
