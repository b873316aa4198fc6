#include "engine/asynchronous/peer_board.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include "runtime/base/rank_name.h"
#include "runtime/border/throw.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::chrono::milliseconds kBetweenLooks{50};
constexpr int kSpins = 100;

}  // namespace

PeerBoard::PeerBoard(std::shared_ptr<Collectives> group, double timeout_s, Sees sees)
    : group_(std::move(group)),
      timeout_s_(timeout_s),
      exceptions_at_start_(std::uncaught_exceptions()),
      memory_(sees == Sees::kOthers
                  ? Arena::common("what asynchronous ranks tell each other",
                                  static_cast<std::int64_t>(sizeof(Entry)) * group_->size(), *group_)
                  : Arena::plain("steps of this rank", static_cast<std::int64_t>(sizeof(Entry)) * group_->size())),
      entries_(reinterpret_cast<Entry*>(memory_.data())) {
  entries_[rank()].process.store(getpid());
  meet("asynchronous ranks");
  if (sees == Sees::kNothing) return;
  for (int q = 0; q < size(); ++q) processes_.emplace_back(static_cast<pid_t>(entries_[q].process.load()));
  looked_ = Clock::now();
}

PeerBoard::~PeerBoard() {
  if (entries_[rank()].state.load() == kFailed) return;  // note_failed
  entries_[rank()].state.store(std::uncaught_exceptions() > exceptions_at_start_ ? kFailed : kLeft);
}

void PeerBoard::meet(const char* what) { throw_if_error(group_->barrier(what).wait()); }

std::string PeerBoard::name_of(int rank) const {
  return "rank " + std::to_string(rank) + " (pid " + std::to_string(entries_[rank].process.load()) + ")";
}

bool PeerBoard::is_late(Clock::time_point begin) const {
  return Clock::now() - begin > std::chrono::duration<double>(timeout_s_);
}

bool PeerBoard::is_gone(int rank) const {
  return entries_[rank].state.load() == kRunning && !processes_[static_cast<std::size_t>(rank)].alive();
}

/// The other ranks do not call this barrier, so it fails. Its error says which rank is gone, and why.
void PeerBoard::end_because_of(int rank) {
  note_failed();
  throw_if_error(group_->barrier("a look at asynchronous ranks").wait());
  throw Error(ExitCode::kPeerLost, "rank " + std::to_string(this->rank()) + ": " + name_of(rank) +
                                       " has ended. [T0822] hint: what it printed last, or its launcher, says why");
}

void PeerBoard::end_late(What what, Arrived arrived) {
  note_failed();
  std::string missing;
  for (int q = 0; q < size(); ++q) {
    if (!arrived(q)) missing += (missing.empty() ? "" : ", ") + name_of(q);
  }
  throw Error(ExitCode::kPeerLost,
              rank_name(rank(), size()) + " " + what() + ": timed out waiting for " + missing +
                  " (comm.timeout_s sets the limit). [T0823] hint: a rank that does not come stands still, "
                  "or waits for its own turn in an order (sync.play_order) of another program");
}

/// A rank that ended without an error has arrived already, or never arrives.
void PeerBoard::expect_enough(Arrived arrived, std::int64_t spare) {
  for (int q = 0; q < size(); ++q) {
    if (entries_[q].state.load() == kLeft && !arrived(q) && spare-- == 0) end_because_of(q);
  }
}

void PeerBoard::wait(What what, Arrived arrived, std::int64_t spare) {
  const auto have_all_arrived = [&] {
    for (int q = 0; q < size(); ++q) {
      if (!arrived(q)) return false;
    }
    return true;
  };
  const Clock::time_point begin = Clock::now();
  std::chrono::microseconds nap{20};
  for (int looks = 0;; ++looks) {
    if (have_all_arrived()) return;
    if (looks < kSpins) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(nap);
    nap = std::min<std::chrono::microseconds>(2 * nap, std::chrono::milliseconds(1));
    look();
    expect_enough(arrived, spare);
    if (is_late(begin)) end_late(what, arrived);
  }
}

void PeerBoard::look_for_the_dead() {
  for (int k = 0; k < 20; ++k) {
    std::this_thread::sleep_for(kBetweenLooks);
    look();
  }
}

void PeerBoard::look() {
  const Clock::time_point now = Clock::now();
  if (now - looked_ < kBetweenLooks) return;
  looked_ = now;
  for (int q = 0; q < size(); ++q) {
    if (q != rank() && (entries_[q].state.load() == kFailed || is_gone(q))) end_because_of(q);
  }
}

}  // namespace tessera
