#pragma once

#include <chrono>
#include <cstddef>

namespace tessera {

/// Decides how a rank writes its mailboxes in calls of many rounds: into its cache, from which peers' cores read the
/// lines, or past the caches. Cores that share a cache pass lines to each other faster than through memory. Between
/// cores of two core complexes or two sockets, a line takes several times as long as from memory. The wrong way takes
/// 1.4 to 2.2 times as long as the right one, as measured on two cores of an AMD Zen 5 server. A rank cannot find out
/// for certain on which cores ranks run, above all in a virtual machine. Both ways are therefore tried now and then, in
/// rounds of a call. Peers read the same bytes with either way, so ranks need not choose the same way.
class MailboxWay {
 public:
  using Clock = std::chrono::steady_clock;

  /// Call it at the start of a call of `rounds` rounds. Every rank counts the same calls, so all ranks try at the same
  /// time.
  void begin(std::size_t rounds);
  /// Returns whether the mailbox of round `round`, from 0, is written past the caches.
  bool streams(std::size_t round) const;
  /// Call this when all ranks have used the mailboxes of round `round` and loaded those of the next round.
  void passed(std::size_t round, Clock::time_point now = Clock::now());

 private:
  bool streams_ = false, tries_ = false;
  unsigned calls_ = 0;
  Clock::time_point since_;
  Clock::duration kept_{}, streamed_{};
};

}  // namespace tessera
