#include "sharding/layout/record_layout.h"

#include <algorithm>

namespace tessera {
namespace {

constexpr std::int64_t kCacheLine = 64;

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// Elements whose record needs at most `state.record_bytes`, in whole blocks, if everything lies below.
std::int64_t elements_of(const TieredState& state) {
  const StateBytes block = state_bytes(state.state_dtype, kStateBlock);
  const std::int64_t bytes = kStateBlock * state.master_bytes + state.states * block.total();
  const std::int64_t lines = (1 + 2 * state.states) * kCacheLine;  // each piece is filled up to one
  if (bytes == 0) return kStateBlock;
  return std::max<std::int64_t>(1, (state.record_bytes - lines) / bytes) * kStateBlock;
}

}  // namespace

RecordLayout::RecordLayout(std::int64_t numel, const TieredState& state)
    : Chunks(numel, elements_of(state)),
      state_(state),
      first_master_(first_below(state.master_bytes > 0 ? state.masters_below : 0)),
      first_state_(first_below(state.states > 0 ? state.states_below : 0)) {
  put_below(std::min(first_master_, first_state_));
}

RecordLayout::Record RecordLayout::record(std::int64_t chunk) const {
  const std::int64_t elements = this->chunk(chunk).numel;
  Record record;
  const auto put = [&](std::int64_t bytes) {
    const Piece piece{record.bytes, bytes};
    record.bytes += round_up(bytes, kCacheLine);
    return piece;
  };
  if (chunk >= first_master_) record.masters = put(elements * state_.master_bytes);
  if (chunk >= first_state_) {
    const StateBytes bytes = state_bytes(state_.state_dtype, elements);
    for (int i = 0; i < state_.states; ++i) record.states[i] = {put(bytes.data), put(bytes.scales)};
  }
  record.bytes = round_up(record.bytes, kPage);
  return record;
}

}  // namespace tessera
