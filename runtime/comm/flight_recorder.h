#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/base/mutex.h"
#include "runtime/comm/call.h"
#include "runtime/comm/collectives.h"

namespace tessera {

/// Records the latest calls of a rank's groups, for use after a failure. When a rank of a job hangs, the files of all
/// ranks show the last calls of each rank in every group. The recorder is on if the environment variable
/// TESSERA_FLIGHT_RECORDS names a folder. Each call then takes a lock twice, and makes one more allocation at most.
/// Groups of GPUs use c10d's recorder instead.
///
/// The first call that fails, or an abort, writes FOLDER/rank-00001.json:
///
///     {"rank": 1, "world_size": 4, "why": "rank 1/4 blocks.3 all_gather #412: timed out ...", "groups": [
///       {"name": "1x4.0.gather", "calls": [
///         {"number": 412, "operation": "all_gather", "label": "blocks.3", "count": 4096, "dtype": "bf16",
///          "began_s": 12.031, "ended_s": null}, ...]}, ...]}
///
/// The file has the last kCalls calls of each group. Seconds count from the moment when the rank's mesh was made.
/// `ended_s` is null for a call that has not ended. The class is thread-safe.
class FlightRecorder : public std::enable_shared_from_this<FlightRecorder> {
 public:
  static constexpr std::size_t kCalls = 64;

  /// Returns null if the environment does not ask for a record, or if there is only one rank.
  static std::shared_ptr<FlightRecorder> from_environment(int rank, int world_size);
  FlightRecorder(std::string folder, int rank, int world_size);

  /// Returns a group that records its calls and passes them on to `group`. If `group` moves a GPU's memory, returns
  /// `group` itself. Memory of either group is memory of the other group too.
  std::shared_ptr<Collectives> record(const std::string& name, std::shared_ptr<Collectives> group);

 private:
  friend class RecordedGroup;
  struct Call {
    CallSignature signature;
    double began_s = 0, ended_s = -1;
  };
  struct Group {
    std::string name;
    std::uint64_t calls = 0;
    std::vector<Call> last;  ///< the latest calls; call number n is at n % kCalls
  };

  double now_s() const;
  /// Returns the call's number in its group, from 1.
  std::uint64_t begin(std::size_t group, CallSignature signature);
  void end(std::size_t group, std::uint64_t call, const absl::Status& status);
  void failed(const absl::Status& why);
  std::string text(const absl::Status& why) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string folder_;
  const int rank_, world_size_;
  const double start_s_;
  Mutex mutex_;
  std::vector<Group> groups_ ABSL_GUARDED_BY(mutex_);
  bool is_written_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace tessera
