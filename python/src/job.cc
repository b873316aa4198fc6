#include "python/src/job.h"

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

#include "engine/job/join_job.h"
#include "engine/job/run_scope.h"
#include "runtime/base/status.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "tessera/error.h"

namespace tessera::python {
namespace {

struct Place {
  RunScope scope;
  pid_t pid = getpid();
};
/// The C++ runtime never destroys this object. `forget` destroys it while Python is still running; nothing else
/// destroys it.
Place* place = nullptr;

int exit_code = 0;
pid_t exiting = 0;

Environment with(const Said& said) {
  return [&said](const std::string& name) {
    const auto found = said.find(name);
    return found == said.end() ? process_environment(name) : std::optional(found->second);
  };
}

}  // namespace

bool Job::is_joined() { return place && place->scope.mesh; }
bool Job::is_forked() { return place && place->pid != getpid(); }

Topology Job::topology(const Said& said) {
  return is_joined() ? place->scope.mesh->topology() : value_or_throw(resolve_topology(with(said)));
}

std::pair<int, int> Job::rank_of(const Said& said) {
  if (!is_joined()) return value_or_throw(resolve_rank(with(said)));
  const Topology topology = Job::topology(said);
  return {topology.rank, topology.world_size};
}

const Mesh& Job::join(const Strategy& strategy, const Said& said) {
  if (is_forked()) {
    throw Error(ExitCode::kUsage,
                "this process was forked from a rank, and takes no part in what ranks do together. [T0391] hint: call "
                "Tessera in the training process only, not in a worker of a DataLoader");
  }
  if (!place) place = new Place;
  if (!place->scope.mesh) {
    const Mesh mesh = init_in(strategy, with(said));
    place->scope.mesh = mesh;  // init_in sets only the scope of its own thread
  }
  return *place->scope.mesh;
}

int Job::fail(int code, const std::string& message, const std::string& call_stack) {
  if (!is_joined() || is_forked()) return code;
  const auto reason = make_error(static_cast<ExitCode>(code), message);
  return static_cast<int>(place->scope.end_with(reason, call_stack));
}

void Job::end(int code, const std::string& message) {
  if (is_joined() && !is_forked()) place->scope.end_with_own_code(code, message);
}

void Job::leave() {
  if (is_joined() && !is_forked()) place->scope.leave_together();
}

void Job::forget() {
  if (!place || is_forked()) return;
  delete place;
  place = nullptr;
}

bool Job::waits_long() { return is_joined() && !is_forked() && groups_of(*place->scope.mesh).watch().waits(); }

void Job::tell(OutsideCalls calls) {
  if (is_joined() && !is_forked()) groups_of(*place->scope.mesh).watch().tell(std::move(calls));
}

namespace {

initproc init_of_python = nullptr;  // the constructor that SystemExit had before note_exits
PyObject* noting = nullptr;         // the function that note_exits was given; it is never released

int init_and_note(PyObject* made, PyObject* arguments, PyObject* names) {
  if (init_of_python(made, arguments, names) != 0) return -1;
  PyObject* const code = reinterpret_cast<PySystemExitObject*>(made)->code;
  PyObject* const noted = PyObject_CallOneArg(noting, code == nullptr ? Py_None : code);
  if (noted == nullptr) PyErr_Clear();  // the interpreter is ending, and has cleared the function's module
  Py_XDECREF(noted);
  return 0;
}

/// Makes `type` and the classes that are derived from it report their objects to `noting`. A class without an __init__
/// of its own has the constructor that its base had when the class was made.
void note_objects_of(const pybind11::handle& type) {
  initproc& init = reinterpret_cast<PyTypeObject*>(type.ptr())->tp_init;
  if (init == init_of_python) init = init_and_note;
  const pybind11::list derived = type.attr("__subclasses__")();
  for (const pybind11::handle each : derived) note_objects_of(each);
}

}  // namespace

void note_exits(const pybind11::function& note) {
  const pybind11::handle type(PyExc_SystemExit);
  noting = note.inc_ref().ptr();
  if (init_of_python != nullptr) return;
  init_of_python = reinterpret_cast<PyTypeObject*>(type.ptr())->tp_init;
  note_objects_of(type);
  // A derived class that is made later takes its constructor from SystemExit.__init__. If it has an __init__ of its
  // own, that function calls SystemExit.__init__.
  const pybind11::object method = type.attr("__init__");
  if (Py_IS_TYPE(method.ptr(), &PyWrapperDescr_Type))
    reinterpret_cast<PyWrapperDescrObject*>(method.ptr())->d_wrapped = reinterpret_cast<void*>(init_and_note);
}

void set_exit_code(int code) {
  // Launchers should see this exit code, even if Python would end with another one. When `end` runs, the interpreter
  // has flushed its streams and is finalized.
  const auto end = [] {
    if (exit_code == 0 || exiting != getpid()) return;
    std::fflush(nullptr);
    _exit(exit_code);
  };
  if (exiting == 0) Py_AtExit(end);
  exit_code = code;
  exiting = getpid();
}

}  // namespace tessera::python
