#include "engine/asynchronous/pulled_parameters.h"

#include <algorithm>

#include "runtime/border/throw.h"
#include "tessera/span.h"

namespace tessera {

PulledParameters::PulledParameters(const std::vector<std::unique_ptr<Unit>>& units, PeerBoard& board,
                                   const AsynchronousConfig& config, HostCopies& copies)
    : PushedParameters(board), config_(config), copies_(copies), first_group_{0}, is_fresh_(units.size()) {
  for (const auto& unit : units) {
    const auto trainable = std::ranges::count_if(unit->groups, [](const auto& group) { return group->trainable; });
    first_group_.push_back(first_group_.back() + static_cast<std::size_t>(trainable));
  }
}

bool PulledParameters::pull(const Unit& unit) {
  const auto index = static_cast<std::size_t>(unit.index);
  if (is_fresh_[index] != 0) return false;
  const Span span("pull", unit.name, &pull_seconds_);
  const auto begun = latencies_.empty() ? PeerBoard::Clock::time_point() : PeerBoard::Clock::now();
  pull_unit(unit);
  is_fresh_[index] = 1;
  ++pulls_;
  for (const auto& group : unit.groups)
    if (group->trainable) pulled_bytes_ += group->gathered_bytes();
  if (!latencies_.empty()) latencies_[index].add(PeerBoard::Clock::now() - begun);
  return true;
}

void PulledParameters::end_step_of_copies() {
  board_.note_pushed(step());
  std::ranges::fill(is_fresh_, 0);
  throw_if_error(order_.end_step());
}

}  // namespace tessera
