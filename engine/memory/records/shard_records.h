#pragma once

#include <cstddef>
#include <memory>

#include "engine/memory/records/state_records.h"
#include "sharding/shard_source.h"

namespace tessera {

/// Brings shards from their records (FlatGroup::parameters_below), and what of them is in memory from there.
class ShardRecords final : public ShardSource {
 public:
  explicit ShardRecords(std::shared_ptr<StateRecords> records) : records_(std::move(records)) {}

  void start(const FlatGroup& group, std::byte* memory) override;
  void finish(const Unit& unit) override;

 private:
  const std::shared_ptr<StateRecords> records_;
};

}  // namespace tessera
