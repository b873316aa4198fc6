#pragma once

#include <pybind11/pybind11.h>

#include <map>
#include <string>
#include <utility>

#include "runtime/comm/call_watch.h"
#include "runtime/comm/resolve_topology.h"
#include "tessera/mesh.h"
#include "tessera/strategy.h"

namespace tessera::python {

/// The facts that Python has about this process's place in the job (_truths.py), under the names of
/// runtime/comm/launcher_variables.h.
using Said = std::map<std::string, std::string>;

/// This process's place in its job. The first call that needs other ranks joins the job. The process leaves the job
/// when the interpreter ends. Job is the counterpart of tessera::run, with the whole Python program as the body. One
/// thread calls its functions, with the GIL released.
class Job {
 public:
  /// Returns the mesh of this process. The first call joins the job, with those settings of `strategy` that are for the
  /// whole process. Throws tessera::Error (64) in a forked process.
  static const Mesh& join(const Strategy& strategy, const Said& said = {});
  static bool is_joined();
  /// Returns the identity of this process: its rank, host and so on. If the process has not joined its job, the
  /// identity comes from the launcher's variables and `said`.
  static Topology topology(const Said& said);
  /// Returns only the rank and the world size, for which the hosts need not be known.
  static std::pair<int, int> rank_of(const Said& said);
  /// Returns whether this process was forked from the process that joined the job.
  static bool is_forked();

  /// Reports an exception to the other ranks, the error file and the log, since the exception ends the program. Returns
  /// the exit code with which the process will end (see set_exit_code). If no job was joined, it reports nothing and
  /// only returns the exit code.
  static int fail(int code, const std::string& message, const std::string& call_stack);
  /// Reports to the other ranks, the error file and the log that the program ends with an exit code of its own choice.
  static void end(int code, const std::string& message);
  /// Waits for the other ranks after a program that has ended without an exception. Throws the tessera::Error of the
  /// barrier in which ranks wait, or of a failure in the background that was not reported yet.
  static void leave();
  /// Releases the mesh. REQUIRES: all Engines are destroyed, so that no part of the mesh is used any more.
  static void forget();

  /// These functions call this rank's CallWatch (runtime/comm/call_watch.h). Any thread may call them, from the moment
  /// when the job is joined until `forget`.
  static bool waits_long();
  static void tell(OutsideCalls calls);
};

/// Returns the mesh. If no Engine and no `init` has joined the job before, this call joins the job with the strategy's
/// defaults. Throws tessera::Error (64) in a forked process.
inline const Mesh& mesh() { return Job::join({}); }

/// Calls `note` with the code of each SystemExit that is made from now on. Python does not report the SystemExit that
/// ends a program: it calls no excepthook, and gives the code to no handler at exit. An object of a derived class is
/// noted too, unless its class has an __init__ of its own that does not call SystemExit.__init__.
void note_exits(const pybind11::function& note);

/// Makes the process end with `code` instead of Python's exit code, after the interpreter is finalized.
void set_exit_code(int code);

}  // namespace tessera::python
