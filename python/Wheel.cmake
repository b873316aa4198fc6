# cmake/TesseraWheel.cmake decides what the wheel contains. This file takes it from a build: see CMakeLists.txt in this
# folder.
set(TESSERA_BUILT_TREE ${CMAKE_CURRENT_SOURCE_DIR}/../build/release CACHE PATH "A build of Tessera to take the objects from; empty: none")
find_package(Python 3.11 COMPONENTS Interpreter Development.Module REQUIRED)

# Pip builds in a separate environment, where torch cannot be imported. The torch for the build lies in the folder into
# which the wheel will be installed.
set(TESSERA_TORCH_ROOT $ENV{TESSERA_TORCH_ROOT})
if(NOT TESSERA_TORCH_ROOT)
  execute_process(COMMAND ${Python_EXECUTABLE} -c "import sysconfig; print(sysconfig.get_path('platlib'))"
    OUTPUT_VARIABLE tessera_site_packages OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set(TESSERA_TORCH_ROOT ${tessera_site_packages}/torch)
endif()
if(NOT EXISTS ${TESSERA_TORCH_ROOT}/lib/libtorch_python.so)
  message(FATAL_ERROR "No torch in ${TESSERA_TORCH_ROOT}. Install torch into this environment first, or say where it is: "
    "TESSERA_TORCH_ROOT=FOLDER pip install ./python")
endif()
set(tessera_built ${TESSERA_BUILT_TREE}/python/tessera)
include(${CMAKE_CURRENT_SOURCE_DIR}/TorchVersion.cmake)
tessera_version_of_torch(${TESSERA_TORCH_ROOT} tessera_torch_version)
set(tessera_is_built OFF)
if(TESSERA_BUILT_TREE AND EXISTS ${tessera_built}/_native.${Python_SOABI}.so AND EXISTS ${tessera_built}/_built_with.py)
  file(READ ${tessera_built}/_built_with.py tessera_built_with)
  string(FIND "${tessera_built_with}" "\"${tessera_torch_version}\"" tessera_found)
  if(NOT tessera_found EQUAL -1)
    set(tessera_is_built ON)
  endif()
endif()

if(tessera_is_built)
  message(STATUS "Tessera: that of ${TESSERA_BUILT_TREE}, brought up to date")
  # This builds again from sources that have changed.
  add_custom_target(tessera_wheel COMMAND ${CMAKE_COMMAND} --build ${TESSERA_BUILT_TREE} --target tessera_wheel)
  install(CODE "execute_process(COMMAND \"${CMAKE_COMMAND}\" --install \"${TESSERA_BUILT_TREE}\" --component wheel --strip
    --prefix \"\${CMAKE_INSTALL_PREFIX}\" COMMAND_ERROR_IS_FATAL ANY)" COMPONENT wheel)
else()
  message(STATUS "Tessera: built from nothing with ${TESSERA_TORCH_ROOT}")
  set(TESSERA_PYTHON ${Python_EXECUTABLE})
  set(TESSERA_PYTHON_PACKAGE ON CACHE STRING "")
  set(TESSERA_PROGRAMS ON CACHE BOOL "")
  set(TESSERA_BATCHES ON CACHE BOOL "")
  set(TESSERA_TORCH_ROOT ${TESSERA_TORCH_ROOT} CACHE PATH "" FORCE)
  add_subdirectory(.. tessera)
endif()
