#pragma once

#include <absl/status/status.h>

#include <optional>
#include <string>

#include "tessera/exit_code.h"
#include "tessera/mesh.h"

namespace tessera {

/// What a program's outermost call knows of its job (`tessera::run`, the Python package): the mesh to tell of an exception,
/// and how the process ends. `init` fills in the mesh of the scope of its thread.
struct RunScope {
  RunScope() { current = this; }
  ~RunScope() { current = nullptr; }
  RunScope(const RunScope&) = delete;
  RunScope& operator=(const RunScope&) = delete;

  /// Ranks leave together, so that none looks lost to the others: the one that serves the store, or still writes a file. A
  /// rank that others still need for a step is no reason to wait: they are told, and end with that error.
  /// Where the mesh has ended with an error that the program dealt with, there is nobody to wait for. Throws tessera::Error: late_failure
  /// too.
  void leave_together() const;

  /// An exception ends this rank: tells the other ranks `reason`, writes the error file and the log, and returns the exit
  /// code. An earlier reason of the mesh goes before. `call_stack`: of another language, for the error file.
  ExitCode end_with(const absl::Status& reason, const std::string& call_stack = "none: a C++ program") const;

  /// The program ends itself with an exit code of its own, as by Python's sys.exit(3): the same, but for that the error file says so.
  void end_with_own_code(int code, const std::string& message) const;

  static inline thread_local RunScope* current = nullptr;
  std::optional<Mesh> mesh;
  /// Of an Engine that an exception took along: what to say if memory was short (explain_out_of_memory).
  std::string memory_story;
  /// What failed behind the program's back, and was noticed when nobody could be told: ranks that leave together throw it.
  absl::Status late_failure;

 private:
  absl::Status tell(const absl::Status& reason, const std::string& call_stack, bool is_own_code) const;
};

}  // namespace tessera
