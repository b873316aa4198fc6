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
include(${CMAKE_CURRENT_SOURCE_DIR}/TorchVersion.cmake)
tessera_version_of_torch(${TESSERA_TORCH_ROOT} tessera_torch_version)
# The library and the programs depend on torch's version alone, and only the extension depends on Python. So a build for
# another Python with the same torch serves, too, and the extension is compiled there once more.
set(tessera_module "")
foreach(tessera_tree ${TESSERA_BUILT_TREE} ${TESSERA_BUILT_TREE}/tessera)
  if(TESSERA_BUILT_TREE AND EXISTS ${tessera_tree}/python/tessera/_built_with.py)
    file(READ ${tessera_tree}/python/tessera/_built_with.py tessera_built_with)
    string(FIND "${tessera_built_with}" "\"${tessera_torch_version}\"" tessera_found)
    if(NOT tessera_found EQUAL -1 AND EXISTS ${tessera_tree}/python/tessera/_native.${Python_SOABI}.so)
      set(tessera_module module)
    elseif(NOT tessera_found EQUAL -1)
      set(tessera_module other_module)
    endif()
  endif()
endforeach()

if(tessera_module)
  message(STATUS "Tessera: that of ${TESSERA_BUILT_TREE}, brought up to date")
  # This builds again from sources that have changed.
  set(tessera_targets tessera_wheel_files tessera_wheel_${tessera_module})
  set(tessera_configure true)
  if(tessera_module STREQUAL "other_module")
    set(tessera_configure ${CMAKE_COMMAND} -DTESSERA_WHEEL_PYTHON=${Python_EXECUTABLE} ${TESSERA_BUILT_TREE})
  endif()
  # That build may be one of this file. It keeps its own torch: for another path, everything would be compiled again.
  load_cache(${TESSERA_BUILT_TREE} READ_WITH_PREFIX tessera_built_ TESSERA_TORCH_ROOT)
  set(tessera_with_its_torch ${CMAKE_COMMAND} -E env TESSERA_TORCH_ROOT=${tessera_built_TESSERA_TORCH_ROOT})
  add_custom_target(tessera_wheel COMMAND ${tessera_with_its_torch} ${tessera_configure}
    COMMAND ${tessera_with_its_torch} ${CMAKE_COMMAND} --build ${TESSERA_BUILT_TREE} --target ${tessera_targets})
  foreach(component wheel wheel_${tessera_module})
    install(CODE "execute_process(COMMAND \"${CMAKE_COMMAND}\" --install \"${TESSERA_BUILT_TREE}\" --component ${component} --strip
      --prefix \"\${CMAKE_INSTALL_PREFIX}\" COMMAND_ERROR_IS_FATAL ANY)" COMPONENT wheel)
  endforeach()
else()
  message(STATUS "Tessera: built from nothing with ${TESSERA_TORCH_ROOT}")
  set(TESSERA_PYTHON ${Python_EXECUTABLE})
  set(TESSERA_PYTHON_PACKAGE ON CACHE STRING "")
  set(TESSERA_PROGRAMS ON CACHE BOOL "")
  set(TESSERA_BATCHES ON CACHE BOOL "")
  set(TESSERA_TORCH_ROOT ${TESSERA_TORCH_ROOT} CACHE PATH "" FORCE)
  add_subdirectory(.. tessera)
endif()
