#pragma once

#include <absl/status/status.h>

#include <optional>
#include <string>

#include "tessera/exit_code.h"
#include "tessera/mesh.h"

namespace tessera {

/// The data of a program's outermost call (`tessera::run`, the Python package) about its job: the mesh whose ranks get
/// the reason of an exception, and how the process ends. It lives on the stack of one thread; `init` fills in the mesh
/// of the scope of its thread.
struct RunScope {
  RunScope() { current = this; }
  ~RunScope() { current = nullptr; }
  RunScope(const RunScope&) = delete;
  RunScope& operator=(const RunScope&) = delete;

  /// Waits in a barrier until all ranks have come here. So no rank looks lost to the others, such as the rank that
  /// serves the store if it ended first, or a rank that still writes a file. Ranks that still need this rank for a step
  /// get the error that it leaves, and end with that error. This rank waits for no other rank if the mesh has failed
  /// and the program handled the error. Throws the tessera::Error of the barrier, and late_failure.
  void leave_together() const;

  /// It is called when an exception ends this rank. It tells the other ranks `reason`, writes the error file and the
  /// log, and returns the exit code. Where the mesh failed for an earlier reason, that one counts. `call_stack`:
  /// another language's call stack, for the error file.
  ExitCode end_with(const absl::Status& reason, const std::string& call_stack = "none: a C++ program") const;

  /// It is called when the program ends itself with an exit code of its own, as Python's sys.exit(3) does. It does what
  /// end_with does, but the error file names no code of Tessera.
  void end_with_own_code(int code, const std::string& message) const;

  static inline thread_local RunScope* current = nullptr;
  std::optional<Mesh> mesh;
  /// An explanation of the memory of an Engine that an exception destroyed, for an error that says that memory was
  /// short (explain_out_of_memory).
  std::string memory_story;
  /// A failure in the background that was noticed when no call could report it. leave_together throws it.
  absl::Status late_failure;

 private:
  absl::Status tell(const absl::Status& reason, const std::string& call_stack, bool is_own_code) const;
};

}  // namespace tessera
