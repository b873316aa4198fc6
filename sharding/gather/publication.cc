#include "sharding/gather/publication.h"

#include <algorithm>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/border/throw.h"
#include "tessera/span.h"

namespace tessera {

Publication::Publication(std::vector<Unit*> units, Collectives& group, WireForm form, OnFailure on_failure)
    : UnitKeeper(std::move(on_failure)), units_(std::move(units)), group_(group), form_(form) {
  for (Unit* unit : units_) unit->watch(this);
}

Publication::~Publication() {
  for (Coming& coming : coming_) {
    const absl::Status status = coming.work.wait();
    if (status.ok()) {
      coming.group->attach(coming.memory);
    } else {
      log_error("unit " + coming.group->unit->name +
                ": its updated values have not come from other ranks, and cannot be read: " + message_of(status));
    }
  }
  for (Unit* unit : units_) unit->watch(nullptr);
}

void Publication::start(FlatGroup& group) {
  const Span span("publish", group.unit->name, &seconds_);
  std::byte* const memory = group.full;
  const std::int64_t bytes = group.layout.numel() / group_.size() * group.element_bytes();
  const auto begun = latencies_.empty() ? std::chrono::steady_clock::time_point() : std::chrono::steady_clock::now();
  coming_.push_back({&group, memory,
                     group_.all_gather(group.unit->name, memory + group_.rank() * bytes, memory, bytes,
                                       {.dtype = group.dtype, .form = form_}),
                     begun});
  group.attach(nullptr);
}

void Publication::finish() {
  while (!coming_.empty() && !is_forked_) finish(*coming_.front().group->unit);
}

void Publication::finish(const Unit& unit) {
  if (is_forked_) return;
  const auto is_of_unit = [&](const Coming& coming) { return coming.group->unit == &unit; };
  for (auto at = std::ranges::find_if(coming_, is_of_unit); at != coming_.end();
       at = std::ranges::find_if(coming_, is_of_unit)) {
    const Span span("wait", unit.name, &seconds_);
    throw_if_error(at->work.wait());
    if (!latencies_.empty() && at->begun != std::chrono::steady_clock::time_point())
      latencies_[static_cast<std::size_t>(unit.index)].add(std::chrono::steady_clock::now() - at->begun);
    at->group->attach(at->memory);
    coming_.erase(at);
  }
}

void Publication::give_up() {
  is_forked_ = true;
  for (Coming& coming : coming_) {
    coming.group->unit->poison("unit " + coming.group->unit->name +
                               " was on its way from other ranks when this process was forked from one. [T0621] hint: "
                               "fork before training, or after a forward has read the unit");
  }
}

void Publication::use(Unit& unit) {
  unit.pin();
  finish(unit);
}

}  // namespace tessera
