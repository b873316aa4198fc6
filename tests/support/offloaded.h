#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "tests/support/limits/long_tests.h"
#include "tests/support/session.h"

namespace tessera::testing {

/// The types that a parameter's values, masters and states have on a rank.
struct Kept {
  DType param;
  MasterKind master;
  StateDType state;
};
inline constexpr Kept kKept[] = {
    {DType::kF32, MasterKind::kSplitBF16, StateDType::kF32},  {DType::kF32, MasterKind::kSplitBF16, StateDType::k8Bit},
    {DType::kBF16, MasterKind::kSplitBF16, StateDType::kF32}, {DType::kBF16, MasterKind::kSplitBF16, StateDType::kBF16},
    {DType::kBF16, MasterKind::kF32, StateDType::k8Bit},      {DType::kF16, MasterKind::kF32, StateDType::kF32}};
/// A selection in which each type of parameter, of master and of state occurs at least once.
inline constexpr Kept kOneOfEachKind[] = {kKept[1], kKept[3], kKept[5]};
/// Returns the types for large sweeps: all of kKept, or one of each kind if tests are short.
inline std::span<const Kept> sampled_kept() {
  return tests_are_long() ? std::span<const Kept>(kKept) : std::span<const Kept>(kOneOfEachKind);
}
std::string name_of(const Kept& kept);

/// Defines which share of the state lies on disk, and how much memory is used to move the state.
struct Below {
  double parameters, masters, moments;
  std::int64_t record_bytes, cache_bytes, queue_depth;
  bool gradients = false;  ///< whether all gradients lie on disk
};
void put_below(Strategy& strategy, const Below& below);

/// Half of the masters and more than half of the states lie on disk, in small records.
inline constexpr Below kSomeBelow = {0, 0.5, 0.6, 4096, 8192, 1};
inline constexpr const Below* kInMemoryAndBelow[] = {nullptr, &kSomeBelow};

/// Returns a change of a strategy that sets the types of `kept` and the shares of `below`. If `below` is null, all
/// state is in memory.
Adjust adjusted_to(const Kept& kept, const Below* below);
Strategy strategy_of(const Kept& kept, const Placed& placed, const Below* below = nullptr);

// The following functions do what programs do around steps, and return the resulting values. Each function is run with
// state in memory and with state on disk.

/// Trains, writes all parameters under Gathered, and trains again.
Values written_under_gathered(const Mesh& mesh, const Strategy& strategy);
/// Trains with one Engine, and then with a second Engine that takes over the state of the first.
Values trained_by_two_engines(const Mesh& mesh, const Strategy& strategy);
/// Trains while some weights are frozen for a time.
Values trained_with_weights_frozen_for_a_while(const Mesh& mesh, const Strategy& strategy);

/// Trains `steps`, starting from a checkpoint in `folder` if there is one. Saves a checkpoint there, and returns the
/// values of rank 0.
Values train_and_save(int ranks, const Placed& placed, const std::string& folder, std::size_t steps,
                      const Adjust& adjust);

/// A model that is wide enough for several records in each group.
inline constexpr TinyOptions kWide{.vocab = 32, .width = 32, .hidden = 64};
/// The same model with a frozen block, an unused block and a tied head. These divide runs of elements inside records.
inline constexpr TinyOptions kAwkward{
    .vocab = 32, .width = 32, .hidden = 64, .tied_head = true, .frozen_first_block = true, .unused_block = true};

}  // namespace tessera::testing
