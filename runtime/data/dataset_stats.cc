#include "runtime/data/dataset_stats.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "runtime/base/status.h"

namespace tessera {
namespace {

/// Counts tokens: small numbers in a table, and all other tokens in a map (a corrupt file may have any number).
class Histogram {
 public:
  void add(std::int64_t token) {
    if (token >= 0 && token < kTable)
      ++table_[static_cast<std::size_t>(token)];
    else
      ++rest_[token];
  }

  double entropy(std::int64_t total) const {
    double sum = 0;
    const auto term = [&](std::int64_t count) {
      const double share = static_cast<double>(count) / static_cast<double>(total);
      if (count > 0) sum -= share * std::log(share);
    };
    for (const std::int64_t count : table_) term(count);
    for (const auto& [token, count] : rest_) term(count);
    return sum;
  }

 private:
  static constexpr std::int64_t kTable = 1 << 18;  // tokens from this number on are counted in `rest_`
  std::vector<std::int64_t> table_ = std::vector<std::int64_t>(kTable);
  std::map<std::int64_t, std::int64_t> rest_;
};

}  // namespace

absl::Status check_tokens(const TokenDataset& dataset, std::int64_t begin, std::span<const std::int64_t> tokens,
                          std::int64_t vocab_size) {
  const auto limit = static_cast<std::uint64_t>(vocab_size);
  const auto wrong = std::find_if(tokens.begin(), tokens.end(),
                                  [&](std::int64_t token) { return static_cast<std::uint64_t>(token) >= limit; });
  if (wrong == tokens.end()) return absl::OkStatus();
  const std::int64_t position = begin + (wrong - tokens.begin());
  return make_error(ExitCode::kCorruptData,
                    fmt::format("{}: token {} is {}, outside of the vocabulary of {}. [T0570] hint: give the model the "
                                "tokenizer's vocabulary size, or make the data with the model's tokenizer",
                                dataset.location_of(position), position, *wrong, vocab_size));
}

absl::StatusOr<double> unigram_entropy(const TokenDataset& dataset) {
  constexpr std::int64_t kRun = 1 << 16;
  std::vector<std::int64_t> buffer(static_cast<std::size_t>(std::min(kRun, dataset.num_tokens())));
  Histogram histogram;
  for (std::int64_t begin = 0; begin < dataset.num_tokens(); begin += kRun) {
    const auto n = static_cast<std::size_t>(std::min(kRun, dataset.num_tokens() - begin));
    const auto tokens = std::span(buffer).first(n);
    TESSERA_RETURN_IF_ERROR(dataset.copy(begin, tokens));
    for (const std::int64_t token : tokens) histogram.add(token);
  }
  return histogram.entropy(dataset.num_tokens());
}

}  // namespace tessera
