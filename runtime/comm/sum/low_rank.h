#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera {

/// The shape of a matrix [rows, columns], fp32, stored row by row. PowerSGD approximates the matrix by the product of
/// two factors of `rank` columns each: left [rank, rows] and right [rank, columns]. Each column of a factor is
/// contiguous. PowerSGD uses the loops of this file.
///
/// No function here fuses multiply and add, and the order of additions depends only on the sizes, so bits are the same
/// on all processors.
struct LowRankShape {
  std::size_t rows = 0, columns = 0, rank = 0;
};

/// Computes kept += matrix and left = kept x right.
void add_and_project(const float* matrix, float* kept, const float* right, float* left, const LowRankShape& shape);

/// Computes right = matrix^T x left.
void project_back(const float* matrix, const float* left, float* right, const LowRankShape& shape);

/// Computes matrix = left x right^T and kept -= matrix * share.
void expand(const float* left, const float* right, float share, float* matrix, float* kept, const LowRankShape& shape);

/// Makes the columns of `factor` [rank, numel] orthonormal, one after the other (Gram-Schmidt, twice for each column,
/// with products in fp64). A column that vanishes becomes zeros. A column of which only rounding errors are left is
/// normalised like any other.
void orthonormalize(float* factor, std::size_t rank, std::size_t numel);

/// Fills the columns of `factor` [rank, numel] that are zeros with numbers between -1 and 1. The numbers depend only on
/// `number`, the column and the index in the column.
void draw_missing(std::int64_t number, float* factor, std::size_t rank, std::size_t numel);

}  // namespace tessera
