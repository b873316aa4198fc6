#pragma once

#include <cstddef>
#include <functional>
#include <string_view>

#include "runtime/comm/call.h"

namespace tessera {

/// How a collective goes over a network. Results have the same bits whichever it is (collectives.h rule 3).
enum class Algorithm {
  kDirect,  ///< every rank sends every other rank what that one wants
  kRing,    ///< all_gather: gather_rounds.h
  kDoubling,  ///< all_gather, and all_reduce of at most kDoublingBytes, which is then such a gather and a sum on every rank
  kHalving,  ///< reduce_scatter and all_reduce: halving_rounds.h
};
std::string_view name_of(Algorithm algorithm);

/// An all_reduce of so many bytes of each rank's input, or fewer, may be a gather and a sum on every rank.
constexpr std::size_t kDoublingBytes = 64 << 10;

/// Whether there is such a way of `operation`, where each rank gives `bytes`: its shard of all_gather, its input of a reduction.
bool has_algorithm(Operation operation, Algorithm algorithm, std::size_t bytes);

/// Whether operations like this have algorithms to choose among: all_gather, reduce_scatter and all_reduce.
bool has_choice(Operation operation);

/// The algorithm of a call of `ranks` ranks in which each gives `bytes` (as in has_algorithm) of elements of `dtype`. The same on all ranks
/// of a group: ranks that choose differently wait for each other until the time limit. One that the call does not have stands for kDirect.
/// Called by every thread that makes calls of a group, perhaps at the same time.
using ChooseAlgorithm = std::function<Algorithm(Operation operation, int ranks, DType dtype, std::size_t bytes)>;

}  // namespace tessera
