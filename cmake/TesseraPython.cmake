# Decides whether the Python package is built: TESSERA_HAVE_PYTHON. It needs the wheel of torch (LibTorch alone lacks
# libtorch_python.so), and the headers of the interpreter that has this torch. TESSERA_PYTHON_PACKAGE=AUTO builds it if
# that is possible.
set(TESSERA_PYTHON_PACKAGE AUTO CACHE STRING "Build the Python package: AUTO, ON, OFF")
set_property(CACHE TESSERA_PYTHON_PACKAGE PROPERTY STRINGS AUTO ON OFF)
set(TESSERA_HAVE_PYTHON OFF)
if(NOT TESSERA_PYTHON_PACKAGE STREQUAL "OFF")
  if(NOT TESSERA_PYTHON)
    find_program(TESSERA_PYTHON NAMES python3 python HINTS ${PROJECT_SOURCE_DIR}/.venv/bin)
  endif()
  if(NOT Python_EXECUTABLE)
    set(Python_EXECUTABLE ${TESSERA_PYTHON})
  endif()
  find_package(Python 3.11 COMPONENTS Interpreter Development.Module QUIET)
  if(Python_Development.Module_FOUND AND EXISTS ${TESSERA_TORCH_ROOT}/lib/libtorch_python.so)
    set(TESSERA_HAVE_PYTHON ON)
  elseif(TESSERA_PYTHON_PACKAGE STREQUAL "ON")
    message(FATAL_ERROR "TESSERA_PYTHON_PACKAGE=ON, but the headers of ${Python_EXECUTABLE} (Debian: python3-dev) or "
      "${TESSERA_TORCH_ROOT}/lib/libtorch_python.so were not found. scripts/setup installs both.")
  endif()
endif()
message(STATUS "Python package: ${TESSERA_HAVE_PYTHON}")
