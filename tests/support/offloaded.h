#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "tests/support/limits/long_tests.h"
#include "tests/support/session.h"

namespace tessera::testing {

/// The types of a parameter's values, master and states on a rank.
struct Kept {
  DType param;
  MasterKind master;
  StateDType state;
};
inline constexpr Kept kKept[] = {
    {DType::kF32, MasterKind::kSplitBF16, StateDType::kF32},  {DType::kF32, MasterKind::kSplitBF16, StateDType::k8Bit},
    {DType::kBF16, MasterKind::kSplitBF16, StateDType::kF32}, {DType::kBF16, MasterKind::kSplitBF16, StateDType::kBF16},
    {DType::kBF16, MasterKind::kF32, StateDType::k8Bit},      {DType::kF16, MasterKind::kF32, StateDType::kF32}};
/// A selection in which each type of parameter, of master and of state occurs once.
inline constexpr Kept kOneOfEachKind[] = {kKept[1], kKept[3], kKept[5]};
/// Returns the types for large sweeps: all of kKept, or one of each kind where tests are short.
inline std::span<const Kept> sampled_kept() {
  return tests_are_long() ? std::span<const Kept>(kKept) : std::span<const Kept>(kOneOfEachKind);
}
std::string name_of(const Kept& kept);

/// Says which share of the state lies on disk, and how much memory is used to move it.
struct Below {
  double parameters, masters, moments;
  std::int64_t record_bytes, cache_bytes, queue_depth;
  bool gradients = false;  ///< whether all gradients lie on disk
};
void put_below(Strategy& strategy, const Below& below);

/// Half of the masters and more than half of the states, in small records.
inline constexpr Below kSomeBelow = {0, 0.5, 0.6, 4096, 8192, 1};
inline constexpr const Below* kInMemoryAndBelow[] = {nullptr, &kSomeBelow};

/// Returns a change of a strategy that sets the types of `kept` and the places of `below`. `below`: null for all state
/// in memory.
Adjust adjusted_to(const Kept& kept, const Below* below);
Strategy strategy_of(const Kept& kept, const Placed& placed, const Below* below = nullptr);

// The following functions do what programs do around steps, and return the values. Each runs with state in memory and
// on disk.
/// Writes all parameters under Gathered.
Values written_under_gathered(const Mesh& mesh, const Strategy& strategy);
/// Trains, and trains on with a second Engine, which takes what the first one left.
Values trained_by_two_engines(const Mesh& mesh, const Strategy& strategy);
/// Freezes and unfreezes weights.
Values trained_with_weights_frozen_for_a_while(const Mesh& mesh, const Strategy& strategy);

/// Trains `steps`, from a checkpoint in `folder` if there is one, saves there, and returns the values of rank 0.
Values train_and_save(int ranks, const Placed& placed, const std::string& folder, std::size_t steps,
                      const Adjust& adjust);

/// A model that is wide enough for several records in each group.
inline constexpr TinyOptions kWide{.vocab = 32, .width = 32, .hidden = 64};
/// The same model with a frozen block, an unused one and a tied head, which cut runs inside records.
inline constexpr TinyOptions kAwkward{
    .vocab = 32, .width = 32, .hidden = 64, .tied_head = true, .frozen_first_block = true, .unused_block = true};

}  // namespace tessera::testing
