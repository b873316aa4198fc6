#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "offload/table.h"

namespace tessera {

/// Says at which of its two places on disk each record is (double buffering), so that the values of a commit are never
/// overwritten before the next commit. A record that is written for the first time after a commit goes to its other
/// place, and stays there until the next commit.
///
/// `text` contains all that is needed to find the records again. It has, for each record, one byte (bit 0 its place,
/// bit 1 whether it was ever written) and its checksum in eight bytes, the lowest first.
class TwoPlaces {
 public:
  static constexpr std::size_t kTextBytes = 9;  ///< bytes per record

  TwoPlaces() = default;
  /// Errors: 71 no memory.
  static absl::StatusOr<TwoPlaces> make(std::size_t records, const std::string& who);
  static constexpr std::size_t occupied_bytes(std::size_t records) { return Table<State>::occupied_bytes(records); }

  /// Returns the place (0 or 1) of the record's latest value.
  int place(std::size_t record) const { return states_[record].latest; }
  /// Returns the place for the record's next value, which is the latest place from then on.
  int place_to_write(std::size_t record);
  /// Declares the latest values to be those of the commit.
  void commit();

  /// Protects the places of the commit that `text` comes from until the next commit. It does not change the latest
  /// values.
  absl::Status protect(std::string_view text);
  /// Returns the text of the latest values. `written`, `checksums`: [record].
  std::string text(const Table<std::uint8_t>& written, const Table<std::uint64_t>& checksums) const;
  /// Takes the latest values back to those of the commit that `text` comes from.
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
