#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tessera/metric.h"

namespace tessera {

/// Metrics by step in a file that other programs read while training goes on. One rank writes it, from one thread at a
/// time:
///
///   std::optional<tessera::MetricsFile> metrics;
///   if (mesh.is_main()) metrics.emplace("runs/a/metrics.csv");
///   ...
///   if (metrics) metrics->write(result.step, {{"loss", result.loss}, {"lr", result.lr}});
///
/// | the file                     | what it holds                                                              |
/// |------------------------------|----------------------------------------------------------------------------|
/// | "NAME.csv"                   | a table; the first row's names are its columns, and later rows have no others |
/// | `in_tensorboard(folder)`     | an event file in `folder`: numbers and flags as scalars of 32 bits         |
/// | any other name               | JSON lines, an object a step                                               |
///
/// Each write is handed to the system at once. If the file cannot be written any more (a full disk), one warning says
/// so and training goes on without it.
class MetricsFile {
 public:
  /// The fate of a file that exists already.
  enum class Start {
    kNew,      ///< an existing file is an error (73)
    kReplace,  ///< an existing file is removed first
    kAppend,   ///< rows are appended to the file, for a run that goes on
  };
  /// Makes missing folders, and the file. Throws tessera::Error: 73 it cannot be created, 77 no permission.
  explicit MetricsFile(const std::filesystem::path& path, Start start = Start::kNew);
  /// Writes TensorBoard events into a new file of `folder`. kAppend makes TensorBoard ignore steps in the folder's
  /// other files, from the first step on that is written here. Errors are those of the constructor.
  static MetricsFile in_tensorboard(const std::filesystem::path& folder, Start start = Start::kNew);

  ~MetricsFile();
  /// `other` must not be used afterwards.
  MetricsFile(MetricsFile&& other) noexcept;
  MetricsFile& operator=(MetricsFile&& other) noexcept;

  /// Writes the metrics of one step. Throws tessera::Error (64) for a name that is empty, "step", given twice, or no
  /// column of the table. A failed write is a warning, no error.
  void write(std::int64_t step, const std::vector<Metric>& metrics);
  /// Returns false once the file could not be written.
  bool is_open() const;
  /// Returns the file's path; for TensorBoard the path of the event file.
  const std::filesystem::path& path() const;

 private:
  struct State;
  explicit MetricsFile(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace tessera
