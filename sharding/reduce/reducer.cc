#include "sharding/reduce/reducer.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/sum/joined_sum.h"
#include "runtime/comm/sum/visited_sum.h"
#include "runtime/comm/sum/wire_codec.h"
#include "sharding/compress/comm_hook_method.h"
#include "sharding/gather/gather_log.h"
#include "sharding/gather/unit_notes.h"
#include "sharding/memory_view.h"
#include "sharding/reduce/gradient_place.h"
#include "sharding/unrecorded.h"
#include "tessera/span.h"

namespace tessera {
namespace {
// This file turns a unit's gradients into sums.
//
// `take` packs a gradient into the unit's bucket. A unit whose gradients are complete is kReady; `launch_ready` goes
// through `order_` and reduces units for as long as the next one is ready. `reduce` starts the reductions of the unit's
// groups (`start`, `start_group`) and then lets earlier reductions go on (`follow`): those `reduction_lag` units back
// do this rank's share (`advance`), and those `end_lag` units back end (`complete`). Reductions under way lie in a ring
// (`reduction(number)`). `finish` reduces the rest at the end of a backward, then late gradients, and ends all
// reductions. Where gradients accumulate in place, everything happens in `finish`. Under "reproducible" each
// microbatch's gradients are made anew there, and `end_microbatch` joins them to the sums that wait; elsewhere
// `start_group` tells Accumulation which sums join the sum over ranks.
//
// Where units are updated in backward, notes travel with each reduction (`start_notes`), and a complete unit is handed
// over (`hand_over`).

/// Narrows `numel` fp32 in place into `dtype` at the front of the same memory. Writing never overtakes reading, since
/// an element of `dtype` is at most as long as fp32.
void narrow_in_place(std::byte* memory, DType dtype, std::int64_t numel, ComputeDevice device) {
  const Unrecorded unrecorded;
  // elements that fit into a cache, or keep a GPU busy
  const std::int64_t chunk = device.is_queued ? 1 << 24 : 1 << 16;
  for (std::int64_t begin = 0; begin < numel; begin += chunk) {
    const std::int64_t count = std::min(chunk, numel - begin);
    const at::Tensor wide = flat_view(memory + begin * 4, DType::kF32, count, device.device);
    std::byte* const to = memory + begin * static_cast<std::int64_t>(size_of(dtype));
    flat_view(to, dtype, count, device.device).copy_(wide.to(scalar_type_of(dtype)));
  }
}

}  // namespace

static_assert(MemoryPlan::kMostUnderWay <= Collectives::kMostUnderWay);

/// Adds the last sum's pieces to the sums that earlier reductions of the step left, if any, and shows the result to
/// `visitor`. It is for sums that the host makes.
class Reducer::Accumulation final : public SumVisitor {
 public:
  Accumulation(const FlatGroup& group, GradientVisitor* visitor) : group_(group), visitor_(visitor) {}

  /// Says that the last sum is added onto `earlier`; sums that were named first are added first.
  void add_onto(const float* earlier) { earlier_[count_++] = earlier; }
  bool adds() const { return count_ > 0; }
  /// Says where the result goes.
  void write_to(float* place) { place_ = place; }
  float* place() const { return place_; }

  void visit(std::size_t offset, const float* values, std::size_t numel) override {
    if (offset == 0) visitor_->begin(group_);
    if (count_ > 0) {
      std::array<const float*, kMost> earlier{};
      std::transform(earlier_.begin(), earlier_.begin() + count_, earlier.begin(),
                     [&](const float* sum) { return sum + offset; });
      joined_sum({earlier.data(), count_}, values, place_ + offset, numel);
      values = place_ + offset;
    }
    visitor_->visit(group_, {values, numel});
  }

 private:
  static constexpr std::size_t kMost = SumCounter::kMostJoined;
  const FlatGroup& group_;
  GradientVisitor* const visitor_;
  float* place_ = nullptr;
  std::size_t count_ = 0;
  std::array<const float*, kMost> earlier_{};
};

struct Reducer::GroupReduction {
  FlatGroup* group;
  float* sum;              ///< the sum over the shard axis
  std::int64_t numel;      ///< elements of `sum`
  float* total = nullptr;  ///< the sum over both axes; set when the last sum starts
  Accumulation accumulation;
  Work work, last;  ///< reductions over the shard axis, and the replicate axis; last members, as they use the others
};

struct Reducer::UnitReduction {
  Entry* entry = nullptr;
  CallBegin begun;
  Bucket bucket;
  float* scratch = nullptr;  ///< planned
  std::int64_t scratch_taken = 0;
  std::vector<Arena> overflow_scratch;
  std::vector<GroupReduction> groups;  ///< never more than were reserved, so they do not move
  Lease sum;                           ///< used where sums are offloaded
  // These are used where units are updated in backward.
  std::span<float> notes;  ///< planned
  std::vector<char> used;  ///< [trainable parameter of the unit]
  Work notes_work;         ///< all-reduce of `notes` over the shard axis
};

/// After a failure nobody needs the sums of reductions that have not ended.
Reducer::~Reducer() {
  for (const auto& reduction : reductions_) reduction->sum.drop();
}

Reducer::Reducer(const MemoryPlan& plan, std::vector<Unit*> units, const MeshAxes& axes, Memory memory,
                 ComputeDevice device, GradientVisitor* visitor)
    : plan_(plan), axes_(axes), device_(device), visitor_(visitor), memory_(std::move(memory)) {
  float* const method_work = reinterpret_cast<float*>(memory_.feedback.take(plan_.method_work_numel() * 4));
  if (plan_.wire().compression.restore_skipped) memory_.feedback.take(plan_.kept_gradient_numel() * 4);
  for (Unit* unit : units) {
    Entry& entry = entries_.emplace_back(unit, GradientPacker(*unit, bucket_dtype(), device_, copies_));
    const UnitShape shape = unit->shape();
    entry.bucket_bytes = plan_.bucket_bytes_of(shape);
    entry.sum_bytes = plan_.sum_bytes_of(shape);
    for (const auto& group : unit->groups) entry.feedback.push_back(take_feedback(*group, method_work));
    if (entry.gradients.trainable() > 0) order_.insert(order_.begin(), unit->index);
    if (plan_.bucket_mode() == BucketMode::kAccumulator) {
      entry.bucket.memory = memory_.buckets.take(entry.bucket_bytes);
    }
  }
  was_late_.resize(entries_.size());
  const Entry& root = entries_[0];
  if (plan_.bucket_mode() == BucketMode::kShared) {
    buckets_ = UnitSlots(memory_.buckets, root.bucket_bytes, plan_.shared_buckets(), plan_.bucket_bytes());
  }
  memory_.buckets.expect_full();
  memory_.feedback.expect_full();
  if (updates_in_backward()) {
    sums_ = UnitSlots(memory_.sums, root.sum_bytes, plan_.shared_sums(), plan_.sum_bytes());
  }
  std::size_t most_groups = 0;
  for (Unit* unit : units) most_groups = std::max(most_groups, unit->groups.size());
  for (std::int64_t i = 0; i < plan_.units_under_way(); ++i) {
    auto reduction = std::make_unique<UnitReduction>();
    reduction->scratch = reinterpret_cast<float*>(memory_.scratch.take(plan_.scratch_numel() * 4));
    reduction->groups.reserve(most_groups);
    if (updates_in_backward()) {
      const auto notes = static_cast<std::size_t>(plan_.notes_numel());
      reduction->notes = {reinterpret_cast<float*>(memory_.sums.take(plan_.notes_numel() * 4)), notes};
      reduction->used.reserve(notes);
    }
    reductions_.push_back(std::move(reduction));
  }
  for (Entry& entry : entries_) {
    const std::int64_t bytes = plan_.waiting_sums() * plan_.waiting_numel_of(entry.unit->shape()) * 4;
    if (bytes > 0) entry.waiting = reinterpret_cast<float*>(memory_.scratch.take(bytes));
  }
  if (plan_.block_sums() > 0)
    blocks_.emplace(plan_, *axes_.world,
                    reinterpret_cast<float*>(memory_.scratch.take(plan_.block_exchange_numel() * 4)));
  memory_.scratch.expect_full();
  memory_.sums.expect_full();
}

Reducer::Feedback Reducer::take_feedback(const FlatGroup& group, float* method_work) {
  const auto take = [&](std::int64_t count) {
    return count > 0 ? reinterpret_cast<float*>(memory_.feedback.take(count * 4)) : nullptr;
  };
  const FeedbackNumel numel = plan_.feedback_numel_of(group.shape());
  Feedback feedback{take(numel.shard), take(numel.replicate)};
  const MethodLayout layout = plan_.method_layout_of(group.shape());
  feedback.method = make_gradient_method(plan_, group, take(layout.memory.kept), method_work);
  feedback.wire_bytes = layout.wire_bytes(plan_.placement().mesh.shard_size);
  return feedback;
}

void Reducer::sum_by(const std::shared_ptr<CommHook>& hook) {
  has_hook_ = true;
  std::int64_t buckets = 0;
  for (Entry& entry : entries_) {
    for (const auto& group : entry.unit->groups) {
      if (!group->trainable) continue;
      Feedback& feedback = entry.feedback[group->index];
      feedback.method = std::make_unique<CommHookMethod>(*group, hook, buckets++);
      feedback.wire_bytes = group->layout.numel() * 4;  // the plan does not know what the hook sends
    }
  }
}

void Reducer::use_methods(bool on, std::int64_t step) {
  uses_methods_ = on;
  copy_feedback();
  for (Entry& entry : entries_) {
    for (Feedback& feedback : entry.feedback) {
      if (feedback.method) feedback.method->begin_step(step);
    }
  }
}

bool Reducer::accumulates() const { return plan_.keeps_gradients(); }

/// A single rank takes gradients straight into their sum's place, and nothing is reduced.
bool Reducer::is_alone_in_place() const { return plan_.placement().mesh.world_size() == 1 && !memory_.sums_below; }

DType Reducer::bucket_dtype() const {
  return plan_.bucket_mode() == BucketMode::kShared ? plan_.bucket_dtype() : DType::kF32;
}

void Reducer::take(FlatGroup& group, std::size_t parameter, bool counts) {
  Entry& entry = this->entry(*group.unit);
  at::Tensor& gradient = group.parameters[parameter].tensor.mutable_grad();
  if (updates_in_backward()) expect_not_updated(entry, group, parameter);
  if (makes_tree() && !accumulates()) expect_in_leaf(entry, group, parameter);
  if (on_gradient_) on_gradient_();
  if (group.unit->use_log) group.unit->use_log->note_gradient(group.unit->index);
  const bool was_ready = entry.phase == Phase::kReady;  // an unexpected further gradient is added
  if (entry.phase == Phase::kIdle) open(entry);
  const bool is_usual_bucket = entry.bucket.overflow.bytes() == 0 && entry.sum.overflow.bytes() == 0;
  std::byte* const bucket = bucket_of(entry, group);
  counts ? entry.gradients.take(group, parameter, gradient, bucket, is_usual_bucket)
         : entry.gradients.take_zeros(group, parameter, bucket);
  gradient.reset();
  if (is_alone_in_place() && ++entry.taken == entry.gradients.trainable()) tell(entry);
  if (accumulates()) return copies_.flush_if_many();
  if (!entry.gradients.is_complete()) return;
  copies_.flush();
  if (was_ready) return;
  entry.phase = Phase::kReady;
  if (entry.reduced) return;  // a late gradient: the unit is reduced once more when the round ends
  completed_.push_back(entry.unit->index);
  launch_ready();
}

/// Reports a unit's sum. Where nothing is reduced, that happens when as many gradients have come as the unit has
/// parameters, and again at the end of the round if more gradients have come since.
void Reducer::tell(Entry& entry) {
  if (!on_reduced_) return;
  if (is_alone_in_place()) {
    if (entry.told > 0 && entry.told == entry.taken) return;
    copies_.flush();
    entry.told = entry.taken;
  }
  on_reduced_(*entry.unit);
}

void Reducer::expect_not_updated(const Entry& entry, const FlatGroup& group, std::size_t parameter) const {
  if (!entry.reduced) return;
  throw Error(
      ExitCode::kUsage,
      "parameter " + group.parameters[parameter].name + " of unit " + entry.unit->name +
          " got one more gradient in the same backward after the unit's gradients were complete, and "
          "optimizer.in_backward has given them to the optimizer. That happens where parameters are shared by parts of "
          "the graph with a backward of their own inside this one. [T0622] hint: set optimizer.in_backward to false");
}

void Reducer::expect_in_leaf(const Entry& entry, const FlatGroup& group, std::size_t parameter) const {
  if (!entry.reduced) return;
  throw Error(
      ExitCode::kUsage,
      "parameter " + group.parameters[parameter].name + " of unit " + entry.unit->name +
          " got one more gradient in the same backward after the unit's gradients were complete, and \"reproducible\" "
          "has sent them: the sum of ranks would not be that of one rank. That happens where parameters are shared by "
          "parts of the graph with a backward of their own inside this one. [T0816] hint: set gradient_sync to "
          "\"last_microbatch\", which waits for the end of backward");
}

void Reducer::open(Entry& entry) {
  entry.phase = Phase::kFilling;
  if (accumulates()) {
    if (makes_tree()) entry.gradients.begin();
    return;  // otherwise gradients that have arrived count until `reset`
  }
  entry.gradients.begin();
  if (plan_.bucket_mode() == BucketMode::kShared) {
    take_place(entry.bucket, buckets_, *entry.unit, entry.bucket_bytes);
  } else if (updates_in_backward()) {
    place_sum(entry);
  } else if (entry.has_sum) {  // the sum lies in its own place
    take_overflow(entry.bucket, *entry.unit, entry.bucket_bytes);
  }
}

void Reducer::take_place(Bucket& bucket, UnitSlots& slots, const Unit& unit, std::int64_t bytes) {
  bucket.slot = slots.take(/*for_root=*/unit.index == 0);
  if (bucket.slot == UnitSlots::kNone) return take_overflow(bucket, unit, bytes);
  bucket.memory = slots.memory(bucket.slot);
}

void Reducer::place_sum(Entry& entry) {
  take_place(entry.sum, sums_, *entry.unit, entry.sum_bytes);
  place_gradients(*entry.unit, entry.sum.memory);
}

void Reducer::note_overflow(const Arena& arena) {
  counts_.overflow_bytes += arena.bytes();
  counts_.overflow_peak = std::max(counts_.overflow_peak, counts_.overflow_bytes);
}

void Reducer::take_overflow(Bucket& bucket, const Unit& unit, std::int64_t bytes) {
  ++counts_.overflow_buckets;
  if (!warned_) {
    warned_ = true;
    log_warning("unit " + unit.name +
                ": gradients came in another order than before, so a bucket beyond the plan is used (the step's "
                "allocated memory "
                "shows it). That is expected in a step in which other parameters are used than in the step before");
  }
  bucket.overflow = Arena::plain("overflow bucket", bytes, device_.device);
  note_overflow(bucket.overflow);
  bucket.memory = bucket.overflow.take(bucket.overflow.bytes());
}

void Reducer::free(Bucket& bucket, UnitSlots& slots) {
  if (bucket.slot != UnitSlots::kNone) slots.give_back(bucket.slot);
  counts_.overflow_bytes -= bucket.overflow.bytes();
  bucket = Bucket();
}

bool Reducer::is_in_place(const Entry& entry) const {
  return plan_.bucket_mode() == BucketMode::kInPlace && entry.bucket.overflow.bytes() == 0;
}

bool Reducer::is_leaf_in_waiting() const {
  if (backup_) return true;
  if (!makes_tree() || !accumulates() || round_ >= counter().rounds()) return false;
  const SumCounter::Turn turn = counter().turn(round_);
  return !turn.is_last && turn.joined == 0;
}

/// Returns the sum of a group that waits in a place. If ranks have summed it, the last place is that of the total.
float* Reducer::waiting_of(const Entry& entry, const FlatGroup& group, int place) const {
  if (place == plan_.waiting_sums()) return group.gradient;
  const bool is_whole = accumulates();
  const auto numel_of = [&](const FlatGroup& each) {
    return !each.trainable ? 0 : is_whole ? each.layout.numel() : each.gradient_part.numel;
  };
  std::int64_t all = 0, before = 0;
  for (const auto& each : entry.unit->groups) {
    if (each->index < group.index) before += numel_of(*each);
    all += numel_of(*each);
  }
  return entry.waiting + place * all + before;
}

/// Returns the place for the sum of this reduction and of all sums that it joins.
float* Reducer::place_of_sum(const FlatGroup& group) const {
  if (!makes_tree() || accumulates()) return group.gradient;
  const SumCounter::Turn turn = counter().turn(round_);
  return turn.is_last ? group.gradient : waiting_of(entries_[group.unit->index], group, turn.place);
}

void Reducer::end_microbatch(bool counts) {
  if (!accumulates()) return;
  copies_.flush();
  const SumCounter::Turn turn = backup_ ? SumCounter::Turn{place_of_leaf()} : counter().turn(round_);
  std::array<const float*, SumCounter::kMostJoined> waiting{};
  for (const int index : order_) {
    Entry& entry = entries_[index];
    if (entry.phase == Phase::kIdle) entry.gradients.begin();  // this rank gave the unit no gradient
    entry.phase = Phase::kIdle;
    if (!counts) continue;
    for (const auto& group : entry.unit->groups) {
      if (!group->trainable) continue;
      auto* const leaf = reinterpret_cast<float*>(bucket_of(entry, *group));
      entry.gradients.fill_missing(*group, reinterpret_cast<std::byte*>(leaf), /*gaps_are_zero=*/false);
      std::size_t count = 0;
      for (int i = turn.joined; i-- > 0;) waiting[count++] = waiting_of(entry, *group, turn.place + i);
      float* const to = turn.is_last ? leaf : waiting_of(entry, *group, turn.place);
      joined_sum({waiting.data(), count}, leaf, to, static_cast<std::size_t>(group->layout.numel()));
    }
  }
  if (counts && !backup_) ++round_;
}

std::byte* Reducer::bucket_of(const Entry& entry, const FlatGroup& group) const {
  if (is_leaf_in_waiting()) return reinterpret_cast<std::byte*>(waiting_of(entry, group, place_of_leaf()));
  if (is_in_place(entry)) return reinterpret_cast<std::byte*>(group.gradient);
  std::byte* bucket = entry.bucket.memory;
  for (std::size_t i = 0; i < group.index; ++i) {
    const FlatGroup& before = *entry.unit->groups[i];
    if (before.trainable) bucket += before.layout.numel() * size_of(bucket_dtype());
  }
  return bucket;
}

/// A unit for which no gradient is expected and none has come is ready when its turn comes.
void Reducer::launch_ready() {
  for (; next_ < order_.size(); ++next_) {
    Entry& entry = entries_[order_[next_]];
    if (entry.phase == Phase::kIdle && !entry.gradients.expects_any()) {
      open(entry);
      completed_.push_back(entry.unit->index);
    } else if (entry.phase != Phase::kReady) {
      return;
    }
    reduce(entry);
  }
}

void Reducer::expect(const std::vector<char>& used) {
  if (used == expected_) return;
  const bool is_first = expected_.empty();
  expected_ = used;
  expects_all_ = std::find(used.begin(), used.end(), 0) == used.end();
  if (is_first && expects_all_) return;
  std::span<const char> rest = expected_;
  for (Entry& entry : entries_) {
    const auto count = static_cast<std::size_t>(entry.gradients.trainable());
    entry.gradients.expect(rest.first(count));
    rest = rest.subspan(count);
  }
  order_agreed_ = false;
}

void Reducer::reduce(Entry& entry) {
  const Span span("reduce", entry.unit->name, &counts_.reduction_seconds);
  if (rounds_) rounds_->announce_and_add(RoundLog::kReduction);
  start(entry);
  follow(plan_.reduction_lag(), plan_.end_lag());
}

Reducer::UnitReduction& Reducer::reduction(std::int64_t number) {
  return *reductions_[static_cast<std::size_t>(number) % reductions_.size()];
}

void Reducer::start(Entry& entry) {
  copies_.flush();
  if (updates_in_backward() && entry.sum.memory == nullptr) place_sum(entry);
  // Gaps stay zero where gradients lie in their sum's own place: no other unit uses it, so nothing but zeros ever came
  // into them. Only compressed reductions may leave values that are not finite there. Such a value makes its neighbours
  // NaN.
  const PlannedWire& wire = plan_.wire();
  const bool is_compressed = wire.compressed_shard_part > 0 || wire.compressed_replicate_part > 0;
  const bool gaps_are_zero = device_.is_queued && is_in_place(entry) && !updates_in_backward() && !is_compressed;
  const bool is_filled = makes_tree() && accumulates();  // end_microbatch has filled it
  Lease sum = take_sum(entry);
  UnitReduction& reduction = this->reduction(started_++);
  reduction.entry = &entry;
  reduction.sum = std::move(sum);
  if (!latencies_.empty() && !is_alone_in_place()) reduction.begun = clock_.begin();
  // The squares come first, since the reductions may change the values in the bucket.
  if (squares_own_ && device_squares_ && !is_alone_in_place()) square_there(entry);
  for (auto& group : entry.unit->groups) {
    if (!group->trainable) continue;
    if (!is_filled) entry.gradients.fill_missing(*group, bucket_of(entry, *group), gaps_are_zero);
    if (blocks_)
      join_blocks(entry, *group);
    else
      start_group(reduction, *group);
  }
  if (squares_own_ && !device_squares_ && !accumulates()) note_own(entry);
  ++counts_.reductions;
  entry.reduced = true;
  entry.has_sum = true;
  entry.phase = Phase::kIdle;
  if (!accumulates()) reduction.bucket = std::exchange(entry.bucket, Bucket());
  if (!updates_in_backward()) return;
  start_notes(reduction);
  entry.unit->close();
}

/// Notes the unit's own square. If its gradients go in two parts, the two norms do not give the norm of the whole.
void Reducer::note_own(Entry& entry) {
  const double square = entry.gradients.square();
  if (square == 0) return;
  own_square_ += entry.has_own ? std::numeric_limits<double>::quiet_NaN() : square;
  warn_of_two_parts(entry);
}

/// Lets a GPU square this rank's contribution to a unit, before it goes to other ranks.
void Reducer::square_there(Entry& entry) {
  pieces_.clear();
  for (const auto& group : entry.unit->groups) {
    if (group->trainable) entry.gradients.add_pieces(*group, bucket_of(entry, *group), pieces_);
  }
  if (pieces_.empty()) return;
  device_squares_->add(*entry.unit, pieces_, bucket_dtype());
  if (accumulates()) {
    entry.has_own = true;
  } else {
    warn_of_two_parts(entry);
  }
}

/// Notes that the unit has gradients of this microbatch, and warns once if it had gradients before.
void Reducer::warn_of_two_parts(Entry& entry) {
  if (entry.has_own && !std::exchange(warned_of_own_, true)) {
    log_warning(
        "unit " + entry.unit->name +
        ": its gradients of one microbatch were reduced in two parts, so \"noise_scale\" cannot measure this "
        "step, nor others like it. [T0835] hint: several ranks measure it with \"gradient_sync\": \"last_microbatch\" "
        "and gradient_accumulation above 1");
  }
  entry.has_own = true;
}

void Reducer::keep_own_squares() {
  for (Entry& entry : entries_) entry.gradients.keep_squares();
}

void Reducer::square_own(bool on) {
  if (on == std::exchange(squares_own_, on) || device_squares_) return;
  for (Entry& entry : entries_) entry.gradients.squares(on);
}

double Reducer::take_own_square() {
  if (device_squares_) {
    const bool takes_sums = accumulates() && plan_.placement().mesh.world_size() == 1;
    for (const int index : order_) {
      if (takes_sums && !entries_[index].has_own) square_there(entries_[index]);
    }
    for (Entry& entry : entries_) entry.has_own = false;
    device_squares_->take();
    return 0;
  }
  if (!accumulates()) {
    for (Entry& entry : entries_) entry.has_own = false;
    return std::exchange(own_square_, 0.0);
  }
  double sum = 0;
  for (const int index : order_) sum += entries_[index].gradients.square();
  return sum;
}

/// Gives memory to the unit's sum where sums are offloaded. Meanwhile the next unit's sum is read, if something is
/// added to it.
Lease Reducer::take_sum(const Entry& entry) {
  if (!memory_.sums_below) return {};
  Lease sum = memory_.sums_below->acquire(entry.unit->index, entry.has_sum ? LeaseUse::kChange : LeaseUse::kOverwrite);
  if (next_ + 1 >= order_.size()) return sum;
  const Entry& next = entries_[order_[next_ + 1]];
  const std::int64_t unit = next.unit->index;
  if (next.has_sum && !next.reduced) memory_.sums_below->announce({&unit, 1});
  return sum;
}

/// Returns null where there is one rank, since it sends nothing.
GradientMethod* Reducer::method_of(const FlatGroup& group) const {
  return uses_methods_ && plan_.placement().mesh.world_size() > 1
             ? entries_[group.unit->index].feedback[group.index].method.get()
             : nullptr;
}

ReduceOptions Reducer::shard_options(const FlatGroup& group) const {
  ReduceOptions options(waits());
  const PlannedWire& wire = plan_.wire();
  if (wire.compressed_shard_part == 0) return options;
  options.contributions = wire.compression.gradients;
  options.sums = wire.compression.sums;
  options.feedback = entries_[group.unit->index].feedback[group.index].shard;
  options.method = method_of(group);
  return options;
}

ReduceOptions Reducer::replicate_options(const FlatGroup& group) const {
  ReduceOptions options(replicas_follow() ? Waits::kLater : Waits::kAtOnce);
  const PlannedWire& wire = plan_.wire();
  if (wire.compressed_replicate_part == 0) return options;
  options.contributions = wire.compression.gradients;
  options.sums = wire.compression.sums;
  options.feedback = entries_[group.unit->index].feedback[group.index].replicate;
  return options;
}

void Reducer::forget_feedback() {
  std::fill_n(memory_.feedback.data(), memory_.feedback.bytes(), std::byte{0});
  has_copy_ = false;
}

/// The residuals lie at the end of the memory, and their copy in front of them.
void Reducer::copy_feedback() {
  const std::int64_t bytes = 4 * plan_.kept_gradient_numel();
  if (!plan_.wire().compression.restore_skipped || bytes == 0 || std::exchange(has_copy_, true)) return;
  std::byte* const kept = memory_.feedback.data() + memory_.feedback.bytes() - bytes;
  std::memcpy(kept - bytes, kept, static_cast<std::size_t>(bytes));
}

void Reducer::restore_feedback() {
  if (!has_copy_) return forget_feedback();
  const std::int64_t bytes = 4 * plan_.kept_gradient_numel();
  std::byte* const kept = memory_.feedback.data() + memory_.feedback.bytes() - bytes;
  std::memcpy(kept, kept - bytes, static_cast<std::size_t>(bytes));
  has_copy_ = false;
}

KeptGradients Reducer::kept() {
  const MeshPosition& mesh = plan_.placement().mesh;
  const PlannedWire& wire = plan_.wire();
  const AxisPlacement placement = plan_.placement().gradients;
  KeptGradients kept;
  using What = KeptGradients::What;
  const auto add = [&](FlatGroup& group, What what, const std::vector<Extent>& runs, float* values,
                       std::int64_t begin) {
    for (const Extent run : runs) {
      kept.residuals.push_back({&group, what, {begin + run.offset, run.numel}, values});
      values += run.numel;
    }
  };
  const int ranks = mesh.world_size();
  std::int64_t method_holders = 0;
  for (Entry& entry : entries_) {
    for (const auto& group : entry.unit->groups) {
      const Feedback& feedback = entry.feedback[group->index];
      const std::int64_t numel = group->layout.numel();
      const Extent sum = owned({placement.shard, false}, mesh, numel);
      if (feedback.shard) {
        add(*group, What::kContributions,
            rounded_runs(axes_.reduce->rank(), axes_.reduce->size(), wire.compressed_shard_part, numel,
                         placement.shard),
            feedback.shard, 0);
      }
      if (feedback.replicate) {
        add(*group, What::kReplicaContributions,
            rounded_runs(axes_.replicate->rank(), axes_.replicate->size(), wire.compressed_replicate_part, sum.numel,
                         placement.replicate),
            feedback.replicate, sum.offset);
      }
      if (!feedback.method) continue;
      feedback.method->add_kept(*group, kept);
      method_holders = feedback.method->holders(ranks);
    }
  }
  const auto holders = [&](int ranks, int part) { return part > 0 ? ranks / part : 0; };
  kept.holders = method_holders > 0 ? method_holders
                                    : holders(ranks, wire.compressed_shard_part) +
                                          holders(mesh.replicate_size, wire.compressed_replicate_part);
  return kept;
}

Waits Reducer::waits() const { return plan_.end_lag() == 0 ? Waits::kAtOnce : Waits::kLater; }

void Reducer::start_notes(UnitReduction& reduction) {
  const Entry& entry = *reduction.entry;
  reduction.used.clear();
  for (const auto& group : entry.unit->groups) {
    if (!group->trainable) continue;
    for (std::size_t i = 0; i < group->parameters.size(); ++i) {
      reduction.used.push_back(entry.gradients.used(*group, i) ? 1 : 0);
    }
  }
  write_notes(reduction);
  if (plan_.placement().mesh.world_size() == 1) return;
  float* const notes = reduction.notes.data();
  reduction.notes_work =
      axes_.reduce->all_reduce(entry.unit->name, notes, DType::kF32, notes, reduction.notes.size(), waits());
}

void Reducer::write_notes(const UnitReduction& reduction) {
  if (!device_.is_queued) return unit_notes::write(reduction.notes, reduction.used, digest_, weight_, samples_);
  std::vector<float> notes(reduction.notes.size());
  unit_notes::write(notes, reduction.used, digest_, weight_, samples_);
  const Unrecorded unrecorded;
  const auto numel = static_cast<std::int64_t>(notes.size());
  const at::Tensor there = flat_view(reduction.notes.data(), DType::kF32, numel, device_.device);
  // LibTorch copies `notes` first, so it may go.
  there.copy_(flat_view(notes.data(), DType::kF32, numel, at::kCPU), /*non_blocking=*/true);
}

/// Gives a unit whose sum is complete to the code that updates it. The sum's place is free afterwards.
void Reducer::hand_over(UnitReduction& reduction) {
  Entry& entry = *reduction.entry;
  on_summed_(*entry.unit, agreement_on(reduction));
  take_gradients_away(*entry.unit);
  free(entry.sum, sums_);
}

/// Replicas may gather units in different orders, so digests are compared before the replicas' notes are added up.
UnitAgreement Reducer::agreement_on(UnitReduction& reduction) {
  const MeshPosition& mesh = plan_.placement().mesh;
  const auto parameters = static_cast<std::int64_t>(reduction.used.size());
  throw_if_error(reduction.notes_work.wait());
  UnitAgreement agreed;
  if (device_.is_queued) {
    const Unrecorded unrecorded;
    unit_notes::compare_digests(
        flat_view(reduction.notes.data() + parameters, DType::kF32, MemoryPlan::kDigestBits, device_.device),
        mesh.shard_size);
  } else {
    agreed.ranks_agree = unit_notes::have_one_digest(reduction.notes, parameters, mesh.shard_size);
  }
  if (mesh.replicate_size > 1) {
    float* const notes = reduction.notes.data();
    throw_if_error(
        axes_.replicate->all_reduce(reduction.entry->unit->name, notes, DType::kF32, notes, reduction.notes.size())
            .wait());
  }
  if (device_.is_queued) {
    agreed.used_there = reduction.notes.data();
    agreed.weight_there = agreed.used_there + unit_notes::place_of_weight(parameters);
    agreed.samples_there = agreed.used_there + unit_notes::place_of_samples(parameters);
    agreed.differ_there = agreed.used_there + parameters;
    agreed.digest_bits = MemoryPlan::kDigestBits;
    return agreed;
  }
  unit_notes::read_used(reduction.notes, reduction.used);
  agreed.used = reduction.used;
  agreed.weight = reduction.notes[static_cast<std::size_t>(unit_notes::place_of_weight(parameters))];
  agreed.samples = std::llround(reduction.notes[static_cast<std::size_t>(unit_notes::place_of_samples(parameters))]);
  return agreed;
}

/// Returns the sums to which a sum over ranks is added: those of earlier microbatches, or in a tree the sums that it
/// joins.
Reducer::Accumulation Reducer::accumulation_of(const Entry& entry, const FlatGroup& group) const {
  Accumulation accumulation(group, visitor_);
  accumulation.write_to(place_of_sum(group));
  if (!makes_tree()) {
    if (entry.has_sum) accumulation.add_onto(group.gradient);
  } else if (!accumulates()) {
    const SumCounter::Turn turn = counter().turn(round_);
    for (int i = turn.joined; i-- > 0;) accumulation.add_onto(waiting_of(entry, group, turn.place + i));
  }
  return accumulation;
}

/// Turns one bucket into this rank's part of the sum: over the shard axis, then over the replicate axis, then onto the
/// sums of earlier reductions of this step. Each is a reduce-scatter if the placement says sharded, else an all-reduce.
void Reducer::start_group(UnitReduction& reduction, FlatGroup& group) {
  const AxisPlacement placement = plan_.placement().gradients;
  const MeshPosition& mesh = plan_.placement().mesh;
  const Entry& entry = this->entry(*group.unit);
  const std::string& name = group.unit->name;
  if (is_alone_in_place()) return;
  std::byte* bucket = bucket_of(entry, group);
  DType wire = bucket_dtype();
  if (plan_.bucket_mode() == BucketMode::kAccumulator && plan_.wire().reduce != DType::kF32) {
    wire = plan_.wire().reduce;
    narrow_in_place(bucket, wire, group.layout.numel(), device_);
  }
  ReduceOptions options = shard_options(group);
  GradientMethod* const method = method_of(group);
  if (mesh.world_size() > 1) {
    const auto count = static_cast<std::size_t>(group.layout.numel());
    counts_.reduced_bytes += method ? entry.feedback[group.index].wire_bytes
                                    : static_cast<std::int64_t>(wire_bytes(options.contributions, wire, count));
  }
  const std::int64_t numel = owned({placement.shard, false}, mesh, group.layout.numel()).numel;
  const bool replicated = mesh.replicate_size > 1;
  const Accumulation accumulation = accumulation_of(entry, group);
  float* sum =
      accumulation.adds() || (replicated && placement.replicate) ? scratch(reduction, numel) : accumulation.place();
  GroupReduction& started =
      reduction.groups.emplace_back(GroupReduction{&group, sum, numel, sum, accumulation, Work(), Work()});
  if (!replicated && !device_.is_queued) options.visitor = &started.accumulation;
  if (method && !options.method) {  // a transport without a network knows no methods
    options.method = method;
    auto* const values = reinterpret_cast<float*>(bucket);
    started.work = Work(placement.shard ? reduce_scatter_by(*axes_.reduce, name, values, sum, numel, options)
                                        : all_reduce_by(*axes_.reduce, name, values, sum, numel, options));
    return;
  }
  started.work = placement.shard ? axes_.reduce->reduce_scatter(name, bucket, wire, sum, numel, options)
                                 : axes_.reduce->all_reduce(name, bucket, wire, sum, numel, options);
}

/// Makes a group's sum from the sums that ranks have of the nodes of their runs. The sum is there when this returns.
void Reducer::join_blocks(const Entry& entry, FlatGroup& group) {
  std::vector<const float*> own;
  for (int place = 0; place < blocks_->own_blocks(); ++place) own.push_back(waiting_of(entry, group, place));
  if (blocks_->has_whole_run()) own.back() = reinterpret_cast<const float*>(bucket_of(entry, group));
  for (int turn = 0; turn < blocks_->made_again(); ++turn)
    own.push_back(waiting_of(entry, group, plan_.first_backup() + turn));
  const std::int64_t before = blocks_->sent_bytes();
  blocks_->join(group, own, *visitor_);
  counts_.reduced_bytes += blocks_->sent_bytes() - before;
}

/// Does this rank's share of all reductions but the last `lag`, and ends all reductions but the last `end_lag`.
void Reducer::follow(std::int64_t lag, std::int64_t end_lag) {
  for (; advanced_ < started_ - lag; ++advanced_) {
    UnitReduction& unit = reduction(advanced_);
    for (GroupReduction& group : unit.groups) advance(group);
    throw_if_error(unit.notes_work.advance());
  }
  for (; over_ < started_ - end_lag; ++over_) complete(reduction(over_));
}

/// Returns whether the sum over the replicate axis starts when the share of a reduction is done, and ends with the
/// reduction; otherwise it is made at the end. A queue may wait for the sum over the shard axis long before it is
/// there, and ranks compute while a network works.
bool Reducer::replicas_follow() const {
  return plan_.placement().mesh.replicate_size > 1 && (device_.is_queued || plan_.end_lag() > 0);
}

void Reducer::advance(GroupReduction& reduction) {
  throw_if_error(reduction.work.advance());
  if (!replicas_follow()) return;
  {
    const Timed timed(device_.waits);
    throw_if_error(reduction.work.wait());
  }
  reduction.last = sum_over_replicas(reduction);
}

void Reducer::complete(UnitReduction& reduction) {
  for (GroupReduction& group : reduction.groups) complete(group);
  note_latency(reduction);
  tell(*reduction.entry);
  if (updates_in_backward()) hand_over(reduction);
  reduction.sum.give_back();
  reduction.groups.clear();
  free(reduction.bucket, buckets_);
  for (const Arena& arena : reduction.overflow_scratch) counts_.overflow_bytes -= arena.bytes();
  reduction.overflow_scratch.clear();
  reduction.scratch_taken = 0;
}

void Reducer::note_latency(UnitReduction& reduction) {
  if (!latencies_.empty())
    clock_.end(reduction.begun, latencies_[static_cast<std::size_t>(reduction.entry->unit->index)]);
}

void Reducer::complete(GroupReduction& reduction) {
  {
    const Timed timed(device_.waits);
    throw_if_error(reduction.work.wait());
    throw_if_error(reduction.last.wait());
  }
  if (!device_.is_queued) {
    if (plan_.placement().mesh.replicate_size > 1 && !replicas_follow())
      throw_if_error(sum_over_replicas(reduction).wait());
    return;
  }
  if (!reduction.accumulation.adds()) return;
  const Unrecorded unrecorded;
  const std::int64_t numel = reduction.group->gradient_part.numel;
  const at::Tensor gradient = flat_view(reduction.group->gradient, DType::kF32, numel, device_.device);
  gradient.add_(flat_view(reduction.total, DType::kF32, numel, device_.device));
}

Work Reducer::sum_over_replicas(GroupReduction& reduction) {
  const FlatGroup& group = *reduction.group;
  const std::string& name = group.unit->name;
  float* const sum = reduction.sum;
  ReduceOptions options = replicate_options(group);
  if (!device_.is_queued) options.visitor = &reduction.accumulation;
  if (!plan_.placement().gradients.replicate) {
    return axes_.replicate->all_reduce(name, sum, DType::kF32, sum, reduction.numel, options);
  }
  const Extent part = group.gradient_part;
  const Accumulation& accumulation = reduction.accumulation;
  reduction.total = accumulation.adds() ? sum + part.offset % reduction.numel : accumulation.place();
  return axes_.replicate->reduce_scatter(name, sum, DType::kF32, reduction.total, part.numel, options);
}

float* Reducer::scratch(UnitReduction& reduction, std::int64_t numel) {
  if (reduction.scratch_taken + numel <= plan_.scratch_numel()) {
    float* const memory = reduction.scratch + reduction.scratch_taken;
    reduction.scratch_taken += numel;
    return memory;
  }
  Arena& arena = reduction.overflow_scratch.emplace_back(Arena::plain("overflow scratch", numel * 4, device_.device));
  note_overflow(arena);
  return reinterpret_cast<float*>(arena.take(arena.bytes()));
}

void Reducer::reduce_nothing() {
  if (accumulates() || next_ == order_.size()) return;  // `finish` reduces them
  Entry& entry = entries_[order_[next_++]];
  if (entry.phase == Phase::kIdle) open(entry);
  completed_.push_back(entry.unit->index);
  reduce(entry);
}

void Reducer::finish(bool reduce_now, bool has_batch) {
  if (accumulates()) {
    copies_.flush();
    if (reduce_now) {
      for (int index : order_) reduce(entries_[index]);
      end_reductions();
    }
    for (Entry& entry : entries_) entry.taken = entry.told = 0;
    return;
  }
  // Reduces the units that are left, in order; a unit without a gradient takes part with zeros.
  for (; next_ < order_.size(); ++next_) {
    Entry& entry = entries_[order_[next_]];
    if (entry.phase == Phase::kIdle) open(entry);
    if (!entry.reduced && entry.phase == Phase::kFilling) completed_.push_back(entry.unit->index);
    reduce(entry);
  }
  reduce_late(has_batch);
  end_reductions();
  for (Entry& entry : entries_) entry.reduced = false;
  if (makes_tree()) ++round_;
  next_ = 0;
  if (!order_agreed_) agree_on_order();
  completed_.clear();
}

/// Reduces units once more whose gradients came after their reduction, on all ranks. If every gradient is waited for,
/// only a module's code makes a gradient late, and that code is the same on all ranks. Otherwise ranks that took
/// different branches may differ, so they exchange which units are late.
void Reducer::reduce_late(bool has_batch) {
  const bool may_differ = !expects_all_ && axes_.control->size() > 1;
  const std::vector<char> late = may_differ ? late_anywhere() : std::vector<char>();
  for (int index : order_) {
    Entry& entry = entries_[index];
    const bool is_idle = entry.phase == Phase::kIdle;
    char& was_late = was_late_[static_cast<std::size_t>(index)];
    if (has_batch) was_late = is_idle ? 0 : 1;
    if (may_differ ? !late[static_cast<std::size_t>(index)] : was_late == 0) continue;
    if (is_idle) open(entry);
    reduce(entry);
  }
}

/// Returns [unit]: whether any rank has a late gradient of the unit.
std::vector<char> Reducer::late_anywhere() const {
  std::vector<char> late(entries_.size());
  for (std::size_t i = 0; i < late.size(); ++i) late[i] = entries_[i].phase != Phase::kIdle;
  Collectives& control = *axes_.control;
  std::vector<char> all(late.size() * static_cast<std::size_t>(control.size()));
  throw_if_error(control.all_gather("late gradients", late.data(), all.data(), late.size()).wait());
  for (std::size_t i = 0; i < all.size(); ++i) late[i % late.size()] |= all[i];
  return late;
}

void Reducer::end_reductions() {
  if (over_ == started_) return;
  const Span span("end reductions", {}, &counts_.reduction_seconds);
  follow(0, 0);
}

void Reducer::agree_on_order() {
  std::vector<std::int32_t> order(completed_.begin(), completed_.end());
  TORCH_INTERNAL_ASSERT(order.size() == order_.size());
  throw_if_error(axes_.control->broadcast("bucket order", order.data(), order.size() * sizeof(order[0]), 0).wait());
  order_.assign(order.begin(), order.end());
  order_agreed_ = true;
}

void Reducer::reset() {
  copies_.drop();  // a backward that did not end may have left copies
  own_square_ = 0;
  if (device_squares_) device_squares_->forget();
  counts_.overflow_peak = counts_.overflow_bytes;
  has_copy_ = false;
  round_ = 0;
  backup_.reset();
  for (Entry& entry : entries_) {
    for (Feedback& feedback : entry.feedback) {
      if (feedback.method)
        // The next reduction is a step's first, even if the step's number stays the same.
        feedback.method->begin_step(0);
    }
    entry.has_sum = entry.has_own = false;
    entry.taken = entry.told = 0;
    entry.gradients.reset();
  }
}

bool Reducer::used(const FlatGroup& group, std::size_t parameter) const {
  return entries_[group.unit->index].gradients.used(group, parameter);
}

}  // namespace tessera
