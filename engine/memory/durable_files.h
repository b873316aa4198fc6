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
#include "engine/memory/records/tier_carrier.h"
#include "offload/file_tier.h"
#include "sharding/host_view.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

class DeviceKernels;
struct TrainingMemory;

/// Returns the bytes of residuals that reductions keep from step to step (MemoryCategory::kFeedback). Backward changes
/// them.
std::int64_t kept_gradient_bytes(const MemoryPlan& plan);

/// Returns a JSON text that describes the layout of a rank's memory and records. Two runs whose texts are equal
/// can each continue from the other's commits.
std::string durable_layout(const MemoryPlan& plan, const std::vector<std::unique_ptr<Unit>>& units,
                           const torch::nn::Module& module, const Strategy& strategy);

/// Returns the number of ranks on each host of the run that made a commit; empty for a commit of an earlier version,
/// which lacks these numbers.
std::vector<int> ranks_of_hosts(const Commit& commit);

/// Returns the beginning of the names of all ranks' files with records of offloaded state, in the directories of
/// offload.paths. `dir`: DurableConfig::dir.
std::string durable_stem(const std::string& dir);

/// Writes and reads the files of this rank's durable commits (DurableConfig). The Engine owns one; only its thread
/// calls it. A commit writes all training state that lies in memory to `rank-00000.memory`. For offloaded records it
/// only notes where they lie. Each record has two places on the disk. The last commit uses one of them, so the other
/// may be written.
///
/// A commit is valid when the log of every rank has it: all ranks call `begin` and `end`, agree that all succeeded, and
/// call `committed`. The commit before this one stays unchanged until then. Between `begin` and `end` a thread reads
/// training state in memory and writes it to files. Nobody may change that state, or put a record, before the commit is
/// valid or taken back.
class DurableFiles {
 public:
  /// The constructor opens no file; open_durable (engine/engine_state.cc) opens the files. `layout`: the text that
  /// durable_layout returned. `rank_counts`: the number of ranks on each host, which commits hold
  /// (ranks_of_hosts).
  DurableFiles(const DurableConfig& config, const MemoryPlan& plan, const std::string& layout,
               std::vector<int> rank_counts, int rank);

  // Three calls find the last commit; all ranks make them in this order:
  /// First: returns this rank's commits as text. It changes no file. Errors: those of CommitLog.
  absl::StatusOr<std::string> look();
  /// Second: chooses the last commit that all ranks have. `held`: the text of every rank, in rank order. `has_moved`:
  /// whether the run goes on from a checkpoint of commits (MovedCommits). Throws tessera::Error, the same on every
  /// rank: 65 if the commit belongs to another model, strategy or number of ranks; 66 if a rank has lost its commits,
  /// or has none in a folder with commits of other ranks.
  void choose(const std::vector<std::string>& held, bool has_moved);
  /// Third: removes later commits, which some ranks do not have, and files that killed processes left behind.
  absl::Status forget_later();

  /// Returns the last commit of this run or, if this run has made none yet, of the run before it. It is null if there
  /// is no commit.
  const Commit* last() const { return last_ ? &*last_ : nullptr; }
  const std::string& folder() const { return folder_; }
  /// It is called in a process that was forked from a rank; the files and the lock belong to that rank. Nothing else
  /// may be called after it.
  void enter_forked_process();
  /// Returns whether the run has continued from the last commit. It is also true if there was no commit.
  bool is_resumed() const { return is_resumed_; }

  /// Returns the name of the files that hold records of a kind, in each directory of offload.paths.
  std::string name_of(const std::string& kind) const { return scratch_stem_ + "." + kind; }
  /// Returns the weights of offload.paths (their disks' shares of the records) at the last commit; nothing if there is
  /// no commit.
  std::optional<std::vector<double>> weights() const;
  /// Sets the weights of offload.paths that the next commits record (see the function `weights`).
  void use_weights(const std::vector<double>& weights);
  /// Makes sure that records of a kind are not overwritten if the last commit holds them. It is called before any
  /// record is put.
  void protect(TierCarrier& records, const std::string& kind) const;

  /// Makes the file for the training state in memory. It is called once, when all training state has its place.
  /// `kernels`: those of the GPU that trains, or null. Throws the tessera::Errors of FileTier::create.
  void take_memory(const TrainingMemory& memory, const MemoryPlan& plan,
                   const std::vector<std::unique_ptr<Unit>>& units, c10::Device device, DeviceKernels* kernels);
  std::int64_t memory_bytes() const {
    return image_.files ? static_cast<std::int64_t>(image_.files->record_memory_bytes()) : 0;
  }

  /// Sets bytes that commits hold in addition to training state and parts. The next commit and all later ones hold
  /// them, until this function is called again. Empty bytes mean that commits hold none. The bytes are written once,
  /// not with each commit.
  void keep(std::string bytes);
  /// Returns the bytes that `keep` was given, as the last commit of the run before holds them. Errors: those of
  /// CommitLog::kept.
  absl::StatusOr<std::string> kept() const;

  /// Begins to write a commit of `step` in the background. `parts`: the data of the commit in addition to training
  /// state. `end` returns its errors. REQUIRES on a GPU: all steps have ended, and later work does not change training
  /// state before `end`.
  void begin(std::int64_t step, std::map<std::string, std::string> parts);
  /// Returns whether `begin` was called, and `end` was not called after it.
  bool is_under_way() const { return writer_.valid(); }
  std::int64_t next_step() const { return next_ ? next_->step : 0; }  ///< step of the commit under way, or 0
  /// Waits until the commit is written. Errors, thrown or returned: 74 if a read or write fails, and those of
  /// CommitLog::write. REQUIRES: is_under_way().
  absl::Status end();
  /// Removes the commit under way from this rank's disk. All ranks call it after `end` failed on one of them.
  absl::Status take_back();
  /// Makes the commit under way the last commit. All ranks call it after `end` succeeded on all of them.
  void committed();

  /// Restores the training state of the last commit. Errors: 65 if a record has other bytes than were written; 74 if a
  /// read fails.
  absl::Status bring_back();

 private:
  /// The data about the run that each commit has.
  struct RunNotes {
    std::string about;             ///< text for users
    std::vector<int> rank_counts;  ///< number of ranks on each host
  };
  struct Kind {
    std::string name;
    std::shared_ptr<TierCarrier> records;
  };
  /// A piece of training state in memory.
  struct Piece {
    std::span<std::byte> bytes;
    MemoryPlace place;
  };
  /// The memory that a commit writes (RecordPlan::image).
  struct Image {
    std::vector<Piece> pieces;  ///< the pieces, which follow each other in the image
    std::unique_ptr<FileTier> files;
    std::int64_t record_bytes = 0;
  };
  void add_piece(std::byte* memory, std::int64_t bytes, MemoryPlace place);
  void add_records(const std::shared_ptr<TierCarrier>& records, const RecordPool& pool, const char* kind);
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
  const std::string scratch_stem_;
  const RunNotes notes_;
  std::optional<std::string> to_keep_;  ///< bytes that were given to `keep` and are not written yet
  std::string kept_;                    ///< hash of the bytes that are written (CommitLog::keep); empty if there are
                                        ///< none
  DeviceKernels* kernels_ = nullptr;
  Image image_;
  std::vector<Kind> kinds_;
  std::vector<std::shared_ptr<TierCarrier>> pinned_;  ///< records in pinned memory of a GPU's host that belong to the
                                                      ///< image
  std::future<absl::Status> writer_;                  ///< result of the writing thread; its destructor waits for the
                                                      ///< thread, so it is the last member
};

}  // namespace tessera
