#include "runtime/comm/shared/mailbox_way.h"

#include <algorithm>

namespace tessera {
namespace {

// A trial writes the mailboxes of rounds 1 to 3 into the cache, and those of rounds 4 to 6 past it. It times rounds 1,
// 2, 4 and 5. In each of them ranks read a mailbox that was written in one way, and write the next mailbox in the same
// way. Each way has two times, and the shorter one counts, since another process may have disturbed a round. None of
// these rounds is a call's last one, which may be short.
constexpr std::size_t kFirstStreamed = 4, kLast = 6;
constexpr unsigned kCallsPerTry = 8;

}  // namespace

void MailboxWay::begin(std::size_t rounds) { tries_ = rounds > kLast + 1 && calls_++ % kCallsPerTry == 0; }

bool MailboxWay::streams(std::size_t round) const {
  return tries_ && round > 0 && round <= kLast ? round >= kFirstStreamed : streams_;
}

void MailboxWay::passed(std::size_t round, Clock::time_point now) {
  if (!tries_ || round > kFirstStreamed + 1) return;
  const Clock::duration took = now - since_;
  since_ = now;
  if (round == 1) kept_ = took;
  if (round == 2) kept_ = std::min(kept_, took);
  if (round == kFirstStreamed) streamed_ = took;
  if (round != kFirstStreamed + 1) return;
  streamed_ = std::min(streamed_, took);
  // A gain of less than a tenth is not enough to change the way.
  if (streams_ ? kept_ * 11 < streamed_ * 10 : streamed_ * 11 < kept_ * 10) streams_ = !streams_;
}

}  // namespace tessera
