#include "engine/loop/same_call.h"

#include <array>
#include <cstring>
#include <map>
#include <vector>

#include "runtime/base/text.h"
#include "runtime/border/throw.h"

namespace tessera {
namespace {

/// The message of a rank: the words of its call, or its problem, with zeros behind them.
struct Announcement {
  char has_problem = 0;
  std::array<char, 255> text{};

  std::string words() const { return {text.data(), ::strnlen(text.data(), text.size())}; }
};
static_assert(sizeof(Announcement) == 256);

Announcement announcement_of(const std::string& call, const std::string& problem) {
  Announcement own;
  own.has_problem = problem.empty() ? 0 : 1;
  const std::string words = problem.empty() ? call : problem;
  std::memcpy(own.text.data(), words.data(), std::min(words.size(), own.text.size()));
  return own;
}

/// Lists each text with its ranks: "rank 0: all_reduce ...; ranks 1-3: barrier".
std::string by_rank(const std::vector<Announcement>& all, bool problems_only) {
  std::map<std::string, std::vector<int>> ranks_of;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].has_problem || !problems_only) ranks_of[all[rank].words()].push_back(static_cast<int>(rank));
  }
  std::vector<std::string> parts;
  for (const auto& [words, ranks] : ranks_of) {
    parts.push_back((ranks.size() > 1 ? "ranks " : "rank ") + number_ranges(ranks) + ": " + words);
  }
  return joined(parts, "; ");
}

}  // namespace

void expect_same_call(Collectives& group, const std::string& call, const std::string& problem) {
  const Announcement own = announcement_of(call, problem);
  std::vector<Announcement> all(static_cast<std::size_t>(group.size()));
  throw_if_error(group.all_gather("what ranks call", &own, all.data(), sizeof own).wait());
  throw_if_error(group.status());
  bool problems = false, equal = true;
  for (const Announcement& each : all) {
    problems = problems || each.has_problem;
    equal = equal && each.text == own.text;
  }
  if (problems) {
    const std::string texts_with_hints = by_rank(all, /*problems_only=*/true);
    throw Error(ExitCode::kUsage, texts_with_hints);
  }
  if (equal) return;
  throw Error(ExitCode::kUsage, "ranks called different collectives, where all must make the same call: " +
                                    by_rank(all, /*problems_only=*/false) +
                                    ". [T0202] hint: call it on every rank, with tensors of one shape and dtype");
}

}  // namespace tessera
