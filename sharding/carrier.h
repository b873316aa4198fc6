#pragma once

// See docs/glossary.md: carrier, lease.

#include <cstddef>
#include <cstdint>
#include <span>

namespace tessera {

class Carrier;

/// The ways in which the holder of a lease uses its record.
enum class LeaseUse : std::uint8_t {
  kRead,       ///< the holder only reads the record, which keeps its values
  kChange,     ///< the holder reads and changes the record
  kOverwrite,  ///< the holder writes the record anew; its earlier content is undefined
};

/// Gives its holder the use of a record until the lease ends. The destructor ends the lease and gives the record back,
/// changed or not. If that fails, the destructor logs the error, and the carrier's next call throws. If an exception
/// that was thrown during the lease ends it, the destructor drops the record. All leases must end before their carrier
/// is destroyed.
class Lease {
 public:
  Lease() = default;
  ~Lease() { end(); }
  Lease(Lease&& other) noexcept { *this = static_cast<Lease&&>(other); }
  Lease& operator=(Lease&& other) noexcept;

  /// Returns whether there is a record.
  explicit operator bool() const { return carrier_ != nullptr; }
  std::int64_t record() const { return record_; }
  /// Returns the record's memory. It is empty if the carrier has no memory for the record.
  std::span<std::byte> bytes() const { return bytes_; }

  /// Call it if the holder changes a record that it acquired for reading.
  void change() { changes_ = true; }
  /// Gives the record back now, unless that was done before. Throws what Carrier::acquire throws.
  void give_back();
  /// Ends the lease after a failure, when the record's values are not needed.
  void drop() noexcept;

 private:
  friend class Carrier;
  Lease(Carrier& carrier, std::int64_t record, bool changes, std::span<std::byte> bytes);
  void end() noexcept;

  Carrier* carrier_ = nullptr;
  std::int64_t record_ = -1;
  bool changes_ = false;
  int exceptions_at_start_ = 0;
  std::span<std::byte> bytes_;
};

/// Brings records of training state to the memory in which they are used, and takes them back. Records may be in files,
/// in memory of the host, or in memory of a GPU. There is one implementation for each kind of transfer; its description
/// says what its records are, and which thread calls it. The code in `sharding` accesses offloaded state only through
/// this class. Calls throw tessera::Error: 74 if a record cannot be read, or an earlier record could not be written; 65
/// if a record that is read has other bytes than those that were written.
class Carrier {
 public:
  virtual ~Carrier() = default;
  Carrier(const Carrier&) = delete;
  Carrier& operator=(const Carrier&) = delete;

  /// Announces the records that are acquired next, in this order. The first records are brought ahead, without waiting.
  /// The new order replaces the order that was announced before, unless the carrier's description says otherwise.
  virtual void announce(std::span<const std::int64_t> order) = 0;
  /// Returns a lease of the record. A record that was not announced is brought first.
  Lease acquire(std::int64_t record, LeaseUse use);
  /// Forgets the announced order: no more records are brought ahead. Changed records are written back in the
  /// background.
  virtual void flush() = 0;

  /// Returns the number of bytes that were copied to a GPU so far.
  virtual std::int64_t uploaded_bytes() const { return 0; }
  /// Returns the number of bytes of pinned host memory that the carrier has for copies to a GPU.
  virtual std::int64_t pinned_bytes() const { return 0; }

 protected:
  Carrier() = default;

 private:
  friend class Lease;
  /// Begins a lease of a record, and returns its memory.
  virtual std::span<std::byte> take(std::int64_t record, LeaseUse use) = 0;
  /// Ends a lease. `changed` says whether the present values become the record's values.
  virtual void give_back(std::int64_t record, bool changed) = 0;
  /// Ends a lease after a failure.
  virtual void drop(std::int64_t record) noexcept = 0;
};

}  // namespace tessera
