#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "tessera/mesh.h"

namespace tessera {

/// What ranks of a program tell each other beside training: metrics, flags, results of an evaluation.
///
///   double accuracy = tessera::mean_over_ranks(mesh, right / seen, seen);  // each rank saw another number of samples
///   bool stop = tessera::all_reduce(mesh, patience_is_over, tessera::Reduce::kMax);
///   tessera::barrier(mesh);
///
/// Every function here is collective: all ranks of the mesh call it, in the same order, with tensors of equal shapes and
/// dtypes. They have a group of communication of their own, so they may stand anywhere between an Engine's calls, but
/// one thread at a time uses them.
///
/// Before anything is moved, ranks tell each other what they call. Where calls differ (another function, shape, dtype,
/// operation or root), or one rank's arguments make no sense, every rank throws tessera::Error (64), which shows each call
/// with its ranks; nothing has been moved, and the program can go on. A rank that is gone, or does not come within
/// comm.timeout_s: Error (75).
///
/// Tensors may lie on any device and need not be contiguous; those of a GPU are copied over the host, which is meant for
/// metrics, not for training. Dtypes: fp64, fp32, bf16, fp16, all signed integers and uint8, bool. Sparse, quantised and
/// complex tensors are refused. Gradients do not flow through any of this.

enum class Reduce {
  kSum,   ///< not of bool. bf16 and fp16 are added in fp32 and rounded once; integers are added in their own dtype
  kMean,  ///< the sum divided by the number of ranks; of floating point
  kMin,
  kMax,  ///< of bool: true if it is so on any rank
};

/// Replaces `tensor` by the sum (mean, ...) over all ranks, which has the same bits on every rank. Sums are made in
/// pairwise order (0+1, 2+3, ..., then those), whatever the transport.
void all_reduce(const Mesh& mesh, const at::Tensor& tensor, Reduce operation = Reduce::kSum);

/// The tensor of each rank, in rank order.
std::vector<at::Tensor> all_gather(const Mesh& mesh, const at::Tensor& tensor);

/// Replaces `tensor` by that of rank `root`.
void broadcast(const Mesh& mesh, const at::Tensor& tensor, int root = 0);

/// Returns when all ranks have called it.
void barrier(const Mesh& mesh);

/// The string of each rank, in rank order: any bytes, of any length.
std::vector<std::string> all_gather(const Mesh& mesh, const std::string& own);
/// That of rank `root`; what the other ranks give does not count.
std::string broadcast(const Mesh& mesh, const std::string& text, int root = 0);

/// Numbers: floating point travels as double, all else as std::int64_t.
double all_reduce_number(const Mesh& mesh, double value, Reduce operation);
std::int64_t all_reduce_number(const Mesh& mesh, std::int64_t value, Reduce operation);

template <class Number, class = std::enable_if_t<std::is_arithmetic_v<Number>>>
[[nodiscard]] Number all_reduce(const Mesh& mesh, Number value, Reduce operation = Reduce::kSum) {
  using Wide = std::conditional_t<std::is_floating_point_v<Number>, double, std::int64_t>;
  return static_cast<Number>(all_reduce_number(mesh, static_cast<Wide>(value), operation));
}

/// The mean of a metric over the samples of all ranks: `mean` is this rank's, over `count` samples. A rank with a count of 0
/// does not count, whatever its mean is. Error (64) on all ranks if a count is negative or all are 0.
[[nodiscard]] double mean_over_ranks(const Mesh& mesh, double mean, std::int64_t count = 1);
/// The same for several metrics of the same samples in one call.
[[nodiscard]] std::vector<double> mean_over_ranks(const Mesh& mesh, const std::vector<double>& means,
                                                  std::int64_t count = 1);

}  // namespace tessera
