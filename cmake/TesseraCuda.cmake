# Decides which CUDA parts are built.
#
#   TESSERA_HAVE_CUDA   headers of the toolkit and of NCCL, and LibTorch's CUDA library, are there: the nccl transport.
#                       The headers are tessera_cuda_headers.
#   TESSERA_HAVE_NVCC   and a compiler that works: the kernels.
#
# TESSERA_CUDA=AUTO builds what can be built, ON demands both.
set(TESSERA_HAVE_CUDA OFF)
set(TESSERA_HAVE_NVCC OFF)
if(NOT TESSERA_CUDA STREQUAL "OFF")
  get_filename_component(tessera_site_packages ${TESSERA_TORCH_ROOT} DIRECTORY)
  set(tessera_cuda_roots $ENV{CUDA_HOME} /usr/local/cuda ${tessera_site_packages}/nvidia/cu13)
  find_path(TESSERA_CUDA_INCLUDE cuda_runtime_api.h HINTS ${tessera_cuda_roots} PATH_SUFFIXES include)
  find_path(TESSERA_NCCL_INCLUDE nccl.h HINTS ${tessera_site_packages}/nvidia/nccl/include)
  find_program(TESSERA_NVCC nvcc HINTS ${tessera_cuda_roots} PATH_SUFFIXES bin)
  if(TESSERA_CUDA_INCLUDE AND TESSERA_NCCL_INCLUDE AND TARGET tessera::torch_cuda)
    set(TESSERA_HAVE_CUDA ON)
    add_library(tessera_cuda_headers INTERFACE)
    target_include_directories(tessera_cuda_headers SYSTEM INTERFACE ${TESSERA_CUDA_INCLUDE} ${TESSERA_NCCL_INCLUDE})
  endif()
  if(TESSERA_HAVE_CUDA AND TESSERA_NVCC AND TARGET tessera::cudart)
    set(CMAKE_CUDA_COMPILER ${TESSERA_NVCC})
    # The kernels run on Ampere, Hopper and Blackwell, and on later GPUs by the last one's PTX.
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100)
    endif()
    # The wheels keep their libraries in lib/, where their own nvcc does not look when CMake tries it out.
    get_filename_component(tessera_cuda_root ${TESSERA_NVCC} DIRECTORY)
    get_filename_component(tessera_cuda_root ${tessera_cuda_root} DIRECTORY)
    if(EXISTS ${tessera_cuda_root}/lib/libcudart_static.a)
      set(ENV{LIBRARY_PATH} "${tessera_cuda_root}/lib:$ENV{LIBRARY_PATH}")
    endif()
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      set(CMAKE_CUDA_STANDARD 20)
      set(CMAKE_CUDA_STANDARD_REQUIRED ON)
      set(CMAKE_CUDA_RUNTIME_LIBRARY None)  # tessera::cudart, not one more
      set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
      list(REMOVE_ITEM CMAKE_CUDA_COMPILER_LAUNCHER CCACHE_DEPEND=1)  # it is for the lists that g++ and Clang write
      enable_language(CUDA)
      set(TESSERA_HAVE_NVCC ON)
    endif()
  endif()
  if(TESSERA_CUDA STREQUAL "ON" AND NOT (TESSERA_HAVE_CUDA AND TESSERA_HAVE_NVCC))
    message(FATAL_ERROR "TESSERA_CUDA=ON, but the CUDA toolkit (${TESSERA_CUDA_INCLUDE}), NCCL's header "
      "(${TESSERA_NCCL_INCLUDE}), LibTorch's CUDA library or a working nvcc (${TESSERA_NVCC}) was not found. "
      "scripts/setup installs all four.")
  endif()
endif()
message(STATUS "CUDA parts: ${TESSERA_HAVE_CUDA}, kernels: ${TESSERA_HAVE_NVCC}")

# tessera_load_cuda_late(<program>): links a program so that it starts without LibTorch's library for GPUs, which takes longer to load than
# the rest of LibTorch. Where there is a GPU, the program loads it by itself (load_gpu_libraries in runtime/comm/device/gpus.h).
#
# The functions of that library which the program calls have to be in some library that it is linked with. Here they are in one that has
# their names alone, and calls itself libdl, which every process has: the loader finds each function at its first call, in what is loaded
# by then. The real library comes behind --as-needed, and the linker leaves it out, since nothing is missing any more.
function(tessera_load_cuda_late program)
  if(NOT TESSERA_HAVE_CUDA)
    return()
  endif()
  if(NOT TARGET tessera_cuda_names)
    set(script ${PROJECT_SOURCE_DIR}/cmake/cuda_names.sh)
    set(library ${TESSERA_TORCH_ROOT}/lib/libtorch_cuda.so)
    set(names ${CMAKE_CURRENT_BINARY_DIR}/tessera_cuda_names.cc)
    add_custom_command(OUTPUT ${names} COMMAND sh ${script} ${CMAKE_NM} ${library} ${names} DEPENDS ${script} ${library} VERBATIM)
    add_library(tessera_cuda_names SHARED ${names})
    set_target_properties(tessera_cuda_names PROPERTIES NO_SONAME ON)
    target_link_options(tessera_cuda_names PRIVATE -Wl,-soname,libdl.so.2)
  endif()
  target_link_options(${program} PRIVATE -Wl,-z,lazy)
  target_link_libraries(${program} PRIVATE tessera_cuda_names -Wl,${TESSERA_TORCH_ROOT}/lib/libtorch_cpu.so -Wl,--as-needed)
endfunction()
