#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "tessera/mesh.h"

namespace tessera {

/// Functions that exchange data between the ranks of a program, such as metrics, flags, or results of an evaluation.
///
///   double accuracy = tessera::mean_over_ranks(mesh, right / seen, seen);  // each rank saw another number of samples
///   bool stop = tessera::all_reduce(mesh, patience_is_over, tessera::Reduce::kMax);
///   tessera::barrier(mesh);
///
/// Every function of this header is collective: all ranks of the mesh call it, in the same order, with tensors of equal
/// shapes and dtypes. The functions use a separate communication group, so they may be called anywhere between calls of
/// an Engine. One thread at a time uses them.
///
/// Before any data are sent, ranks compare which functions they call. If calls differ (another function, shape, dtype,
/// operation or root), or if a rank's arguments are invalid, every rank throws tessera::Error (64). The error shows
/// each call with its ranks. In that case no data were sent, and the program can continue. Error (75) means that a rank
/// has ended, or did not make the call within comm.timeout_s.
///
/// Tensors may lie on any device and need not be contiguous. Tensors of a GPU are copied through the host, which is
/// fast enough for metrics but not for training. Dtypes: fp64, fp32, bf16, fp16, all signed integers and uint8, bool.
/// Sparse, quantised and complex tensors are refused. Gradients do not flow through these functions.

/// The ways in which all_reduce combines the ranks' values, element by element.
enum class Reduce {
  /// the sum; not allowed for bool. bf16 and fp16 are added in fp32 and rounded once; integers are added in their own
  /// dtype
  kSum,
  kMean,  ///< the sum divided by the number of ranks; only for floating-point dtypes
  kMin,
  kMax,  ///< the largest value; for bool: true if any rank has true
};

/// Replaces `tensor` (any shape, in place) by the sum, mean, minimum or maximum over all ranks. The result has the same
/// bits on every rank. Sums are made in pairwise order (0+1, 2+3, ..., then the sums of these pairs), whatever the
/// transport.
void all_reduce(const Mesh& mesh, const at::Tensor& tensor, Reduce operation = Reduce::kSum);

/// Returns the tensor of each rank, in rank order: world_size tensors of the shape, dtype and device of `tensor`.
std::vector<at::Tensor> all_gather(const Mesh& mesh, const at::Tensor& tensor);

/// Replaces `tensor`, in place, by the tensor of rank `root`.
void broadcast(const Mesh& mesh, const at::Tensor& tensor, int root = 0);

/// A barrier: returns when all ranks have called it.
void barrier(const Mesh& mesh);

/// Returns the string of each rank, in rank order. Strings hold any bytes and may differ in length.
std::vector<std::string> all_gather(const Mesh& mesh, const std::string& own);
/// Returns the string of rank `root`. The other ranks' `text` is not used.
std::string broadcast(const Mesh& mesh, const std::string& text, int root = 0);

/// Returns the sum, mean, minimum or maximum of the ranks' numbers. Floating-point numbers are sent as double, all
/// others as std::int64_t.
double all_reduce_number(const Mesh& mesh, double value, Reduce operation);
/// Does the same for whole numbers.
std::int64_t all_reduce_number(const Mesh& mesh, std::int64_t value, Reduce operation);

/// Works like all_reduce, for one number of any arithmetic type; the result has the type of `value`.
template <class Number, class = std::enable_if_t<std::is_arithmetic_v<Number>>>
[[nodiscard]] Number all_reduce(const Mesh& mesh, Number value, Reduce operation = Reduce::kSum) {
  using Wide = std::conditional_t<std::is_floating_point_v<Number>, double, std::int64_t>;
  return static_cast<Number>(all_reduce_number(mesh, static_cast<Wide>(value), operation));
}

/// Returns the mean of a metric over the samples of all ranks. `mean` is this rank's mean over `count` samples. The
/// mean of a rank with a count of 0 is ignored. Throws tessera::Error (64) on all ranks if a count is negative, or if
/// all counts are 0.
[[nodiscard]] double mean_over_ranks(const Mesh& mesh, double mean, std::int64_t count = 1);
/// Returns the means of several metrics over the same samples in one call. `means` has the same length on every rank.
[[nodiscard]] std::vector<double> mean_over_ranks(const Mesh& mesh, const std::vector<double>& means,
                                                  std::int64_t count = 1);

}  // namespace tessera
