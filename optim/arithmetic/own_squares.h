#pragma once

// See docs/glossary.md: unit.

#include <cstdint>

#include "tessera/dtype.h"

namespace tessera {

/// The number of elements whose squares are added up together. Each of 16 lanes adds every 16th square. Then the upper
/// half of the lanes is added to the lower half, down to one sum. The sums of such blocks are added one after another
/// (sharding/reduce/pack/squared_copy.h does the same on the CPU).
constexpr std::uint64_t kSquaredBlock = 4096;

/// Gradients of one unit that a GPU squares for "noise_scale", at most as many as one launch handles. Kernels get this
/// struct by value; all pointers are to memory of the device.
struct OwnPieces {
  static constexpr std::uint32_t kMost = 32;
  struct Piece {
    const void* values = nullptr;  ///< [numel] of `dtype`
    std::uint64_t numel = 0;
    std::uint32_t first_block = 0;  ///< number of the piece's first block among the blocks of all pieces
  };
  Piece pieces[kMost];
  std::uint32_t count = 0, blocks = 0;
  DType dtype = DType::kF32;
  bool begins = true, ends = true;  ///< whether these gradients include the first of the unit, and the last
  double* block_sums = nullptr;     ///< [blocks]: scratch
  double* unit_sum = nullptr;       ///< [1]: sum of squares from earlier launches
  /// [1]: the unit's squared norm is added to this sum if the norm is not 0. NaN is added instead if `is_measured` [1]
  /// is not 0: a norm of the unit was added before
  double* sum = nullptr;
  std::uint8_t* is_measured = nullptr;
};

}  // namespace tessera
