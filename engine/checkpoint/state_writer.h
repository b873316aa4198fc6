#pragma once

#include <ATen/core/Tensor.h>
#include <absl/status/status.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/shard_header.h"
#include "checkpoint/shard_writer.h"
#include "engine/checkpoint/stored_states.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"

namespace tessera {

/// What one rank writes of a checkpoint. Of the flat buffers each element is written by one rank: a rank that alone holds a part
/// writes it, and ranks that hold the same part divide it among them, between blocks.
class StateWriter {
 public:
  /// Parameters, masters and states. Refers to the units. `mesh`: that of all ranks that write, which is larger than the plan's where
  /// replicas train by themselves.
  StateWriter(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, const MeshPosition& mesh,
              const StoredStates& states);

  /// And the whole of a tensor that host_copy made.
  void add(const std::string& what, const std::string& name, const at::Tensor& host);

  /// And elements from `first` on, in memory that is read until `hold` or `write`.
  void add(const std::string& what, const std::string& name, std::int64_t first, std::span<const float> values);

  /// And elements from `first` on in memory that does not change. `dtype`: safetensors' word.
  void add(const std::string& what, const std::string& name, const std::string& dtype, std::int64_t first,
           std::shared_ptr<const std::vector<std::byte>> bytes);

  /// Copies parameters, masters and states to `room`. From then on the units are not read any more. 70 if there is not enough room
  /// (MemoryCategory::kCheckpoint).
  absl::Status hold(std::span<std::byte> room);

  /// Writes all of it to `folder`/`name`. State on disk is read once for each of its kinds. `wrote` is told of every portion; an error
  /// that it returns ends the writing.
  absl::StatusOr<SavedFile> write(const std::string& folder, const std::string& name, const std::string& who,
                                  const std::function<absl::Status(std::size_t bytes)>& wrote);
  /// Of all data.
  std::int64_t bytes() const;

 private:
  using Sink = std::function<absl::Status(std::span<const std::byte>)>;
  struct Source {
    Piece piece;
    std::function<absl::Status(const Sink&)> read;  ///< gives the data in portions
    bool is_held = false;                           ///< in memory that nobody else writes
  };
  void add_run(const FlatGroup& group, std::size_t parameter, Extent run, const StoredStates& states);
  void add_tensor_states(const FlatGroup& group, std::size_t parameter, Extent written);

  std::vector<Source> sources_;
};

}  // namespace tessera
