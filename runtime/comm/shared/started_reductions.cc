#include "runtime/comm/shared/started_reductions.h"

#include <string>

#include "runtime/base/status.h"
#include "runtime/comm/sum/visited_sum.h"

namespace tessera {

static_assert(RankBlock::kReductionSlots >= Collectives::kMostUnderWay);

StartedReductions::StartedReductions(Peers& peers, SharedSpace& space, Fallback& fallback)
    : peers_(peers),
      fallback_(fallback),
      started_(peers, space, Lane::kStarted),
      finished_(peers, space, Lane::kFinished),
      buffers_(peers, space) {
  for (Reduction& reduction : ring_) reduction.owner = this;
}

Work StartedReductions::start(const CallDescriptor& call, const std::byte* input, float* output, SumVisitor* visitor) {
  if (const absl::Status status = this->status(); !status.ok()) return Work(status);
  const std::uint64_t number = started_.phase() + 1;
  Reduction& reduction = this->reduction(number);
  if (reduction.held) {
    const std::string limit = std::to_string(ring_.size());
    return Work(peers_.fail(make_error(
        ExitCode::kInternal, peers_.prefix() + "at most " + limit + " reductions may be under way at a time")));
  }
  reduction.held = true;
  reduction.number = number;
  reduction.call = call;
  reduction.input = input;
  reduction.output = output;
  reduction.visitor = visitor;
  started_.publish(call);
  started_.arrive();
  return Work(&reduction);
}

absl::Status StartedReductions::status() {
  if (dropped_ == 0) return peers_.status();
  peers_.start(reduction(dropped_).call.signature);
  return peers_.fail(make_error(ExitCode::kInternal, peers_.prefix() + "a reduction was started and not waited for"));
}

absl::Status StartedReductions::advance(std::uint64_t number) {
  while (finished_.phase() < number) {
    const std::uint64_t next = finished_.phase() + 1;
    TESSERA_RETURN_IF_ERROR(status());
    TESSERA_RETURN_IF_ERROR(do_share(reduction(next)));
    finished_.arrive();
  }
  return absl::OkStatus();
}

absl::Status StartedReductions::wait(std::uint64_t number) {
  if (number <= over_) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(advance(number));
  while (over_ < number) {
    const Reduction& next = reduction(over_ + 1);
    peers_.start(next.call.signature);
    TESSERA_RETURN_IF_ERROR(finished_.await(next.number));
    ++over_;
    if (next.call.signature.operation == Operation::kAllReduce)
      visit_sums(next.visitor, 0, next.output, next.call.signature.count);
  }
  return absl::OkStatus();
}

absl::Status StartedReductions::do_share(const Reduction& reduction) {
  const CallSignature& call = reduction.call.signature;
  peers_.start(call);
  TESSERA_RETURN_IF_ERROR(started_.await(reduction.number));
  if (!started_.all_published_the_same(reduction.number)) return started_.disagreement(reduction.number);
  TESSERA_RETURN_IF_ERROR(buffers_.view(started_, reduction.number));
  const bool scatters = call.operation == Operation::kReduceScatter;
  if (buffers_.inputs_reachable() && (scatters || buffers_.outputs_reachable())) return share_directly(reduction);
  // the visitor of an all-reduce sees the sums when the reduction is over
  SumVisitor* const now = scatters ? reduction.visitor : nullptr;
  return fallback_.reduce_blocking(reduction.call, reduction.input, reduction.output, now);
}

absl::Status StartedReductions::share_directly(const Reduction& reduction) {
  const CallSignature& call = reduction.call.signature;
  TESSERA_RETURN_IF_ERROR(peers_.begin_access());
  if (call.operation == Operation::kReduceScatter)
    buffers_.sum_part(call.dtype, reduction.output, call.count, reduction.visitor);
  else
    buffers_.sum_slice(call.dtype, call.count);
  peers_.end_access();
  return absl::OkStatus();
}

// Ends the group because of a Work that was never waited for, or whose wait failed: its buffers may be freed at any
// moment. The code that dropped the Work has to report the reason, which most likely is an exception.
void StartedReductions::release(Reduction& reduction) {
  reduction.held = false;
  if (reduction.number <= over_) return;
  if (dropped_ == 0) dropped_ = reduction.number;
  peers_.withdraw();
}

}  // namespace tessera
