#pragma once

#include <ATen/core/Tensor.h>
#include <absl/status/status.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/shard_header.h"
#include "checkpoint/shard_writer.h"
#include "engine/checkpoint/stored_states.h"
#include "sharding/layout/memory_plan.h"
#include "sharding/unit.h"

namespace tessera {

/// What one rank writes of a checkpoint. Of the flat buffers each element is written by one rank: a rank that alone holds a part
/// writes it, and ranks that hold the same part divide it among them, between blocks.
class StateWriter {
 public:
  /// Parameters, masters and states. Refers to the units.
  StateWriter(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, const StoredStates& states);

  /// And the whole of a tensor that host_copy made.
  void add(const std::string& what, const std::string& name, const at::Tensor& host);

  /// Writes all of it to `folder`/`name`. State on disk is read once for each of its kinds.
  absl::StatusOr<SavedFile> write(const std::string& folder, const std::string& name, const std::string& who);

 private:
  using Append = std::function<absl::Status(ShardWriter&)>;
  struct Source {
    Piece piece;
    Append append;
  };
  void add_run(const FlatGroup& group, std::size_t parameter, Extent run, const StoredStates& states);

  std::vector<Source> sources_;
};

/// The part of a flat buffer of `numel` elements, placed so, that this rank writes.
Extent written_part(AxisPlacement axes, const MeshPosition& mesh, std::int64_t numel);

}  // namespace tessera
