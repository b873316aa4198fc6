#include "sharding/layout/method_layout.h"

#include <algorithm>
#include <utility>

#include "runtime/base/message_words.h"
#include "sharding/layout/matrix_deal.h"

namespace tessera {
namespace {

std::int64_t in_lines(std::int64_t numel) { return MatrixDeal::in_whole_lines(numel); }

/// The layout in which each rank has its own message, and the messages of all ranks.
MethodLayout gathered(std::int64_t kept, std::int64_t words, int ranks) {
  return {{kept, in_lines((ranks + 1) * words)}, {{Exchange::kAllGather, words}}};
}

/// The layout in which each rank has what it sends to each owner, and what it gets from each rank.
MethodLayout by_owners(std::int64_t kept, std::int64_t words, int ranks) {
  return {{kept, in_lines(2 * ranks * words)}, {{Exchange::kOwners, words}}};
}

MethodLayout layout_of(const NoMethodConfig&, const GroupShape&, int) { return {}; }

MethodLayout layout_of(const PowerSgdConfig& method, const GroupShape& group, int) {
  const FactorLayout factors(group, method.rank);
  if (factors.tensors().empty()) return {};
  return {{factors.second_begin() + in_lines(factors.second_numel()), in_lines(factors.first_numel())},
          {{Exchange::kAllReduce, factors.first_numel()}, {Exchange::kAllReduce, factors.second_numel()}}};
}

MethodLayout layout_of(const TopKConfig& method, const GroupShape& group, int ranks) {
  const std::int64_t kept = in_lines(group.layout.numel());
  return gathered(method.momentum > 0 ? 2 * kept : kept, 2 * count_of(group, method.fraction), ranks);
}

/// Places lie behind the values, and stay here.
MethodLayout layout_of(const RandomKConfig& method, const GroupShape& group, int) {
  const std::int64_t count = count_of(group, method.fraction);
  return {{in_lines(group.layout.numel()), in_lines(2 * count)}, {{Exchange::kAllReduce, count}}};
}

MethodLayout layout_of(const SignMajorityConfig&, const GroupShape& group, int ranks) {
  return by_owners(0, vote_words(owned_by_each(group.layout.numel(), ranks)), ranks);
}

MethodLayout layout_of(const SignFeedbackConfig&, const GroupShape& group, int ranks) {
  return gathered(in_lines(group.layout.numel()), scaled_sign_words(group.layout.numel()), ranks);
}

/// The sums that this rank makes lie behind the messages; what the sent sums lacked is kept, too.
MethodLayout layout_of(const OneBitConfig& method, const GroupShape& group, int ranks) {
  const std::int64_t numel = group.layout.numel(), part = owned_by_each(numel, ranks);
  MethodLayout layout =
      by_owners((method.momentum > 0 ? 2 : 1) * in_lines(numel) + in_lines(part), scaled_sign_words(part), ranks);
  layout.memory.work += in_lines(part);
  return layout;
}

MethodLayout levels_layout(std::int64_t levels, const GroupShape& group, int ranks) {
  return gathered(0, level_words(levels, group.layout.numel()), ranks);
}
MethodLayout layout_of(const QsgdConfig& method, const GroupShape& group, int ranks) {
  return levels_layout(method.levels, group, ranks);
}
MethodLayout layout_of(const TernGradConfig&, const GroupShape& group, int ranks) {
  return levels_layout(1, group, ranks);
}

MethodLayout layout_of(const CommHookConfig&, const GroupShape&, int) { return {}; }

}  // namespace

MethodLayout method_layout(const CompressionMethod& method, const GroupShape& group, int ranks) {
  return std::visit([&](const auto& each) { return layout_of(each, group, ranks); }, method);
}

std::int64_t MethodLayout::wire_bytes(int ranks) const {
  std::int64_t words = 0;
  for (const MethodMessage& message : messages)
    words += message.words * (message.exchange == Exchange::kOwners ? ranks : 1);
  return 4 * words;
}

std::int64_t owned_by_each(std::int64_t numel, int ranks) {
  return (message_runs(numel) + ranks - 1) / ranks * static_cast<std::int64_t>(kMessageRun);
}

Extent owned_by(int rank, std::int64_t numel, int ranks) {
  const std::int64_t each = owned_by_each(numel, ranks), begin = std::min(rank * each, numel);
  return {begin, std::min(each, numel - begin)};
}

}  // namespace tessera
