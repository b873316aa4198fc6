#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// What a rank that waits for others says of itself: the calls that it waits in, and how far it has come in each of its groups.
struct WaitReport {
  /// A call of a group that the rank has begun and not got through. Number 0 is the making of the group.
  struct Wait {
    std::string group;
    std::uint64_t call = 0;
    int thread = 0;    ///< of the program, which is in the call; numbered by the rank
    std::string text;  ///< "all_gather 'blocks.3' of 4096 bytes (#12)"
  };
  struct Group {
    int first = 0, count = 0, stride = 1;  ///< world ranks: first, first + stride, ...
    std::string family;                    ///< groups that one owner calls, one call at a time: those of an Engine
    std::uint64_t begun = 0;               ///< calls, from 1
    std::vector<int> threads;              ///< that have made calls of it
    bool is_outside = false;  ///< of another library (OutsideCalls): who says nothing of it may have begun any call
    std::map<std::uint64_t, std::string> latest;  ///< of the calls begun
    bool has(int rank) const {
      return rank >= first && (rank - first) % stride == 0 && (rank - first) / stride < count;
    }
  };

  int rank = 0;
  std::vector<Wait> waits;
  std::map<std::string, Group> groups;  ///< by a name that is unique together with the ranks

  /// As the store keeps it. The same content is the same text.
  std::string to_text() const;
  /// Empty where the text is of something else, or empty.
  static std::optional<WaitReport> from_text(const std::string& text);
};

/// "" or, in words, the calls and the ranks that prove that ranks do not make the same calls in the same order. Proofs are:
///
/// 1. one rank waits in a call of a group, and another's call of that group and number is a different one;
/// 2. ranks wait for each other in a ring: each in a call that the next one has not begun, and the thread that would begin it waits too.
///
/// Where the group is outside, only a rank that says how far it has come in it can lack a call. Nothing else is one: a rank whose thread computes may begin the call yet, and a call that all have begun may be under way. Neither are
/// calls of threads that never made calls of one group, since those have no order. A report that is old proves as much as a new one, as a
/// rank waits until the others have begun its call.
std::string disagreement_of(const std::vector<WaitReport>& reports);

}  // namespace tessera
