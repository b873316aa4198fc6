#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/src/bindings.h"
#include "python/src/job.h"
#include "sharding/unit.h"
#include "tessera/observe_pointers.h"
#include "tessera/seed_for_rank.h"
#include "tessera/strategy.h"

namespace tessera::python {
namespace {

using Released = py::call_guard<py::gil_scoped_release>;

/// The rows that python/tessera/_outside.py makes.
using GroupRow = std::tuple<std::string, int, int, int, std::uint64_t, std::vector<std::uint64_t>,
                            std::map<std::uint64_t, std::string>>;
using WaitRow = std::tuple<std::string, std::uint64_t, std::uint64_t, std::string>;

/// Converts Python's number of a thread to the operating system's number of the same thread.
int number_of(std::uint64_t thread) { return CallWatch::number_of(static_cast<pthread_t>(thread)); }

void tell_outside(const std::vector<GroupRow>& groups, const std::vector<WaitRow>& waits) {
  OutsideCalls calls;
  for (const auto& [name, first, count, stride, begun, threads, latest] : groups) {
    WaitReport::Group& group = calls.groups[name];
    group.first = first, group.count = count, group.stride = stride;
    group.family = name;
    group.begun = begun;
    for (const std::uint64_t thread : threads) group.threads.push_back(number_of(thread));
    group.latest = latest;
    group.is_outside = true;
  }
  for (const auto& [group, call, thread, text] : waits) calls.waits.push_back({group, call, number_of(thread), text});
  Job::tell(std::move(calls));
}

}  // namespace

void bind_job(py::module_& module) {
  py::class_<Strategy>(module, "Strategy", py::module_local())
      .def_static("from_file", [](const std::string& path) { return Strategy::from_file(path); })
      .def_static("from_json", &Strategy::from_json)
      .def("to_json", &Strategy::to_json);
  module.def(
      "join", [](const Strategy& strategy, const Said& said) { Job::join(strategy, said); }, Released());
  module.def("is_joined", &Job::is_joined);
  module.def("is_forked", &Job::is_forked);
  module.def("rank", [](const Said& said) { return Job::rank_of(said).first; });
  module.def("world_size", [](const Said& said) { return Job::rank_of(said).second; });
  module.def("local_rank", [](const Said& said) { return Job::topology(said).local_rank; });
  module.def("launcher", [](const Said& said) { return Job::topology(said).launcher; });
  module.def("seed_for_rank", [](std::uint64_t seed, int rank) { return seed_for_rank(seed, rank); });
  module.def("fail", &Job::fail, Released());
  module.def("end", &Job::end, Released());
  module.def("leave", &Job::leave, Released());
  module.def("forget", &Job::forget, Released());
  module.def("note_exits", &note_exits);
  module.def("set_exit_code", &set_exit_code);
  module.def("observe_pointers", &observe_pointers);
  module.def("is_lent", [](const at::Tensor& tensor) { return is_lent(tensor); });
  module.def("waits_long", &Job::waits_long);
  module.def("tell_outside", &tell_outside);
}

}  // namespace tessera::python
