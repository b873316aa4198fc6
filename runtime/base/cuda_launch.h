#pragma once

#include <cuda_runtime_api.h>

// If a compiler other than CUDA's reads a kernel's source, the file that includes the source defines these functions
// itself. Tests do so to run kernels on the host (tests/support/stand_ins/cuda_on_host.h).
#if defined(__CUDACC__)

namespace tessera::cuda {

/// Starts `kernel` on `blocks` thread blocks of `threads` threads each; returns CUDA's error.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, cudaStream_t stream,
                   Arguments... arguments) {
  kernel<<<blocks, threads, 0, stream>>>(arguments...);
  return cudaGetLastError();
}

/// Sets `count` to the number of streaming multiprocessors of the current device; returns CUDA's error.
inline cudaError_t multiprocessors(int& count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error != cudaSuccess ? error : cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace tessera::cuda

#endif
