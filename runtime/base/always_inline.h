#pragma once

/// Forces a helper into each of its per-instruction-set callers; otherwise it would be compiled once, for the oldest.
/// CUDA's compiler makes one for the GPU, too.
#if defined(__CUDACC__)
#define TESSERA_ALWAYS_INLINE __host__ __device__ __forceinline__
#else
#define TESSERA_ALWAYS_INLINE inline __attribute__((always_inline))
#endif
