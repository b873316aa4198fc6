#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <span>

#include "sharding/layout/shapes.h"
#include "tessera/dtype.h"

namespace tessera {

/// Replaces `matrix` [rows * columns, row by row] approximately by the nearest matrix with orthonormal rows
/// (orthonormal columns, if it has more rows than columns). A matrix U S V^T becomes U S' V^T, with all of S' near 1.
/// The function runs a Newton-Schulz iteration of degree 5 (Jordan et al., 2024, with their coefficients):
///
///   X = matrix / |matrix|;   `steps` times: X = a X + (b A + c A A) X,  A = X X^T
///
/// The iteration is computed in `dtype`, fp32 or bf16; the norm is computed in fp32. Products of fp32 on a GPU follow
/// LibTorch's setting (TF32 if the program allows it). `work` begins on a cache line. It has room for twice the matrix
/// and twice the square of its shorter side, each in fp32 and rounded up to whole cache lines. A matrix of zeros stays
/// zero. Ranks with the same number of threads get the same bits. `matrix` and `work` lie on `device`; if work is
/// queued, the host does not wait.
void orthogonalize(float* matrix, MatrixShape shape, std::int64_t steps, std::span<float> work,
                   DType dtype = DType::kF32, c10::Device device = c10::Device(c10::kCPU));

}  // namespace tessera
