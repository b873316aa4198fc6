#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "python/src/bindings.h"
#include "python/src/cursor_row.h"
#include "tessera/checkpoint.h"
#include "tessera/durable.h"
#include "tessera/weights.h"

namespace tessera::python {
namespace {

using Released = py::call_guard<py::gil_scoped_release>;

CheckpointItems items_of(std::map<std::string, at::Tensor> tensors, std::map<std::string, std::string> json,
                         const std::optional<CursorRow>& data) {
  CheckpointItems items{std::move(tensors), std::move(json), {}};
  if (data) items.data = cursor_of(*data);
  return items;
}

std::optional<CursorRow> data_of(const LoadedCheckpoint& loaded) {
  if (!loaded.items.data) return std::nullopt;
  return row_of(*loaded.items.data);
}

void load(Engine& engine, const std::string& path, std::string part, std::vector<std::string> without,
          std::vector<std::string> ignored) {
  load_weights(engine, path, {std::move(part), std::move(without), std::move(ignored)});
}

void load_into(const std::vector<std::pair<std::string, at::Tensor>>& tensors, const std::string& path,
               std::string part, std::vector<std::string> without, std::vector<std::string> ignored) {
  load_weights(tensors, path, {std::move(part), std::move(without), std::move(ignored)});
}

}  // namespace

void bind_checkpoints(py::module_& module) {
  py::class_<CheckpointItems>(module, "CheckpointItems", py::module_local()).def(py::init(&items_of));
  py::class_<LoadedCheckpoint>(module, "LoadedCheckpoint", py::module_local())
      .def_readonly("path", &LoadedCheckpoint::path)
      .def_readonly("step", &LoadedCheckpoint::step)
      .def_readonly("inexact", &LoadedCheckpoint::inexact)
      .def_property_readonly("tensors", [](const LoadedCheckpoint& loaded) { return loaded.items.tensors; })
      .def_property_readonly("json", [](const LoadedCheckpoint& loaded) { return loaded.items.json; })
      .def_property_readonly("data", &data_of);
  py::class_<CheckpointProgress>(module, "CheckpointProgress", py::module_local())
      .def_readonly("path", &CheckpointProgress::path)
      .def_readonly("step", &CheckpointProgress::step)
      .def_readonly("written", &CheckpointProgress::written)
      .def_readonly("bytes", &CheckpointProgress::bytes);
  module.def(
      "save_checkpoint",
      [](Engine& engine, const std::string& folder, const CheckpointItems& items, std::int64_t keep, bool is_best) {
        return save_checkpoint(engine, folder, items, {keep, is_best});
      },
      Released());
  module.def("finish_checkpoint", &finish_checkpoint, Released());
  module.def("checkpoint_progress", &checkpoint_progress, Released());
  module.def(
      "load_checkpoint", [](Engine& engine, const std::string& path) { return load_checkpoint(engine, path); },
      Released());
  module.def(
      "commit_durable", [](Engine& engine, const CheckpointItems& items) { return commit_durable(engine, items); },
      Released());
  module.def("finish_commit", &finish_commit, Released());
  module.def("resume_durable", &resume_durable, Released());
  module.def(
      "save_weights",
      [](Engine& engine, const std::string& path, bool replace, bool is_archive) {
        save_weights(engine, path, is_archive ? WeightsForm::kArchive : WeightsForm::kDictionary,
                     replace ? Existing::kReplaced : Existing::kKept);
      },
      Released());
  module.def("load_weights", &load, Released());
  module.def("load_weights_into", &load_into, Released());
}

}  // namespace tessera::python
