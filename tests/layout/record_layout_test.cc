// Tests how a group's state is divided between memory and offloaded records.

#include "sharding/layout/plan/record_layout.h"

#include <gtest/gtest.h>

#include <vector>

namespace tessera {
namespace {

/// Returns every kind of state that a group can have. A part of each kind is offloaded.
std::vector<TieredState> all_states() {
  using enum StateDType;
  const StateFormats formats[] = {{},           {kF32},         {kBF16},        {k8Bit},
                                  {kF32, kF32}, {kBF16, kBF16}, {k8Bit, k8Bit}, {k8Bit, k8Bit, kF32, kF32}};
  std::vector<TieredState> all;
  for (const std::int64_t master : {0, 2, 4}) {
    for (const StateFormats& states : formats) {
      for (const double masters_below : {0.0, 0.4, 1.0}) {
        for (const double states_below : {0.0, 0.75, 1.0}) {
          for (const std::int64_t bytes : {4096L, 65536L, 4L << 20}) {
            all.push_back({master, states, masters_below, states_below, bytes});
          }
        }
      }
    }
  }
  return all;
}

constexpr std::int64_t kNumels[] = {64, 256, 4096, 100096, 3000064};

TEST(RecordLayout, ChunksCoverThePartInWholeBlocks) {
  for (const TieredState& state : all_states()) {
    for (const std::int64_t numel : kNumels) {
      const RecordLayout layout(numel, state);
      std::int64_t next = 0;
      for (std::int64_t i = 0; i < layout.chunks(); ++i) {
        EXPECT_EQ(layout.chunk(i).offset, next);
        EXPECT_EQ(next % kStateBlock, 0);
        next = layout.chunk(i).end();
      }
      EXPECT_EQ(next, numel);
    }
  }
}

TEST(RecordLayout, EveryByteIsInMemoryOrInOneRecord) {
  for (const TieredState& state : all_states()) {
    for (const std::int64_t numel : kNumels) {
      const RecordLayout layout(numel, state);
      std::int64_t masters = layout.masters_in_memory() * state.master_bytes;
      std::vector<StateBytes> in_memory;
      for (const StateDType dtype : state.states) in_memory.push_back(state_bytes(dtype, layout.states_in_memory()));
      for (std::int64_t i = layout.first_record(); i < layout.chunks(); ++i) {
        const RecordLayout::Record record = layout.record(i);
        masters += record.masters.bytes;
        for (std::size_t k = 0; k < kMostStates; ++k) {
          const RecordLayout::Record::State& piece = record.states[k];
          if (k >= in_memory.size()) {
            EXPECT_EQ(piece.numbers.bytes + piece.scales.bytes, 0);
            continue;
          }
          in_memory[k].data += piece.numbers.bytes;
          in_memory[k].scales += piece.scales.bytes;
        }
      }
      EXPECT_EQ(masters, numel * state.master_bytes);
      for (std::size_t k = 0; k < in_memory.size(); ++k) {
        const StateBytes all = state_bytes(state.states[k], numel);
        EXPECT_EQ(in_memory[k].data, all.data);
        EXPECT_EQ(in_memory[k].scales, all.scales);
      }
    }
  }
}

TEST(RecordLayout, PiecesDoNotOverlapAndBeginOnCacheLines) {
  for (const TieredState& state : all_states()) {
    const RecordLayout layout(3000064, state);
    for (std::int64_t i = layout.first_record(); i < layout.chunks(); ++i) {
      const RecordLayout::Record record = layout.record(i);
      std::int64_t end = 0;
      std::vector<RecordLayout::Piece> pieces = {record.masters};
      for (const RecordLayout::Record::State& state : record.states) {
        pieces.push_back(state.numbers);
        pieces.push_back(state.scales);
      }
      for (const RecordLayout::Piece piece : pieces) {
        if (piece.bytes == 0) continue;
        EXPECT_GE(piece.offset, end);
        EXPECT_EQ(piece.offset % 64, 0);
        end = piece.offset + piece.bytes;
      }
      EXPECT_LE(end, record.bytes);
      EXPECT_EQ(record.bytes % RecordLayout::kPage, 0);
    }
  }
}

TEST(RecordLayout, RecordsAreNearlyAsLargeAsRequested) {
  for (const TieredState& state : all_states()) {
    if ((state.master_bytes == 0 && state.states.size() == 0) || state.record_bytes < 65536) continue;
    const RecordLayout layout(30000128, state);
    for (std::int64_t i = layout.first_record(); i < layout.chunks(); ++i) {
      EXPECT_LE(layout.record(i).bytes, state.record_bytes);
    }
    if (state.masters_below == 1 && state.states_below == 1 && layout.records() > 0) {
      EXPECT_GT(layout.record(0).bytes, state.record_bytes * 9 / 10);
    }
  }
}

TEST(RecordLayout, ShareOfZeroMeansNoRecord) {
  const RecordLayout layout(100096, {2, {StateDType::kF32, StateDType::kF32}, 0, 0, 4096});
  EXPECT_EQ(layout.records(), 0);
  EXPECT_EQ(layout.masters_in_memory(), 100096);
  EXPECT_EQ(layout.states_in_memory(), 100096);
}

TEST(RecordLayout, OffloadedShareIsRoundedUpToChunks) {
  const RecordLayout layout(100 * 256,
                            {0, {StateDType::kF32, StateDType::kF32}, 0, 0.25, 4096});  // here a chunk is one block
  ASSERT_EQ(layout.chunks(), 100);
  EXPECT_EQ(layout.records(), 25);
  EXPECT_EQ(layout.states_in_memory(), 75 * 256);
}

}  // namespace
}  // namespace tessera
