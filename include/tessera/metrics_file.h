#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tessera/metric.h"

namespace tessera {

/// Metrics by step in a file that other programs read while training goes on. One rank writes:
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
/// Each write is handed to the system at once. A file that cannot be written any more (a full disk) is warned about once, and
/// training goes on without it.
class MetricsFile {
 public:
  /// What becomes of a file that is there already.
  enum class Start {
    kNew,      ///< an error (73)
    kReplace,  ///< it is removed first
    kAppend,   ///< rows go behind its own: for a run that goes on
  };
  /// Makes missing folders, and the file. Throws tessera::Error: 73 cannot be created, 77 no permission.
  explicit MetricsFile(const std::filesystem::path& path, Start start = Start::kNew);
  /// In a new file of `folder`. Under kAppend TensorBoard forgets what the files there have of the first step that is written
  /// and of later ones. Throws as the constructor.
  static MetricsFile in_tensorboard(const std::filesystem::path& folder, Start start = Start::kNew);

  ~MetricsFile();
  MetricsFile(MetricsFile&& other) noexcept;
  MetricsFile& operator=(MetricsFile&& other) noexcept;

  /// Throws tessera::Error (64) for a name that is empty, "step", given twice, or no column of the table.
  void write(std::int64_t step, const std::vector<Metric>& metrics);
  /// False once it could not be written.
  bool is_open() const;
  const std::filesystem::path& path() const;

 private:
  struct State;
  explicit MetricsFile(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace tessera
