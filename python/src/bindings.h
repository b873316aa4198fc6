#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "tessera/engine.h"

/// Functions that python/src/module.cc puts into `tessera._native`. The Python files of the package are the API, and
/// call these functions. The Python files also explain names and arguments.
namespace tessera::python {

/// The pointer by which Python and its guards hold an Engine.
using EnginePointer = std::shared_ptr<Engine>;

void bind_job(pybind11::module_& module);
void bind_rules(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_checkpoints(pybind11::module_& module);
void bind_collectives(pybind11::module_& module);
void bind_loop(pybind11::module_& module);
void bind_data(pybind11::module_& module);

/// Translates exceptions. tessera::Error becomes tessera.Error with the same text and exit code. Python exceptions that
/// went through autograd stay as they are. Other exceptions of LibTorch become RuntimeError with their text.
void translate_exceptions();

}  // namespace tessera::python
