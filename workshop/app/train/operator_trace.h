#pragma once

#include <filesystem>

namespace tessera::app {

/// Runs LibTorch's own profiler (Kineto) around some steps. The trace shows which operators ran at which time, and on a
/// GPU which kernels and copies.
class OperatorTrace {
 public:
  /// Starts the profiler. Throws tessera::Error (69) if this LibTorch was built without Kineto.
  void start();
  bool is_on() const { return is_on_; }
  /// Ends the trace, and writes a Chrome trace. If the file cannot be written, there is only a warning, since the
  /// traced steps are done.
  void try_to_write(const std::filesystem::path& path);

 private:
  bool is_on_ = false;
};

}  // namespace tessera::app
