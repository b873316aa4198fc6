# Decides whether the CUDA parts are built, and offers their headers as tessera::cuda.
# AUTO builds them where the toolkit's headers, NCCL's header and LibTorch's CUDA library are all found.
set(TESSERA_HAVE_CUDA OFF)
if(NOT TESSERA_CUDA STREQUAL "OFF")
  get_filename_component(tessera_site_packages ${TESSERA_TORCH_ROOT} DIRECTORY)
  find_path(TESSERA_CUDA_INCLUDE cuda_runtime_api.h
    HINTS $ENV{CUDA_HOME}/include /usr/local/cuda/include ${tessera_site_packages}/nvidia/cu13/include)
  find_path(TESSERA_NCCL_INCLUDE nccl.h HINTS ${tessera_site_packages}/nvidia/nccl/include)
  if(TESSERA_CUDA_INCLUDE AND TESSERA_NCCL_INCLUDE AND TARGET tessera::torch_cuda)
    set(TESSERA_HAVE_CUDA ON)
    add_library(tessera_cuda_headers INTERFACE)
    target_include_directories(tessera_cuda_headers SYSTEM INTERFACE ${TESSERA_CUDA_INCLUDE} ${TESSERA_NCCL_INCLUDE})
  elseif(TESSERA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "TESSERA_CUDA=ON, but the CUDA toolkit (${TESSERA_CUDA_INCLUDE}), NCCL's header "
      "(${TESSERA_NCCL_INCLUDE}) or LibTorch's CUDA library was not found. scripts/setup installs all three.")
  endif()
endif()
message(STATUS "CUDA parts: ${TESSERA_HAVE_CUDA}")
