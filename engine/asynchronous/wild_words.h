#pragma once

#include <cstdint>

namespace tessera {

// These functions read and write, without a lock, fp32 numbers that other ranks read and write at the same time. Each
// number is read and written as one aligned word of 32 bits, by relaxed atomic operations: a read gets a number that
// some rank wrote, never the halves of two numbers. The order in which other ranks see the writes of two numbers is not
// defined. LibTorch's operators read the same memory by plain loads, also by wide (SIMD) loads: on x86-64 and arm64 an
// aligned word of such a load is not torn either.

/// Copies `shared` [n] to `own`.
void read_words(const float* shared, float* own, std::int64_t n);

/// Writes to `shared` those elements of `after` [n] that differ from `before`. Values that other ranks have written to
/// these elements since `before` was read are lost.
void write_words(float* shared, const float* before, const float* after, std::int64_t n);

/// Adds an update to `shared` [n]. The update was computed when `shared` had the values `before`. If no other rank has
/// written since then, `shared` gets the values `after`. A number that still has the bits of `before` gets the bits of
/// `after`. A number that other ranks have changed grows by `after - before`. A number is not written if the update
/// does not change it. An update that another rank makes between the load and the store of one number is lost.
void merge_words(float* shared, const float* before, const float* after, std::int64_t n);

}  // namespace tessera
