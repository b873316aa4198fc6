#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace tessera::python {

/// A Python object that any thread may copy and drop, with or without the GIL.
using Held = std::shared_ptr<pybind11::object>;

/// Returns a holder of `object`. REQUIRES: the caller holds the GIL.
inline Held hold(pybind11::object object) {
  return {new pybind11::object(std::move(object)), [](pybind11::object* held) {
            const pybind11::gil_scoped_acquire gil;
            delete held;
          }};
}

}  // namespace tessera::python
