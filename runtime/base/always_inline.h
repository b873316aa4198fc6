#pragma once

/// Forces the compiler to inline a helper into each of its callers. The callers are compiled for several instruction
/// sets. The helper would otherwise be compiled once, for the oldest set. CUDA's compiler makes a version for the GPU
/// too.
#if defined(__CUDACC__)
#define TESSERA_ALWAYS_INLINE __host__ __device__ __forceinline__
#else
#define TESSERA_ALWAYS_INLINE inline __attribute__((always_inline))
#endif
