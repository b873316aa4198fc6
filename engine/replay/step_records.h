#pragma once

// See docs/glossary.md: unit.

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// The record of a step, with which another run is compared: a line of `hashes.jsonl` ("record_hashes").
struct StepRecord {
  std::int64_t step = 0;           ///< StepResult::step
  std::int64_t microbatches = 0;   ///< microbatches of all ranks in this step
  std::int64_t threads = 0;        ///< rank 0's number of LibTorch threads, on which the bits of operators depend
  double loss = 0, grad_norm = 0;  ///< NaN and infinity are null in the file, and are read as NaN
  std::vector<std::pair<std::string, std::uint64_t>> units;  ///< name and hash, in the Engine's order
};

/// Returns the line, with its newline:
///
///   {"step":12,"microbatches":8,"threads":2,"loss":3.25,"grad_norm":1.5,"units":{"blocks.0":"91c3e0...",...}}
std::string to_line(const StepRecord& record);

/// Returns a file's records by step. If a step has two lines, the later line is used. A last line without a newline is
/// left out: the process was killed while it wrote the line. Messages begin with `who`. Errors: those of
/// read_input_file; 65, with the line's number, for a line that is not a record.
absl::StatusOr<std::vector<StepRecord>> read_step_records(const std::string& path, const std::string& who);

/// The file `hashes.jsonl`, while a run writes it. A run that continues from a checkpoint makes some recorded steps
/// again. Its first write therefore removes the lines of the step that it writes, and of all later steps. The file of
/// an interrupted run thus becomes equal to the file of an uninterrupted run.
class StepRecordsFile {
 public:
  /// Makes missing folders, and the file where there is none. Errors: 73, 77, 71, 74 if the file cannot be made or
  /// read; 65 if the file holds anything but step records.
  static absl::StatusOr<StepRecordsFile> open(const std::string& path);

  /// Writes the record behind the records of earlier steps. Errors: those of `open`.
  absl::Status write(const StepRecord& record);

 private:
  explicit StepRecordsFile(std::string path) : path_(std::move(path)) {}

  std::string path_;
  std::int64_t last_ = -1;  ///< the latest step written here; -1: none
};

}  // namespace tessera
