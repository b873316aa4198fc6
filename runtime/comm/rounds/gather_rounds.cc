#include "runtime/comm/rounds/gather_rounds.h"

#include <algorithm>

namespace tessera {
namespace {

/// Returns `count` slices that begin with slice `first`, cyclically.
std::vector<SliceMessage> cyclic_run(int peer, int first, int count, int ranks) {
  const int before_end = std::min(count, ranks - first);
  std::vector<SliceMessage> messages = {
      {.peer = peer, .first = static_cast<std::size_t>(first), .count = static_cast<std::size_t>(before_end)}};
  if (before_end < count)
    messages.push_back({.peer = peer, .first = 0, .count = static_cast<std::size_t>(count - before_end)});
  return messages;
}

}  // namespace

Rounds ring_gather(int rank, int ranks) {
  const int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
  Rounds rounds;
  for (int i = 0; i + 1 < ranks; ++i) {
    const int sent = (rank + ranks - i) % ranks, received = (previous + ranks - i) % ranks;
    rounds.push_back({.sends = cyclic_run(next, sent, 1, ranks), .receives = cyclic_run(previous, received, 1, ranks)});
  }
  return rounds;
}

Rounds doubling_gather(int rank, int ranks) {
  Rounds rounds;
  for (int held = 1; held < ranks; held *= 2) {
    const int count = std::min(held, ranks - held);
    const int before = (rank + ranks - held) % ranks, after = (rank + held) % ranks;
    rounds.push_back(
        {.sends = cyclic_run(before, rank, count, ranks), .receives = cyclic_run(after, after, count, ranks)});
  }
  return rounds;
}

}  // namespace tessera
