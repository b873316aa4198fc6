#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "python/src/bindings.h"
#include "python/src/job.h"
#include "tessera/collectives.h"
#include "tessera/error.h"

namespace tessera::python {
namespace {

using Released = py::call_guard<py::gil_scoped_release>;

Reduce reduce_of(const std::string& name) {
  if (name == "sum") return Reduce::kSum;
  if (name == "mean") return Reduce::kMean;
  if (name == "min") return Reduce::kMin;
  if (name == "max") return Reduce::kMax;
  throw Error(ExitCode::kUsage, "all_reduce: op is \"sum\", \"mean\", \"min\" or \"max\", got \"" + name +
                                    "\". [T0388] hint: leave it out for the sum");
}

}  // namespace

void bind_collectives(py::module_& module) {
  // Each type of value has a function of its own, since an int must not become a float.
  module.def(
      "all_reduce", [](const at::Tensor& tensor, const std::string& op) { all_reduce(mesh(), tensor, reduce_of(op)); },
      Released());
  module.def(
      "all_reduce_int",
      [](std::int64_t value, const std::string& op) { return all_reduce_number(mesh(), value, reduce_of(op)); },
      Released());
  module.def(
      "all_reduce_float",
      [](double value, const std::string& op) { return all_reduce_number(mesh(), value, reduce_of(op)); }, Released());
  module.def(
      "all_gather", [](const at::Tensor& own) { return all_gather(mesh(), own); }, Released());
  module.def("all_gather_bytes", [](const std::string& own) {
    std::vector<std::string> all;
    {
      const py::gil_scoped_release released;
      all = all_gather(mesh(), own);
    }
    std::vector<py::bytes> result(all.begin(), all.end());
    return result;
  });
  module.def(
      "broadcast", [](const at::Tensor& tensor, int root) { broadcast(mesh(), tensor, root); }, Released());
  module.def("broadcast_bytes", [](const std::string& own, int root) {
    std::string text;
    {
      const py::gil_scoped_release released;
      text = broadcast(mesh(), own, root);
    }
    return py::bytes(text);
  });
  module.def(
      "barrier", [] { barrier(mesh()); }, Released());
  module.def(
      "mean_over_ranks", [](double mean, std::int64_t count) { return mean_over_ranks(mesh(), mean, count); },
      Released());
}

}  // namespace tessera::python
