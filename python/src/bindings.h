#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "tessera/engine.h"

/// Functions that python/src/module.cc puts into `tessera._native`. The Python files beside it are the API and stand on
/// these functions, so they explain names and arguments.
namespace tessera::python {

/// An Engine as Python and its guards hold it.
using EnginePointer = std::shared_ptr<Engine>;

void bind_job(pybind11::module_& module);
void bind_rules(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_checkpoints(pybind11::module_& module);
void bind_collectives(pybind11::module_& module);
void bind_loop(pybind11::module_& module);
void bind_data(pybind11::module_& module);

/// Translates exceptions. tessera::Error becomes tessera.Error with the same text and exit code; Python exceptions that
/// crossed autograd become themselves again; other exceptions of LibTorch become RuntimeError with their text.
void translate_exceptions();

}  // namespace tessera::python
