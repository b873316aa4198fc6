#pragma once

// See docs/glossary.md: unit.

#include <cstdint>

#include "sharding/layout/layout.h"

namespace tessera {

/// A run of elements, which is cut into chunks. All chunks have the same number of elements, but the last one may have
/// fewer. The last chunks are offloaded, each in its own record (I/O block).
class Chunks {
 public:
  /// The number of bytes that a disk can read and write without copies by the kernel; larger transfers are multiples of
  /// this number.
  static constexpr std::int64_t kPage = 4096;

  Chunks() = default;
  Chunks(std::int64_t numel, std::int64_t chunk_numel);

  std::int64_t numel() const { return numel_; }
  std::int64_t chunks() const { return chunks_; }
  std::int64_t chunk_numel() const { return chunk_numel_; }
  /// Returns the elements of a chunk, counted from the run's first element.
  Extent chunk(std::int64_t index) const;
  /// Returns the chunk that holds element `at` of the run.
  std::int64_t chunk_of(std::int64_t at) const { return at / chunk_numel_; }

  /// Returns the first chunk that has a record; chunks() if none has.
  std::int64_t first_record() const { return first_record_; }
  std::int64_t records() const { return chunks_ - first_record_; }
  /// Returns the number of elements in front of the first chunk that has a record.
  std::int64_t before_records() const { return numel_before(first_record_); }

  /// Returns the first offloaded chunk if a fraction `share` of the chunks (0 to 1) is offloaded. The number of
  /// offloaded chunks is rounded up.
  std::int64_t first_below(double share) const;
  /// Offloads the chunks from `first_record` on.
  void put_below(std::int64_t first_record) { first_record_ = first_record; }

 protected:
  std::int64_t numel_before(std::int64_t chunk) const {
    return chunk * chunk_numel_ < numel_ ? chunk * chunk_numel_ : numel_;
  }

 private:
  std::int64_t numel_ = 0, chunk_numel_ = 1, chunks_ = 0, first_record_ = 0;
};

/// Cuts a rank's part of a group's parameters into chunks, if units are gathered from records. The part has `numel`
/// elements of `element_bytes` bytes, of which the fraction `share` is offloaded. The part consists of whole pages
/// (partition). So its records are whole pages too, and are read directly into the gathered unit.
Chunks parameter_chunks(std::int64_t numel, std::int64_t element_bytes, std::int64_t record_bytes, double share);

}  // namespace tessera
