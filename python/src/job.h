#pragma once

#include <map>
#include <string>

#include "runtime/comm/call_watch.h"
#include "runtime/comm/resolve_topology.h"
#include "tessera/mesh.h"
#include "tessera/strategy.h"

namespace tessera::python {

/// What Python says of who this process is (_truths.py), under the names of runtime/comm/launcher_variables.h.
using Said = std::map<std::string, std::string>;

/// This process's place in its job: joined once, by the first call that needs other ranks, and left when the interpreter ends.
/// The counterpart of tessera::run, whose body is the whole Python program. Called with the GIL released; on one thread.
class Job {
 public:
  /// The mesh of this process, which the first call joins with what `strategy` asks of a process. Throws tessera::Error (64) in a
  /// forked process.
  static const Mesh& join(const Strategy& strategy, const Said& said = {});
  static bool is_joined();
  /// Who this process is: where it has joined as it did, else as the launcher's variables and `said` have it.
  static Topology topology(const Said& said);
  /// Whether this process was forked from the one that joined.
  static bool is_forked();

  /// An exception ends the program: tells the other ranks, the error file and the log. Returns the exit code, with which the
  /// process will end (see set_exit_code). Nothing but the code where no job was joined.
  static int fail(int code, const std::string& message, const std::string& call_stack);
  /// The program ends itself with an exit code of its own: tells the other ranks, the error file and the log.
  static void end(int code, const std::string& message);
  /// The program has ended without an exception: waits for the other ranks. Throws tessera::Error.
  static void leave();
  /// Gives the mesh back. REQUIRES: Engines are gone, so that nothing of it is used any more.
  static void forget();

  /// This rank's CallWatch (runtime/comm/call_watch.h) has these calls. Any thread, from when the job is joined until `forget`.
  static bool waits_long();
  static void tell(OutsideCalls calls);
};

/// The interpreter's last act will be to end the process with `code`, in place of its own.
void set_exit_code(int code);

}  // namespace tessera::python
