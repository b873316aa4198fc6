#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tessera/metric.h"

namespace tessera {

/// A file with the metrics of each step, which other programs can read while training continues. One rank writes it,
/// from one thread at a time:
///
///   std::optional<tessera::MetricsFile> metrics;
///   if (mesh.is_main()) metrics.emplace("runs/a/metrics.csv");
///   ...
///   if (metrics) metrics->write(result.step, {{"loss", result.loss}, {"lr", result.lr}});
///
/// | the file                     | what it holds                                                              |
/// |------------------------------|----------------------------------------------------------------------------|
/// | "NAME.csv"                   | a table; its columns are the names of the first row, and later rows add none |
/// | `in_tensorboard(folder)`     | an event file in `folder`: numbers and flags as scalars of 32 bits         |
/// | any other name               | JSON lines, one object for each step                                       |
///
/// Each write is passed to the system immediately. If the file can no longer be written, for example because the disk
/// is full, there is one warning, and training continues without the file.
class MetricsFile {
 public:
  /// The treatment of a file that exists already.
  enum class Start {
    kNew,      ///< an existing file is an error (73)
    kReplace,  ///< an existing file is removed first
    kAppend,   ///< rows are appended to the file, for a run that continues
  };
  /// Makes missing folders, and the file. Throws tessera::Error: 73 if the file cannot be created; 77 without
  /// permission.
  explicit MetricsFile(const std::filesystem::path& path, Start start = Start::kNew);
  /// Writes TensorBoard events into a new file of `folder`. If `start` is kAppend, TensorBoard ignores some steps in
  /// the folder's other files: those that are not earlier than the first step in this file. Errors are those of the
  /// constructor.
  static MetricsFile in_tensorboard(const std::filesystem::path& folder, Start start = Start::kNew);

  ~MetricsFile();
  /// `other` must not be used afterwards.
  MetricsFile(MetricsFile&& other) noexcept;
  MetricsFile& operator=(MetricsFile&& other) noexcept;

  /// Writes the metrics of one step. Throws tessera::Error (64) for a name that is empty, is "step", is given twice, or
  /// is no column of the table. A failed write is only a warning.
  void write(std::int64_t step, const std::vector<Metric>& metrics);
  /// Returns false if a write of the file has failed.
  bool is_open() const;
  /// Returns the path of the file; for TensorBoard, the path of the event file.
  const std::filesystem::path& path() const;

 private:
  struct State;
  explicit MetricsFile(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace tessera
