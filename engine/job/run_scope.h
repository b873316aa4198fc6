#pragma once

#include <absl/status/status.h>

#include <optional>
#include <string>

#include "tessera/exit_code.h"
#include "tessera/mesh.h"

namespace tessera {

/// The job of a program's outermost call (`tessera::run`, the Python package): the mesh whose ranks get the reason of
/// an exception, and the functions that end this rank's part of the job. It lives on the stack of one thread. `init`,
/// called on that thread, fills in the mesh.
struct RunScope {
  RunScope() { current = this; }
  ~RunScope() { current = nullptr; }
  RunScope(const RunScope&) = delete;
  RunScope& operator=(const RunScope&) = delete;

  /// Waits in a barrier until all ranks have come here. Without this barrier, the other ranks might take a rank that
  /// has ended for lost. This mistake could happen while a rank still writes a file, or if the rank that serves the
  /// store ended first. Ranks that still need this rank for a step get the error that this rank leaves, and end with
  /// this error. This rank waits for no other rank if the mesh has failed and the program handled the error. Throws the
  /// tessera::Error of the barrier, and late_failure.
  void leave_together() const;

  /// It is called when an exception ends this rank. It tells the other ranks `reason`, writes the error file and the
  /// log, and returns the exit code. If the mesh failed for an earlier reason, that reason is used instead.
  /// `call_stack`: the call stack of another language, for the error file.
  ExitCode end_with(const absl::Status& reason, const std::string& call_stack = "none: a C++ program") const;

  /// It is called when the program ends itself with an exit code of its own, as Python's sys.exit(3) does. It acts as
  /// end_with does, but the error file names no code of Tessera.
  void end_with_own_code(int code, const std::string& message) const;

  static inline thread_local RunScope* current = nullptr;
  std::optional<Mesh> mesh;
  /// If an exception has destroyed an Engine: the explanation of that Engine's memory. An error that reports too little
  /// memory shows this explanation (explain_out_of_memory).
  std::string memory_story;
  /// A failure in the background that was noticed when no call could report it. leave_together throws it.
  absl::Status late_failure;

 private:
  absl::Status tell(const absl::Status& reason, const std::string& call_stack, bool is_own_code) const;
};

}  // namespace tessera
