#include "sharding/compress/method_layout.h"

#include <algorithm>

#include "runtime/base/message_words.h"
#include "sharding/layout/matrix_deal.h"

namespace tessera {
namespace {

MethodLayout layout_of(const NoMethodConfig&, const GroupShape&, int) { return {}; }

}  // namespace

MethodLayout layout_of(const CommHookConfig&, const GroupShape&, int) { return {}; }

MethodLayout method_layout(const CompressionMethod& method, const GroupShape& group, int ranks) {
  return std::visit([&](const auto& each) { return layout_of(each, group, ranks); }, method);
}

std::int64_t in_lines(std::int64_t numel) { return MatrixDeal::in_whole_lines(numel); }

MethodLayout layout_by_gather(std::int64_t kept, std::int64_t words, int ranks) {
  return {{kept, in_lines((ranks + 1) * words)}, {{Exchange::kAllGather, words}}};
}

MethodLayout layout_by_owners(std::int64_t kept, std::int64_t words, int ranks) {
  return {{kept, in_lines(2 * ranks * words)}, {{Exchange::kOwners, words}}};
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
