#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "tessera/engine.h"

/// What python/src/module.cc puts into `tessera._native`. The Python files beside it are the API; this is what they stand on, so names and
/// arguments are explained there.
namespace tessera::python {

/// An Engine as Python holds it, and guards with it.
using EnginePointer = std::shared_ptr<Engine>;

void bind_job(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_checkpoints(pybind11::module_& module);
void bind_collectives(pybind11::module_& module);

/// tessera::Error becomes tessera.Error with the same text and exit code; Python exceptions that crossed autograd are themselves
/// again; other exceptions of LibTorch become RuntimeError with their text.
void translate_exceptions();

}  // namespace tessera::python
