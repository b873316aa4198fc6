#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <tuple>

#include "engine/loop/dealt_samples.h"
#include "python/src/bindings.h"
#include "python/src/cursor_row.h"
#include "tessera/token_batches.h"

namespace tessera::python {
namespace {

using Released = py::call_guard<py::gil_scoped_release>;

std::tuple<at::Tensor, at::Tensor, double> next_of(TokenBatches& batches, at::Device device) {
  const TokenBatch batch = batches.next(device);
  return {batch.input, batch.target, batch.weight};
}

std::tuple<at::Tensor, at::Tensor, double> microbatch_of(TokenBatches& batches, std::int64_t microbatch,
                                                         at::Device device) {
  const TokenBatch batch = batches.of(microbatch, device);
  return {batch.input, batch.target, batch.weight};
}

}  // namespace

void bind_data(py::module_& module) {
  py::enum_<TokenFormat>(module, "TokenFormat", py::module_local())
      .value("auto", TokenFormat::kAuto)
      .value("text", TokenFormat::kText)
      .value("llmc", TokenFormat::kLlmc)
      .value("megatron", TokenFormat::kMegatron);
  py::enum_<Tail>(module, "Tail", py::module_local()).value("drop", Tail::kDrop).value("pad", Tail::kPad);
  py::class_<DatasetOptions>(module, "DatasetOptions", py::module_local())
      .def(py::init<>())
      .def_readwrite("format", &DatasetOptions::format)
      .def_readwrite("extensions", &DatasetOptions::extensions);
  py::class_<SamplerOptions>(module, "SamplerOptions", py::module_local())
      .def(py::init<>())
      .def_readwrite("num_samples", &SamplerOptions::num_samples)
      .def_readwrite("batch", &SamplerOptions::batch)
      .def_readwrite("accumulation", &SamplerOptions::accumulation)
      .def_readwrite("microbatches", &SamplerOptions::microbatches)
      .def_readwrite("rank", &SamplerOptions::rank)
      .def_readwrite("world_size", &SamplerOptions::world_size)
      .def_readwrite("seed", &SamplerOptions::seed)
      .def_readwrite("shuffle", &SamplerOptions::shuffle)
      .def_readwrite("runs", &SamplerOptions::runs)
      .def_readwrite("tail", &SamplerOptions::tail);
  py::class_<TokenBatches>(module, "TokenBatches", py::module_local())
      .def(py::init([](const std::string& data, std::int64_t seq_len, std::int64_t vocab_size,
                       const SamplerOptions& sampling, const DatasetOptions& options) {
             return std::make_unique<TokenBatches>(data, seq_len, vocab_size, sampling, options);
           }),
           Released())
      .def("next", &next_of, Released())
      .def("of", &microbatch_of, Released())
      .def("end_step", &TokenBatches::end_step)
      .def("go_to_step", &TokenBatches::go_to_step)
      .def("data_order", &TokenBatches::data_order)
      .def("deal",
           [](TokenBatches& batches, std::int64_t begin, std::int64_t end) {
             batches.deal({begin, end});
           })
      .def("cursor", [](const TokenBatches& batches) { return row_of(batches.cursor()); })
      .def("resume", [](TokenBatches& batches, const CursorRow& row) { batches.resume(cursor_of(row)); })
      .def("num_tokens", &TokenBatches::num_tokens)
      .def("epoch", &TokenBatches::epoch)
      .def("steps_per_epoch", &TokenBatches::steps_per_epoch)
      .def("dropped_samples", &TokenBatches::dropped_samples)
      .def("padded_samples", &TokenBatches::padded_samples);
  py::class_<DealtSamples>(module, "RankSampler", py::module_local())
      .def(py::init<const SamplerOptions&, std::int64_t>())
      .def("begin_epoch", &DealtSamples::begin_epoch)
      .def("next", &DealtSamples::next)
      .def("of", &DealtSamples::of)
      .def("end_step", &DealtSamples::end_step)
      .def("deal",
           [](DealtSamples& samples, std::int64_t begin, std::int64_t end) {
             samples.deal({begin, end});
           })
      .def("cursor", [](const DealtSamples& samples) { return row_of(samples.cursor()); })
      .def("resume", [](DealtSamples& samples, const CursorRow& row) { samples.resume(cursor_of(row)); })
      .def("epoch", &DealtSamples::epoch)
      .def("steps_per_epoch", &DealtSamples::steps_per_epoch)
      .def("microbatches_per_epoch", &DealtSamples::microbatches_per_epoch);
}

}  // namespace tessera::python
