# Decides which CUDA parts are built.
#
#   TESSERA_HAVE_CUDA   the toolkit's and NCCL's headers and LibTorch's CUDA library exist: the nccl transport.
#                       The headers are tessera_cuda_headers.
#   TESSERA_HAVE_NVCC   there is also a compiler that works: the kernels.
#
# TESSERA_CUDA=AUTO builds the parts that can be built, and ON demands both.
set(TESSERA_HAVE_CUDA OFF)
set(TESSERA_HAVE_NVCC OFF)
set(TESSERA_CUDA_KERNELS "" CACHE INTERNAL "kinds of GPUs that have kernels, for scripts/wheel")
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
    # The kernels are compiled for Ampere, Hopper and Blackwell. Later GPUs run the PTX of the last of these.
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100)
    endif()
    # The wheels have their libraries in lib/, where their own nvcc does not look when CMake tries it out.
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
      enable_language(CUDA)
      set(TESSERA_HAVE_NVCC ON)
      set(TESSERA_CUDA_KERNELS "${CMAKE_CUDA_ARCHITECTURES}" CACHE INTERNAL "kinds of GPUs that have kernels, for scripts/wheel")
    endif()
  endif()
  if(TESSERA_CUDA STREQUAL "ON" AND NOT (TESSERA_HAVE_CUDA AND TESSERA_HAVE_NVCC))
    message(FATAL_ERROR "TESSERA_CUDA=ON, but the CUDA toolkit (${TESSERA_CUDA_INCLUDE}), NCCL's header "
      "(${TESSERA_NCCL_INCLUDE}), LibTorch's CUDA library or a working nvcc (${TESSERA_NVCC}) was not found. "
      "scripts/setup installs all four.")
  endif()
endif()
message(STATUS "CUDA parts: ${TESSERA_HAVE_CUDA}, kernels: ${TESSERA_HAVE_NVCC}")
