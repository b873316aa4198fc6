// Tests the hash that detects writes into parameters.

#include "sharding/value_hash.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "hand_made_units.h"
#include "runtime/comm/shared/run_ranks.h"

namespace tessera::testing {
namespace {

TEST(ValueHash, OneChangedBitChangesTheHash) {
  std::vector<std::byte> bytes(1000, std::byte{0});
  const auto hash = [&](std::int64_t count) {
    ValueHash made;
    made.add({c10::kCPU}, bytes.data(), count);
    return made.value();
  };
  const std::uint64_t before = hash(1000);
  EXPECT_NE(before, 0u);
  EXPECT_EQ(hash(1000), before);
  EXPECT_NE(hash(999), before) << "zeros fewer";
  for (const std::size_t place : {std::size_t{0}, std::size_t{500}, std::size_t{999}}) {
    bytes[place] ^= std::byte{0x10};
    EXPECT_NE(hash(1000), before) << place;
    bytes[place] ^= std::byte{0x10};
  }
  EXPECT_EQ(hash(1000), before);
}

TEST(ValueHash, GatheredUnitsHashDependsOnEveryParameter) {
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    HandMadeUnits made(mesh, some_units(3));
    const std::uint64_t before = hash_of_gathered(made.unit(1), c10::kCPU);
    EXPECT_NE(before, 0u);
    made.parameter(2, 0).data()[0][0] += 1.0f;
    EXPECT_EQ(hash_of_gathered(made.unit(1), c10::kCPU), before) << "another unit's";
    for (std::size_t i = 0; i < made.group(1).parameters.size(); ++i) {
      const at::Tensor last = made.parameter(1, i).data().flatten()[-1];
      last.add_(1.0f);
      EXPECT_NE(hash_of_gathered(made.unit(1), c10::kCPU), before) << i;
      last.sub_(1.0f);
    }
    EXPECT_EQ(hash_of_gathered(made.unit(1), c10::kCPU), before);
  });
}

TEST(ValueHash, GatheredParametersHashDependsOnThatParameterAlone) {
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    HandMadeUnits made(mesh, some_units(3));
    const FlatGroup& group = made.group(1);
    const auto hashes = [&] {
      std::vector<std::uint64_t> all;
      for (std::size_t i = 0; i < group.parameters.size(); ++i) all.push_back(hash_of_gathered(group, i));
      return all;
    };
    const std::vector<std::uint64_t> before = hashes();
    for (std::size_t i = 0; i < group.parameters.size(); ++i) {
      const at::Tensor last = made.parameter(1, i).data().flatten()[-1];
      last.add_(1.0f);
      const std::vector<std::uint64_t> after = hashes();
      for (std::size_t k = 0; k < after.size(); ++k) EXPECT_EQ(after[k] != before[k], k == i) << i << ", " << k;
      last.sub_(1.0f);
    }
    EXPECT_EQ(hashes(), before);
  });
}

/// Adds one to each number of `part` that belongs to this rank's shard.
void change(const FlatGroup& group, Extent part) {
  const Extent own = intersect(part, group.parameter_part);
  auto* const shard = reinterpret_cast<float*>(group.shard) - group.parameter_part.offset;
  for (std::int64_t i = 0; i < own.numel; ++i) shard[own.offset + i] += 1.0f;
}

std::vector<std::uint64_t> hashes_of(const FlatGroup& group) {
  std::vector<std::uint64_t> hashes;
  for (std::size_t i = 0; i < group.parameters.size(); ++i) hashes.push_back(hash_of_part(group, i, c10::kCPU));
  return hashes;
}

TEST(ValueHash, PartsHashChangesOnlyForTheParameterWritten) {
  using enum ShardingStrategy;
  for (const ShardingStrategy strategy : {kNoShard, kShardGradients, kShardGradOp, kFullShard}) {
    SCOPED_TRACE(name_of(strategy));
    for (const int ranks : {1, 2, 3}) {
      run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
        HandMadeUnits made(mesh, some_units(2, strategy));
        FlatGroup& group = made.group(1);
        for (const bool trainable : {true, false}) {
          group.trainable = trainable;
          const Extent own = trainable ? group.optimizer_part : group.parameter_part;
          for (std::size_t i = 0; i < group.parameters.size(); ++i) {
            const std::vector<std::uint64_t> before = hashes_of(group);
            const Extent extent = group.layout.extent(i);
            const bool has_part = intersect(extent, own).numel > 0;
            if (!has_part) {
              EXPECT_EQ(before[i], 1U);  // this rank has no part of the parameter
            }
            change(group, extent);
            const std::vector<std::uint64_t> after = hashes_of(group);
            for (std::size_t k = 0; k < after.size(); ++k) {
              EXPECT_NE(after[k], 0u);
              EXPECT_EQ(after[k] != before[k], k == i && has_part) << "parameter " << k << " when " << i << " changed";
            }
          }
        }
      });
    }
  }
}

// If ranks hold all parameters, a rank does not notice writes into the part that another rank updates.
TEST(ValueHash, PartsHashIgnoresElementsOfOtherRanks) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    HandMadeUnits made(mesh, some_units(2, ShardingStrategy::kShardGradients));
    const FlatGroup& group = made.group(1);
    const Extent own = group.optimizer_part;
    ASSERT_LT(own.numel, group.parameter_part.numel);
    const Extent others{own.offset == 0 ? own.numel : 0, group.layout.numel() - own.numel};
    const std::vector<std::uint64_t> before = hashes_of(group);
    change(group, others);
    EXPECT_EQ(hashes_of(group), before);
    change(group, own);
    EXPECT_NE(hashes_of(group), before);
  });
}

}  // namespace
}  // namespace tessera::testing
