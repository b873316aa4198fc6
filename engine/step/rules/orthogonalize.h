#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <span>

#include "sharding/layout/shapes.h"
#include "tessera/dtype.h"

namespace tessera {

/// Replaces `matrix` [rows * columns, row by row] by about the nearest matrix with orthonormal rows (or columns, where
/// it has more rows): for U S V^T by U S' V^T with all of S' near 1. It runs a Newton-Schulz iteration of degree 5
/// (Jordan et al., 2024, with their coefficients):
///
///   X = matrix / |matrix|;   `steps` times: X = a X + (b A + c A A) X,  A = X X^T
///
/// in `dtype`, fp32 or bf16 (the norm in fp32); products of fp32 on a GPU are as LibTorch's setting says (TF32 where a
/// program allows it). `work` begins on a cache line and has room for the matrix twice and for the square of its
/// shorter side twice, each in fp32 and rounded up to whole cache lines. A matrix of zeros stays zero. Ranks with the
/// same number of threads get the same bits. `matrix` and `work` lie on `device`; where work is queued, the host does
/// not wait.
void orthogonalize(float* matrix, MatrixShape shape, std::int64_t steps, std::span<float> work,
                   DType dtype = DType::kF32, c10::Device device = c10::Device(c10::kCPU));

}  // namespace tessera
