#pragma once

// See docs/glossary.md: unit.

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
#include "sharding/host_view.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"

namespace tessera {

/// Collects one rank's part of a checkpoint, and writes it. Each save makes a StateWriter on each rank. Each element of
/// the flat buffers is written by exactly one rank. If only one rank holds a part, that rank writes it. If several
/// ranks hold copies of one part, each of them writes a section of it; sections end at block boundaries.
class StateWriter {
 public:
  /// Adds this rank's parts of parameters, masters and states. They refer to the units, which must live until `hold` or
  /// `write` returns. `mesh` holds all ranks that write; it is larger than the plan's mesh if replicas train by
  /// themselves.
  StateWriter(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, const MeshPosition& mesh,
              const StoredStates& states);

  /// Adds the whole of a tensor that host_copy made. `what` and `name`: the fields of its Piece, here and below.
  void add(const std::string& what, const std::string& name, const at::Tensor& host);

  /// Adds the elements of `name` from `first` on. The memory of `values`, which lies where `place` says, must live
  /// until `hold` or `write` has read it.
  void add(const std::string& what, const std::string& name, std::int64_t first, std::span<const float> values,
           MemoryPlace place = {c10::Device(c10::kCPU), /*in_record=*/true});

  /// Adds the elements of `name` from `first` on, in memory that does not change and is shared. `dtype` is safetensors'
  /// word.
  void add(const std::string& what, const std::string& name, const std::string& dtype, std::int64_t first,
           std::shared_ptr<const std::vector<std::byte>> bytes);

  /// Copies to `room` everything that training may change meanwhile: parameters, masters, states and kept gradients.
  /// The units are not read any more after that, so an asynchronous save may write while the Engine trains. The
  /// function fails with error 70 if `room` (MemoryCategory::kCheckpoint) is too small.
  absl::Status hold(std::span<std::byte> room);

  /// Writes everything to the file `folder`/`name`. State on disk is read once for each kind of state. Before each
  /// portion is written, `wrote` is called with the number of its bytes, on the calling thread; an error that it
  /// returns ends the writing. `who` is the prefix of messages. Errors: those of ShardWriter.
  absl::StatusOr<SavedFile> write(const std::string& folder, const std::string& name, const std::string& who,
                                  const std::function<absl::Status(std::size_t bytes)>& wrote);
  /// Returns the bytes of all data that was added, without the file's header.
  std::int64_t bytes() const;

 private:
  using Sink = std::function<absl::Status(std::span<const std::byte>)>;
  struct Source {
    Piece piece;
    std::function<absl::Status(const Sink&)> read;  ///< gives the data in portions
    bool is_held = false;                           ///< whether nothing else writes the memory of this piece
  };
  void add_run(const FlatGroup& group, std::size_t parameter, Extent run, const StoredStates& states);
  void add_tensor_states(const FlatGroup& group, std::size_t parameter, Extent written);

  std::vector<Source> sources_;
};

}  // namespace tessera
