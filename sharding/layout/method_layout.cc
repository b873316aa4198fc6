#include "sharding/layout/method_layout.h"

#include <algorithm>

#include "runtime/base/message_words.h"
#include "sharding/layout/matrix_deal.h"

namespace tessera {
namespace {

std::int64_t in_lines(std::int64_t numel) { return MatrixDeal::in_whole_lines(numel); }

/// First come the messages to each owner and from each rank, then the sums that this rank makes.
MethodMemory one_bit_memory(std::int64_t numel, int ranks, bool has_momentum) {
  const std::int64_t part = owned_by_each(numel, ranks);
  const std::int64_t messages = 2 * ranks * owner_message_words(MethodKind::kOneBit, numel, ranks);
  return {(has_momentum ? 2 : 1) * in_lines(numel) + in_lines(part), in_lines(messages) + in_lines(part)};
}

}  // namespace

MethodKind method_kind(const CompressionConfig& compression) {
  if (compression.power_sgd_rank > 0) return MethodKind::kPowerSgd;
  if (compression.top_k > 0) return MethodKind::kTopK;
  if (compression.random_k > 0) return MethodKind::kRandomK;
  if (compression.sign == SignForm::kMajority) return MethodKind::kMajority;
  if (compression.sign == SignForm::kFeedback) return MethodKind::kSignFeedback;
  if (compression.one_bit) return MethodKind::kOneBit;
  return levels_of(compression) > 0 ? MethodKind::kLevels : MethodKind::kNone;
}

std::int64_t owned_by_each(std::int64_t numel, int ranks) {
  return (message_runs(numel) + ranks - 1) / ranks * static_cast<std::int64_t>(kMessageRun);
}

Extent owned_by(int rank, std::int64_t numel, int ranks) {
  const std::int64_t each = owned_by_each(numel, ranks), begin = std::min(rank * each, numel);
  return {begin, std::min(each, numel - begin)};
}

std::int64_t levels_of(const CompressionConfig& compression) {
  return compression.terngrad ? 1 : compression.qsgd_levels;
}

std::int64_t owner_message_words(MethodKind kind, std::int64_t numel, int ranks) {
  const std::int64_t each = owned_by_each(numel, ranks);
  return kind == MethodKind::kMajority ? vote_words(each) : scaled_sign_words(each);
}

MethodMemory method_memory(const CompressionConfig& compression, const GroupShape& group, int ranks) {
  const std::int64_t numel = group.layout.numel();
  const MethodKind kind = method_kind(compression);
  switch (kind) {
    case MethodKind::kNone:
      return {};
    case MethodKind::kPowerSgd:
      return power_sgd_memory(group, compression.power_sgd_rank);
    case MethodKind::kTopK: {
      MethodMemory memory = top_k_memory(group, compression.top_k, ranks);
      if (compression.top_k_momentum > 0) memory.kept *= 2;
      return memory;
    }
    case MethodKind::kRandomK:
      return {in_lines(numel), in_lines(2 * count_of_largest(group, compression.random_k))};
    case MethodKind::kMajority:
      return {0, in_lines(2 * ranks * owner_message_words(kind, numel, ranks))};
    case MethodKind::kSignFeedback:
      return {in_lines(numel), in_lines((ranks + 1) * scaled_sign_words(numel))};
    case MethodKind::kOneBit:
      return one_bit_memory(numel, ranks, compression.one_bit_momentum > 0);
    case MethodKind::kLevels:
      return {0, in_lines((ranks + 1) * level_words(levels_of(compression), numel))};
  }
  return {};
}

}  // namespace tessera
