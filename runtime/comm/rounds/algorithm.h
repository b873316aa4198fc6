#pragma once

#include <cstddef>
#include <functional>
#include <string_view>

#include "runtime/comm/call.h"

namespace tessera {

/// The algorithms of a collective over a network. Results have the same bits with every algorithm (collectives.h rule
/// 3).
enum class Algorithm {
  kDirect,    ///< every rank sends each other rank the data that the other rank needs
  kRing,      ///< all_gather: gather_rounds.h
  kDoubling,  ///< all_gather, and all_reduce of at most kDoublingBytes (a gather, then a sum on every rank)
  kHalving,   ///< reduce_scatter and all_reduce: halving_rounds.h
};
/// Returns the name that messages and files of costs use, such as "ring".
std::string_view name_of(Algorithm algorithm);

/// Largest input of a rank, in bytes, for which an all_reduce may be a gather and a sum on every rank.
constexpr std::size_t kDoublingBytes = 64 << 10;

/// Returns whether `operation` can use `algorithm` if each rank gives `bytes` (its shard of an all_gather, its input of
/// a reduction).
bool has_algorithm(Operation operation, Algorithm algorithm, std::size_t bytes);

/// Returns whether an operation has algorithms to choose from, as all_gather, reduce_scatter and all_reduce have.
bool has_choice(Operation operation);

/// Chooses the algorithm of a call of `ranks` ranks. Each rank gives `bytes` (as in has_algorithm) of elements of
/// `dtype`. The result must be the same on all ranks of a group: ranks that choose differently wait for each other
/// until the time limit. If the call does not have the algorithm, kDirect is used. Every thread that makes calls of a
/// group calls this function, perhaps at the same time.
using ChooseAlgorithm = std::function<Algorithm(Operation operation, int ranks, DType dtype, std::size_t bytes)>;

}  // namespace tessera
