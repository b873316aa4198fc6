#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/loop/batch_statistics.h"
#include "engine/loop/same_call.h"
#include "python/src/bindings.h"
#include "python/src/job.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "tessera/data_parallel.h"
#include "tessera/module_view.h"
#include "tessera/sync_buffers.h"
#include "tessera/trace.h"

namespace tessera::python {
namespace {

using Released = py::call_guard<py::gil_scoped_release>;

void sync_buffers_of(const std::vector<at::Tensor>& buffers, bool mean) {
  torch::nn::Module module;
  for (const at::Tensor& buffer : buffers)
    module.register_buffer("buffer" + std::to_string(module.buffers(false).size()), buffer);
  sync_buffers(module, mesh(), mean ? BufferSync::kMean : BufferSync::kFromRankZero);
}

/// `begin`, `end`: times of time.monotonic_ns, which is Trace's clock.
void record_span(const std::string& name, std::int64_t begin, std::int64_t end) {
  const auto at = [](std::int64_t ns) { return Trace::Clock::time_point(std::chrono::nanoseconds(ns)); };
  if (Trace::on()) Trace::record(name, {}, at(begin), at(end));
}

/// Returns the group of all ranks for batch norms. SyncBatchNormImpl uses the same group.
std::shared_ptr<Collectives> norm_group() { return value_or_throw(groups_of(mesh()).shared_world("sync_batch_norm")); }

using MaybeTensor = std::optional<at::Tensor>;

at::Tensor or_undefined(const MaybeTensor& tensor) { return tensor.value_or(at::Tensor()); }

BatchNormState make_batch_norm_state(const MaybeTensor& mean, const MaybeTensor& variance, double momentum,
                                     double eps) {
  return {or_undefined(mean), or_undefined(variance), momentum, eps};
}

at::Tensor sync_batch_norm(const at::Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
                           const BatchNormState& norm) {
  return batch_norm_over_ranks(input, or_undefined(weight), or_undefined(bias), norm, norm_group());
}

/// A DataParallel as Python holds it. A copy in a forked process is never destroyed: the rank still uses the original.
using DataParallelPointer = std::shared_ptr<DataParallel>;

DataParallelPointer make_data_parallel(const std::shared_ptr<ModuleView>& mirror, double bucket_mb) {
  const pid_t owner = getpid();
  DataParallel* parallel = nullptr;
  {
    const py::gil_scoped_release released;
    parallel = new DataParallel(mirror, mesh(), {bucket_mb});
  }
  return {parallel, [owner](DataParallel* pointer) {
            if (owner != getpid()) return;
            const py::gil_scoped_release released;
            delete pointer;
          }};
}

/// The scope of `with parallel.no_sync():`. It keeps the DataParallel alive.
class Unsynced {
 public:
  explicit Unsynced(DataParallelPointer parallel) : parallel_(std::move(parallel)) { scope_.emplace(*parallel_); }
  void end() { scope_.reset(); }

 private:
  DataParallelPointer parallel_;
  std::optional<DataParallel::NoSync> scope_;
};

void bind_data_parallel(py::module_& module) {
  py::class_<DataParallel, DataParallelPointer>(module, "DataParallel", py::module_local())
      .def(py::init(&make_data_parallel))
      .def(
          "set_weight",
          [](DataParallel& parallel, double weight) {
            mesh();
            parallel.set_weight(weight);
          },
          Released())
      .def(
          "backward_nothing",
          [](DataParallel& parallel) {
            mesh();
            parallel.backward_nothing();
          },
          Released())
      .def(
          "broadcast_buffers",
          [](DataParallel& parallel) {
            mesh();
            parallel.broadcast_buffers();
          },
          Released())
      .def("num_buckets", &DataParallel::num_buckets)
      .def("no_sync", [](const DataParallelPointer& parallel) { return std::make_unique<Unsynced>(parallel); });
  py::class_<Unsynced>(module, "Unsynced", py::module_local()).def("end", &Unsynced::end);
}

}  // namespace

void bind_loop(py::module_& module) {
  module.def("sync_buffers", &sync_buffers_of, Released());
  module.def("start_trace", &Trace::start);
  module.def("record_span", &record_span);
  module.def(
      "write_trace", [](const std::string& path) { write_trace(path, mesh()); }, Released());
  module.def(
      "meet_for_batch_norm",
      [](const std::string& call, const std::string& problem) { expect_same_call(*norm_group(), call, problem); },
      Released());
  py::class_<BatchNormState>(module, "BatchNormState", py::module_local()).def(py::init(&make_batch_norm_state));
  module.def("sync_batch_norm", &sync_batch_norm, Released());
  bind_data_parallel(module);
}

}  // namespace tessera::python
