#pragma once

// See docs/glossary.md: flat group.

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "tessera/dtype.h"

namespace tessera {

/// Number of elements in a block of an 8-bit state. The elements of a block share a scale. Blocks begin at the start of
/// the flat group.
inline constexpr std::int64_t kStateBlock = 256;

/// Memory that one state of a run of elements needs.
struct StateBytes {
  std::int64_t data = 0;
  std::int64_t scales = 0;  ///< bytes of fp32 scales; 0 except for k8Bit
  constexpr std::int64_t total() const { return data + scales; }
};

/// Returns the bytes of one state of `numel` elements. REQUIRES: the run begins at a multiple of kStateBlock in its
/// group, if dtype is k8Bit.
constexpr StateBytes state_bytes(StateDType dtype, std::int64_t numel) {
  switch (dtype) {
    case StateDType::kF32:
      return {4 * numel, 0};
    case StateDType::kBF16:
      return {2 * numel, 0};
    case StateDType::k8Bit:
      return {numel, (numel + kStateBlock - 1) / kStateBlock * 4};
  }
  return {};
}

/// Largest number of states that an optimizer keeps.
inline constexpr std::size_t kMostStates = 4;

/// The formats of the states that an optimizer keeps for each element, in the optimizer's order.
class StateFormats {
 public:
  constexpr StateFormats() = default;
  constexpr StateFormats(std::initializer_list<StateDType> formats) {
    for (const StateDType dtype : formats) push_back(dtype);
  }

  /// REQUIRES: size() < kMostStates.
  constexpr void push_back(StateDType dtype) { dtypes_[size_++] = dtype; }
  constexpr std::size_t size() const { return size_; }
  constexpr StateDType operator[](std::size_t i) const { return dtypes_[i]; }
  constexpr const StateDType* begin() const { return dtypes_.data(); }
  constexpr const StateDType* end() const { return begin() + size_; }

 private:
  std::array<StateDType, kMostStates> dtypes_{};
  std::size_t size_ = 0;
};

/// Returns how the masters of parameters of dtype `parameter` are kept if the strategy chooses `wanted`.
constexpr MasterKind master_kind_of(MasterKind wanted, DType parameter) {
  return parameter == DType::kBF16 ? wanted : MasterKind::kF32;
}

/// Returns whether a parameter is its own master, or holds half of the master's bits. If so, an update reads the
/// parameter.
constexpr bool holds_masters(MasterKind wanted, DType parameter) {
  return parameter == DType::kF32 || master_kind_of(wanted, parameter) == MasterKind::kSplitBF16;
}

/// Returns the bytes that the masters of `numel` elements take in addition to the parameters themselves.
constexpr std::int64_t master_bytes(MasterKind wanted, DType parameter, std::int64_t numel) {
  if (parameter == DType::kF32) return 0;
  return master_kind_of(wanted, parameter) == MasterKind::kSplitBF16 ? 2 * numel : 4 * numel;
}

}  // namespace tessera
