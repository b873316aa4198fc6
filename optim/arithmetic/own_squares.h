#pragma once

// See docs/glossary.md: unit.

#include <cstdint>

#include "tessera/dtype.h"

namespace tessera {

/// Elements whose squares are added up in one go: 16 lanes take every 16th of them, and are added by halves. Sums of
/// such blocks are added one after the other (sharding/reduce/squared_copy.h does the same on the CPU).
constexpr std::uint64_t kSquaredBlock = 4096;

/// Gradients of one unit that a GPU squares for "noise_scale", at most as many as one launch takes. Kernels get this by
/// value; all pointers are to memory of the device.
struct OwnPieces {
  static constexpr std::uint32_t kMost = 32;
  struct Piece {
    const void* values = nullptr;  ///< [numel] of `dtype`
    std::uint64_t numel = 0;
    std::uint32_t first_block = 0;  ///< number of its first block among those of all pieces
  };
  Piece pieces[kMost];
  std::uint32_t count = 0, blocks = 0;
  DType dtype = DType::kF32;
  bool begins = true, ends = true;  ///< whether they are the first of the unit, and the last
  double* block_sums = nullptr;     ///< [blocks]: scratch
  double* unit_sum = nullptr;       ///< [1]: what earlier launches found of the unit
  /// [1]: gets the unit's squared norm, where that is not 0; or NaN where `is_measured` [1] says that it had it before
  double* sum = nullptr;
  std::uint8_t* is_measured = nullptr;
};

}  // namespace tessera
