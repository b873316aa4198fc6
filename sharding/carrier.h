#pragma once

// See docs/glossary.md: carrier, lease.

#include <cstddef>
#include <cstdint>
#include <span>

namespace tessera {

class Carrier;

/// The ways in which the holder of a lease uses its record.
enum class LeaseUse : std::uint8_t {
  kRead,       ///< reads it; the record keeps its values
  kChange,     ///< reads and changes it
  kOverwrite,  ///< writes it anew; what was there before is undefined
};

/// A record that is where its holder can use it, until the lease ends. The lease ends by itself: its destructor gives
/// the record back, changed or not. If that fails, the destructor logs why, and the carrier's next call throws. If the
/// lease ends by an exception that began after it, its destructor drops the record. Leases end before their carrier.
class Lease {
 public:
  Lease() = default;
  ~Lease() { end(); }
  Lease(Lease&& other) noexcept { *this = static_cast<Lease&&>(other); }
  Lease& operator=(Lease&& other) noexcept;

  /// Returns whether there is a record.
  explicit operator bool() const { return carrier_ != nullptr; }
  std::int64_t record() const { return record_; }
  /// The record's memory; empty where the record has no memory of the carrier.
  std::span<std::byte> bytes() const { return bytes_; }

  /// Tells that the holder changes the record, though it acquired the record to read it.
  void change() { changes_ = true; }
  /// Gives the record back now; nothing happens if that was done. Throws what Carrier::acquire throws.
  void give_back();
  /// Ends the lease after a failure: nobody needs the record's values.
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

/// Brings records of training state from where they lie (in files, in memory of the host, in memory of a GPU) to where
/// they are used, and takes them back. There is one implementation for each way of bringing records; each says what its
/// records are and which thread calls it. The code in `sharding` reaches state that is offloaded only through this
/// class. Calls throw tessera::Error: 74 where a record cannot be read, or an earlier one could not be written; 65
/// where it came back with other bytes.
class Carrier {
 public:
  virtual ~Carrier() = default;
  Carrier(const Carrier&) = delete;
  Carrier& operator=(const Carrier&) = delete;

  /// Says which records are acquired next, in this order: the first records are brought ahead, without waiting. The new
  /// order replaces the one announced before, unless the carrier says otherwise.
  virtual void announce(std::span<const std::int64_t> order) = 0;
  /// Returns the record; if it was not announced, it is brought first.
  Lease acquire(std::int64_t record, LeaseUse use);
  /// Forgets the announced order: no more records are brought ahead. Changed records are written back in the
  /// background.
  virtual void flush() = 0;

  /// Bytes that were copied to a GPU so far.
  virtual std::int64_t uploaded_bytes() const { return 0; }
  /// Bytes of pinned host memory that the carrier has for copies to a GPU.
  virtual std::int64_t pinned_bytes() const { return 0; }

 protected:
  Carrier() = default;

 private:
  friend class Lease;
  /// Begins a lease of a record, and returns its memory.
  virtual std::span<std::byte> take(std::int64_t record, LeaseUse use) = 0;
  /// Ends a lease. `changed`: the present values become the record's values.
  virtual void give_back(std::int64_t record, bool changed) = 0;
  /// Ends a lease after a failure.
  virtual void drop(std::int64_t record) noexcept = 0;
};

}  // namespace tessera
