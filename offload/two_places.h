#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "offload/table.h"

namespace tessera {

/// A table of the current places of records, each of which has two places on disk (double buffering). So the values of
/// a commit are never overwritten before the next commit. The first write of a record after a commit goes to the
/// record's other place, and so does each further write until the next commit.
///
/// `text` contains all that is needed to find the records again. It has nine bytes for each record. The first byte has
/// the place in bit 0, and whether the record was ever written in bit 1. The other eight bytes are the checksum, the
/// lowest byte first.
class TwoPlaces {
 public:
  static constexpr std::size_t kTextBytes = 9;  ///< number of bytes of the text for each record

  TwoPlaces() = default;
  /// Errors: 71 if there is not enough memory.
  static absl::StatusOr<TwoPlaces> make(std::size_t records, const std::string& who);
  static constexpr std::size_t occupied_bytes(std::size_t records) { return Table<State>::occupied_bytes(records); }

  /// Returns the place (0 or 1) of the record's latest value.
  int place(std::size_t record) const { return states_[record].latest; }
  /// Returns the place for the record's next value. From now on `place` returns this place.
  int place_to_write(std::size_t record);
  /// Makes a commit of the latest values.
  void commit();

  /// Protects a commit's places until the next commit, and makes them the places of the latest values. `text`: the text
  /// of that commit.
  absl::Status protect(std::string_view text);
  /// Returns the text of the latest values. `written`, `checksums`: [record].
  std::string text(const Table<std::uint8_t>& written, const Table<std::uint64_t>& checksums) const;
  /// Goes back to a commit: its values become the latest values again. `text`: the text of that commit.
  absl::Status return_to(std::string_view text, const Table<std::uint8_t>& written,
                         const Table<std::uint64_t>& checksums);

  std::size_t bytes() const { return states_.bytes(); }

 private:
  struct State {
    std::uint8_t latest, committed, is_committed, is_written;
  };
  absl::Status check(std::string_view text) const;

  Table<State> states_;
};

}  // namespace tessera
