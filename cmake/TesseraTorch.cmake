# Finds LibTorch and offers it as tessera::torch (CPU) and tessera::torch_cuda.
#
# The wheel's own TorchConfig.cmake is not used: it refuses to configure a CUDA wheel without the CUDA toolkit, and it
# overwrites CMAKE_CUDA_ARCHITECTURES. Tessera needs only three libraries and two include folders. This file is
# installed too, and TesseraConfig.cmake uses it.
set(TESSERA_TORCH_ROOT "" CACHE PATH "Folder of LibTorch (holds include/ and lib/); empty: the torch package of .venv or of python3")

if(NOT TESSERA_TORCH_ROOT)
  find_program(TESSERA_PYTHON NAMES python3 python
    HINTS ${PROJECT_SOURCE_DIR}/.venv/bin NO_DEFAULT_PATH)
  find_program(TESSERA_PYTHON NAMES python3 python)
  execute_process(
    COMMAND ${TESSERA_PYTHON} -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE tessera_torch_found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE tessera_torch_missing)
  if(tessera_torch_missing)
    message(FATAL_ERROR "LibTorch not found. Run scripts/setup, or set TESSERA_TORCH_ROOT to the folder of a LibTorch from 2.11 to 2.15.")
  endif()
  set(TESSERA_TORCH_ROOT ${tessera_torch_found} CACHE PATH "" FORCE)
endif()
if(NOT EXISTS ${TESSERA_TORCH_ROOT}/lib/libtorch_cpu.so)
  message(FATAL_ERROR "TESSERA_TORCH_ROOT=${TESSERA_TORCH_ROOT} holds no lib/libtorch_cpu.so")
endif()
message(STATUS "LibTorch: ${TESSERA_TORCH_ROOT}")

if(NOT TARGET tessera::torch)
  add_library(tessera::torch SHARED IMPORTED)
  set_target_properties(tessera::torch PROPERTIES
    IMPORTED_LOCATION ${TESSERA_TORCH_ROOT}/lib/libtorch_cpu.so
    INTERFACE_INCLUDE_DIRECTORIES "${TESSERA_TORCH_ROOT}/include;${TESSERA_TORCH_ROOT}/include/torch/csrc/api/include"
    INTERFACE_LINK_LIBRARIES ${TESSERA_TORCH_ROOT}/lib/libc10.so
    # NDEBUG is part of the wheel's ABI: without it, some of its classes (at::RecordFunction) have one more member.
    INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO;NDEBUG"
    # The wheel's libraries find their CUDA libraries through their own RPATH, which the linker need not follow.
    INTERFACE_LINK_OPTIONS "-Wl,--allow-shlib-undefined;-Wl,--no-as-needed")
  if(EXISTS ${TESSERA_TORCH_ROOT}/lib/libtorch_cuda.so)
    add_library(tessera::torch_cuda SHARED IMPORTED)
    set_target_properties(tessera::torch_cuda PROPERTIES
      IMPORTED_LOCATION ${TESSERA_TORCH_ROOT}/lib/libtorch_cuda.so
      INTERFACE_LINK_LIBRARIES "tessera::torch;${TESSERA_TORCH_ROOT}/lib/libc10_cuda.so"
      INTERFACE_COMPILE_DEFINITIONS "USE_C10D_NCCL")
    # This is the CUDA runtime that LibTorch itself loads, so that the process has only one. Wheels have it beside
    # torch.
    get_filename_component(tessera_site_packages ${TESSERA_TORCH_ROOT} DIRECTORY)
    find_library(TESSERA_CUDART NAMES libcudart.so.13 cudart
      HINTS ${tessera_site_packages}/nvidia/cu13/lib ${TESSERA_TORCH_ROOT}/lib $ENV{CUDA_HOME}/lib64 /usr/local/cuda/lib64)
    if(TESSERA_CUDART)
      add_library(tessera::cudart SHARED IMPORTED)
      set_target_properties(tessera::cudart PROPERTIES IMPORTED_LOCATION ${TESSERA_CUDART})
    endif()
  endif()
endif()

# tessera_use_torch_pch(<target>...): compiles targets with one shared precompiled header of LibTorch's expensive ones
# (torch/nn/module.h alone costs 9 s a file), and of what layers without LibTorch have precompiled
# (TesseraLayers.cmake), but for fmt, of which LibTorch brings a copy of its own. Sources still include what they use.
function(tessera_use_torch_pch)
  if(NOT TARGET tessera_torch_pch)
    file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/tessera_torch_pch.cc CONTENT "")
    add_library(tessera_torch_pch OBJECT ${PROJECT_BINARY_DIR}/tessera_torch_pch.cc)
    target_link_libraries(tessera_torch_pch PRIVATE
      tessera::torch absl::status absl::statusor nlohmann_json::nlohmann_json tessera_options)
    set(headers ${tessera_std_headers})
    list(REMOVE_ITEM headers <fmt/format.h>)
    target_precompile_headers(tessera_torch_pch PRIVATE
      <ATen/Functions.h> <ATen/core/Tensor.h> <torch/csrc/autograd/custom_function.h> <torch/csrc/distributed/c10d/Backend.hpp>
      <torch/nn/module.h> <torch/nn/modules/container/modulelist.h> <torch/nn/modules/embedding.h> <torch/nn/modules/linear.h>
      <torch/nn/modules/normalization.h> <torch/nn/pimpl.h> ${headers})
  endif()
  foreach(target ${ARGN})
    # This replaces the precompiled header without LibTorch, if a layer has that header.
    set_target_properties(${target} PROPERTIES PRECOMPILE_HEADERS_REUSE_FROM tessera_torch_pch)
    tessera_compile_in_batches(${target})
  endforeach()
endfunction()
