#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/commit.h"
#include "checkpoint/commit_log.h"
#include "engine/memory/host_view.h"
#include "engine/memory/records/state_records.h"
#include "offload/file_tier.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

class DeviceKernels;
struct TrainingMemory;

/// Of what reductions keep of gradients from step to step (MemoryCategory::kFeedback), which backward changes.
std::int64_t kept_gradient_bytes(const MemoryPlan& plan);

/// What says which bytes of a rank's memory and records are whose: of runs where it is the same, one can go on with the other's commits.
std::string durable_layout(const MemoryPlan& plan, const std::vector<std::unique_ptr<Unit>>& units,
                           const torch::nn::Module& module, const Strategy& strategy);

/// The files of this rank's commits (DurableConfig). Of training state that lies in memory a commit writes all, to its place in
/// `rank-00000.memory`; of records below memory it says where they are. Either has two places, of which the last commit has one.
///
/// A commit counts when the log of every rank has it: `begin` and `end` on all ranks, a meeting, then `committed` on all of them. Until
/// then the one before it is untouched. Between `begin` and `end` a thread writes, and reads training state in memory: nobody may change
/// that, nor put a record, before the commit counts or is taken back.
class DurableFiles {
 public:
  /// Opens nothing yet: see open_durable (engine/open_durable.h).
  DurableFiles(const DurableConfig& config, const MemoryPlan& plan, const std::string& layout, int rank);

  // How the last commit is found, which all ranks do alike:
  /// First: the commits of this rank, as text. Changes no file. Errors: those of CommitLog.
  absl::StatusOr<std::string> look();
  /// With what every rank said: takes the last commit that all have. Throws tessera::Error, the same on every rank: 65 it is of another
  /// model, strategy or number of ranks; 66 a rank has lost its own.
  void choose(const std::vector<std::string>& held);
  /// Last: removes later commits, which some ranks lack, and what killed processes left.
  absl::Status forget_later();

  /// Of this run or, before its first, of the one before; null where there is none.
  const Commit* last() const { return last_ ? &*last_ : nullptr; }
  const std::string& folder() const { return folder_; }
  /// In a process that was forked from a rank: files and lock are the rank's. Nothing else may be called any more.
  void enter_forked_process();
  /// The run has gone on from the last commit, or there was none.
  bool is_resumed() const { return is_resumed_; }

  /// The name, in each directory of offload.paths, of the files of records of a kind.
  std::string name_of(const std::string& kind) const { return scratch_stem_ + "." + kind; }
  /// Of those directories, as they were for the last commit; nothing where there is none.
  std::optional<std::vector<double>> weights() const;
  void use_weights(const std::vector<double>& weights);
  /// Keeps what the last commit says of records of a kind; before anything is put there.
  void protect(StateRecords& records, const std::string& kind) const;

  /// Makes the file for what lies in memory, once all of that has its place. `kernels`: of the GPU that trains, or null.
  void take_memory(const TrainingMemory& memory, const MemoryPlan& plan,
                   const std::vector<std::unique_ptr<Unit>>& units, c10::Device device, DeviceKernels* kernels);
  std::int64_t memory_bytes() const { return image_ ? static_cast<std::int64_t>(image_->record_memory_bytes()) : 0; }

  /// What commits hold from the next one on beside training state and parts, until this is called again; empty: nothing. It is written
  /// once, and not with each of them.
  void keep(std::string bytes);
  /// What the commit before the first one of this run holds so. Errors: those of CommitLog::kept.
  absl::StatusOr<std::string> kept() const;

  /// Begins to write a commit of `step`; `parts`: what it holds beside training state. Errors are `end`'s. REQUIRES: of a GPU that all steps
  /// have ended, and that what follows does not change training state before `end`.
  void begin(std::int64_t step, std::map<std::string, std::string> parts);
  /// Whether `begin` was called, and what came of it was not asked yet.
  bool is_under_way() const { return writer_.valid(); }
  std::int64_t next_step() const { return next_ ? next_->step : 0; }  ///< of the latest `begin`
  /// Waits until it is written. Errors, thrown or returned: 74 and those of CommitLog::write. REQUIRES: is_under_way.
  absl::Status end();
  /// After `end` failed on some rank: the commit is gone from this rank's disk.
  absl::Status take_back();
  /// After it succeeded on all.
  void committed();

  /// Training state is the last commit's. Errors: 65 a record came back with other bytes; 74.
  absl::Status bring_back();

 private:
  struct Kind {
    std::string name;
    std::shared_ptr<StateRecords> records;
  };
  /// Training state in memory.
  struct Piece {
    std::span<std::byte> bytes;
    MemoryPlace place;
  };
  void add_piece(std::byte* memory, std::int64_t bytes, MemoryPlace place);
  void add_records(const std::shared_ptr<StateRecords>& records, const RecordPool& pool, const char* kind);
  absl::Status write(Commit& commit);
  absl::Status write_kept();
  absl::Status copy_to(std::span<std::byte> record, std::int64_t index) const;
  absl::Status write_image();
  absl::Status read_image();
  template <class Copy>
  void copy_piecewise(std::int64_t offset, std::span<std::byte> record, const Copy& copy) const;

  const std::string folder_;
  const int rank_;
  const std::string who_;
  const std::uint64_t layout_;
  std::uint64_t run_ = 0;
  std::unique_ptr<CommitLog> log_;
  std::vector<Commit> found_;
  std::optional<Commit> last_, next_;
  std::vector<double> weights_;
  bool is_resumed_ = false;
  std::string scratch_stem_, about_;
  std::optional<std::string> to_keep_;  ///< what is not written yet
  std::string kept_;                    ///< the hash of what is (CommitLog::keep); empty: nothing
  std::vector<Piece> pieces_;           ///< of the image, one behind the other
  DeviceKernels* kernels_ = nullptr;
  std::unique_ptr<FileTier> image_;
  std::int64_t image_record_bytes_ = 0;
  std::vector<Kind> kinds_;
  std::vector<std::shared_ptr<StateRecords>> pinned_;  ///< records of the image in pinned memory of a GPU's host
  std::future<absl::Status> writer_;                   ///< of the thread, which its destructor waits for: so it is last
};

}  // namespace tessera
