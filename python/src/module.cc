#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "python/src/bindings.h"
#include "runtime/border/phrase.h"
#include "tessera/error.h"

namespace tessera::python {

void translate_exceptions() {
  py::register_local_exception_translator([](std::exception_ptr failure) {
    if (!failure) return;
    try {
      std::rethrow_exception(failure);
    } catch (const Error& error) {
      const py::object type = py::module_::import("tessera._error").attr("Error");
      const py::object instance = type(error.message(), static_cast<int>(error.exit_code()));
      PyErr_SetObject(type.ptr(), instance.ptr());
    } catch (python_error& error) {
      error.restore();
    } catch (const c10::OutOfMemoryError& error) {
      PyErr_SetString(py::module_::import("torch").attr("OutOfMemoryError").ptr(), error.what_without_backtrace());
    } catch (const c10::Error& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
    }
  });
}

}  // namespace tessera::python

PYBIND11_MODULE(_native, module) {
  module.doc() = "What the package tessera stands on; see there.";
  module.attr("torch_version") = TORCH_VERSION;
  tessera::speaks_python = true;
  tessera::python::translate_exceptions();
  tessera::python::bind_job(module);
  tessera::python::bind_rules(module);
  tessera::python::bind_engine(module);
  tessera::python::bind_checkpoints(module);
  tessera::python::bind_collectives(module);
  tessera::python::bind_loop(module);
  tessera::python::bind_data(module);
}
