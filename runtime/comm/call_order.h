#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// The report of a rank that waits for other ranks: the calls in which it waits, and how far it is in each of its
/// groups. CallWatch writes it to the store and reads other ranks' reports.
struct WaitReport {
  /// A call of a group that the rank has begun and not finished. Number 0 means that the rank makes the group.
  struct Wait {
    std::string group;
    std::uint64_t call = 0;
    int thread = 0;    ///< the program's thread that is in the call; the rank numbers its threads
    std::string text;  ///< "all_gather 'blocks.3' of 4096 bytes (#12)"
  };
  struct Group {
    int first = 0, count = 0, stride = 1;  ///< world ranks: first, first + stride, ...
    /// name shared by groups that one owner calls, one call at a time: an Engine's groups
    std::string family;
    std::uint64_t begun = 0;   ///< number of the group's calls that were begun; the first is 1
    std::vector<int> threads;  ///< threads that have made calls of the group
    /// a group of another library (OutsideCalls): a rank that does not report it may have begun any call
    bool is_outside = false;
    std::map<std::uint64_t, std::string> latest;  ///< texts of the latest calls begun, by number
    bool has(int rank) const {
      return rank >= first && (rank - first) % stride == 0 && (rank - first) / stride < count;
    }
  };

  int rank = 0;
  bool has_ended = false;  ///< whether the rank's program has ended, and so begins no more calls; if so, `waits` is
                           ///< empty
  std::vector<Wait> waits;
  std::map<std::string, Group> groups;  ///< key: group name, unique together with the ranks

  /// Returns the text that is written to the store. Equal reports have equal texts.
  std::string to_text() const;
  /// Returns nothing if the text is empty, or if it is not a report.
  static std::optional<WaitReport> from_text(const std::string& text);
};

/// Looks for a proof that ranks do not make the same calls in the same order. Returns a text that names the calls and
/// ranks of the proof, or "" if there is none. There are three kinds of proofs:
///
/// 1. One rank waits in a call of a group, and another rank's call of that group and number is a different call.
/// 2. One rank waits in a call that another rank has not begun, and that rank's program has ended.
/// 3. Ranks wait for each other in a ring: each is in a call that the next one has not begun, and the thread that would
///    begin this call waits too.
///
/// Nothing else is a proof: a rank whose thread computes may still begin the call, and a call that all ranks have begun
/// may be under way. A rank counts as not having begun a call of another library's group only if it reports how far it
/// is in that group. In a ring, a thread that waits in a call of another group counts only if it has made calls of the
/// first group, or if both groups are of one family: otherwise another thread may begin the call. An old report proves
/// as much as a new one, since a rank waits until the other ranks have begun the call.
std::string disagreement_of(const std::vector<WaitReport>& reports);

}  // namespace tessera
