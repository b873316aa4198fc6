#pragma once

#include <cstdint>

namespace tessera {

// Reads and writes of fp32 numbers that other ranks read and write at the same time, without a lock. Each number is
// read and written as one aligned word of 32 bits, by relaxed atomic operations: whoever reads it gets a number that
// somebody wrote, never halves of two. The order in which others see two numbers is not defined. LibTorch's
// operators read the same memory by plain loads, wide ones too: on x86-64 and arm64 an aligned word of such a load is
// not torn either.

/// Copies `shared` [n] to `own`.
void read_words(const float* shared, float* own, std::int64_t n);

/// Writes to `shared` those elements of `after` [n] that differ from `before`. What others wrote meanwhile is lost.
void write_words(float* shared, const float* before, const float* after, std::int64_t n);

/// Adds an update to `shared` [n], which had the values `before` when it was computed, and would have `after` where
/// nobody else wrote. A number that still has its bits gets those of `after`; a number that others have changed gets
/// `after - before` added. A number that the update leaves as it is, is not written. An update that another rank makes
/// between the load and the store of one number is lost.
void merge_words(float* shared, const float* before, const float* after, std::int64_t n);

}  // namespace tessera
