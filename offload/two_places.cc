#include "offload/two_places.h"

#include <fmt/format.h>

#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr std::uint8_t kSecond = 1, kWritten = 2;

std::uint8_t flags_of(std::string_view text, std::size_t record) {
  return static_cast<std::uint8_t>(text[record * TwoPlaces::kTextBytes]);
}

}  // namespace

absl::StatusOr<TwoPlaces> TwoPlaces::make(std::size_t records, const std::string& who) {
  TwoPlaces places;
  TESSERA_ASSIGN_OR_RETURN(places.states_, Table<State>::make(records, who));
  return places;
}

int TwoPlaces::place_to_write(std::size_t record) {
  State& state = states_[record];
  if (state.is_committed != 0 && state.latest == state.committed) state.latest = 1 - state.committed;
  state.is_written = 1;
  return state.latest;
}

void TwoPlaces::commit() {
  for (State& state : states_.span()) {
    state.committed = state.latest;
    state.is_committed = state.is_written;
  }
}

absl::Status TwoPlaces::check(std::string_view text) const {
  const std::size_t wanted = states_.span().size() * kTextBytes;
  if (text.size() == wanted) return absl::OkStatus();
  return make_error(ExitCode::kCorruptData,
                    fmt::format("a commit's table of records has {} bytes, want {}. [T0382] hint: go on with the "
                                "strategy and the number of ranks that wrote it",
                                text.size(), wanted));
}

absl::Status TwoPlaces::protect(std::string_view text) {
  TESSERA_RETURN_IF_ERROR(check(text));
  for (std::size_t i = 0; i < states_.span().size(); ++i) {
    const std::uint8_t flags = flags_of(text, i);
    State& state = states_[i];
    state.latest = state.committed = flags & kSecond;
    state.is_committed = (flags & kWritten) != 0 ? 1 : 0;
  }
  return absl::OkStatus();
}

std::string TwoPlaces::text(const Table<std::uint8_t>& written, const Table<std::uint64_t>& checksums) const {
  std::string text;
  text.reserve(states_.span().size() * kTextBytes);
  for (std::size_t i = 0; i < states_.span().size(); ++i) {
    const bool is_written = written[i] != 0;
    text += static_cast<char>((states_[i].latest != 0 ? kSecond : 0) | (is_written ? kWritten : 0));
    for (int shift = 0; shift < 64; shift += 8) text += static_cast<char>(checksums[i] >> shift & 0xff);
  }
  return text;
}

absl::Status TwoPlaces::return_to(std::string_view text, const Table<std::uint8_t>& written,
                                  const Table<std::uint64_t>& checksums) {
  TESSERA_RETURN_IF_ERROR(protect(text));
  for (std::size_t i = 0; i < states_.span().size(); ++i) {
    written[i] = states_[i].is_written = states_[i].is_committed;
    std::uint64_t checksum = 0;
    for (std::size_t byte = 0; byte < 8; ++byte) {
      checksum |= std::uint64_t{static_cast<unsigned char>(text[i * kTextBytes + 1 + byte])} << (8 * byte);
    }
    checksums[i] = checksum;
  }
  return absl::OkStatus();
}

}  // namespace tessera
