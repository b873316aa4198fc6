#pragma once

// See docs/glossary.md: residency, unit.

#include <cstddef>
#include <memory>

#include "engine/memory/records/state_records.h"
#include "sharding/shard_source.h"

namespace tessera {

/// Brings shards of the CPU from their records on disk (FlatGroup::parameters_below), and the parts that are in memory
/// from there. The residency calls it when it gathers a unit. Throws tessera::Error (74, 65) where a record cannot be
/// read.
class ShardRecords final : public ShardSource {
 public:
  explicit ShardRecords(std::shared_ptr<StateRecords> records) : records_(std::move(records)) {}

  void start(const FlatGroup& group, std::byte* memory) override;
  void finish(const Unit& unit) override;

 private:
  const std::shared_ptr<StateRecords> records_;
};

}  // namespace tessera
