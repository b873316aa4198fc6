#include <torch/csrc/utils/pybind.h>

#include <string>

#include "python/src/bindings.h"
#include "python/src/job.h"
#include "runtime/border/throw.h"
#include "runtime/comm/resolve_topology.h"
#include "tessera/observe_pointers.h"
#include "tessera/seed_for_rank.h"
#include "tessera/strategy.h"

namespace tessera::python {
namespace {

using Released = py::call_guard<py::gil_scoped_release>;

/// Of this process: where it has joined as it is, else as the launcher's variables say.
Topology topology() { return value_or_throw(resolve_topology()); }

}  // namespace

void bind_job(py::module_& module) {
  py::class_<Strategy>(module, "Strategy", py::module_local())
      .def_static("from_file", [](const std::string& path) { return Strategy::from_file(path); })
      .def_static("from_json", &Strategy::from_json)
      .def("to_json", &Strategy::to_json);
  module.def(
      "join", [](const Strategy& strategy) { Job::join(strategy); }, Released());
  module.def("is_joined", &Job::is_joined);
  module.def("is_forked", &Job::is_forked);
  module.def("rank", [] { return topology().rank; });
  module.def("world_size", [] { return topology().world_size; });
  module.def("local_rank", [] { return topology().local_rank; });
  module.def("seed_for_rank", [](std::uint64_t seed) { return seed_for_rank(seed, topology().rank); });
  module.def("fail", &Job::fail, Released());
  module.def("leave", &Job::leave, Released());
  module.def("forget", &Job::forget, Released());
  module.def("set_exit_code", &set_exit_code);
  module.def("observe_pointers", &observe_pointers);
}

}  // namespace tessera::python
