#include "runtime/comm/rounds/link_fit.h"

#include <fmt/format.h>

#include <map>
#include <memory>
#include <tuple>

#include "runtime/base/mutex.h"

namespace tessera {
namespace {

/// Choices that were made, by call.
struct Chosen {
  Mutex mutex;
  std::map<std::tuple<Operation, int, DType, std::size_t>, Algorithm> algorithms ABSL_GUARDED_BY(mutex);
};

}  // namespace

std::string text_of(const LinkFit& fit) {
  return fmt::format("a round costs {:.1f} us, a message {:.1f} us, a GB {:.3f} s, 1e9 additions {:.3f} s",
                     fit.round_s * 1e6, fit.message_s * 1e6, fit.byte_s * 1e9, fit.add_s * 1e9);
}

Algorithm choose(Operation operation, int ranks, DType dtype, std::size_t bytes, const LinkFit& fit) {
  Algorithm best = Algorithm::kDirect;
  if (ranks < 2 || bytes == 0 || !has_choice(operation)) return best;
  double least = fit.seconds_of(work_of(operation, best, ranks, dtype, bytes));
  for (const Algorithm other : {Algorithm::kRing, Algorithm::kDoubling, Algorithm::kHalving}) {
    if (!has_algorithm(operation, other, bytes)) continue;
    const double seconds = fit.seconds_of(work_of(operation, other, ranks, dtype, bytes));
    if (seconds >= least) continue;
    best = other;
    least = seconds;
  }
  return best;
}

ChooseAlgorithm choose_by(const LinkFit& fit) {
  return [fit, chosen = std::make_shared<Chosen>()](Operation operation, int ranks, DType dtype, std::size_t bytes) {
    const MutexLock lock(chosen->mutex);
    const auto [at, is_new] = chosen->algorithms.try_emplace({operation, ranks, dtype, bytes}, Algorithm::kDirect);
    if (is_new) at->second = choose(operation, ranks, dtype, bytes, fit);
    return at->second;
  };
}

}  // namespace tessera
