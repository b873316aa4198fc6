#include "engine/asynchronous/hogwild_values.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "engine/asynchronous/wild_words.h"
#include "engine/memory/state_views.h"
#include "tessera/span.h"

namespace tessera {

HogwildValues::HogwildValues(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, PeerBoard& board)
    : PushedParameters(board),
      sharing_(plan.update().outer.asynchronous.states),
      mesh_(plan.placement().mesh),
      memory_(Arena::part_of_common("states", plan.use()[MemoryCategory::kOptimizer], board.group())) {
  std::size_t most = 0;
  for_each_trainable(units, [&](FlatGroup& flat) {
    Group& group = groups_.emplace_back();
    group.flat = &flat;
    group.first_parameter = parameters_;
    parameters_ += flat.parameters.size();
    most = std::max(most, flat.parameters.size());
    place(group, plan);
  });
  memory_.expect_full();
  before_counts_.resize(most);
  control_ = Arena::common("counts of updates",
                           static_cast<std::int64_t>(parameters_ * sizeof(std::int64_t)) * board.size(), board.group());
  auto* const counts = reinterpret_cast<std::int64_t*>(control_.data());
  for (Group& group : groups_) {
    for (std::size_t i = 0; i < group.pieces.size(); ++i) {
      const std::size_t of = has_own_states() ? static_cast<std::size_t>(board.rank()) : i;
      group.pieces[i].counts = counts + of * parameters_ + group.first_parameter;
    }
  }
  board_.meet("states of hogwild ranks");
}

/// Takes memory for this rank's states of a group, and makes a view of each piece. The memory of all ranks has the same
/// layout.
void HogwildValues::place(Group& group, const MemoryPlan& plan) {
  FlatGroup& flat = *group.flat;
  const Extent whole{0, flat.layout.numel()}, own = flat.optimizer_part;
  const StateFormats& formats = flat.records.state().states;
  const int pieces = has_own_states() ? 1 : board_.size();
  for (int i = 0; i < pieces; ++i) {
    Piece& piece = group.pieces.emplace_back();
    piece.view = flat.without_module();
    piece.view.unit = flat.unit;
    piece.view.optimizer_part = has_own_states() ? whole : owned(plan.placement().optimizer, mesh_.of(i), whole.numel);
    piece.view.parameter_part = piece.view.optimizer_part;
    piece.view.shard = flat.full + piece.view.optimizer_part.offset * flat.element_bytes();
  }
  for (std::size_t state = 0; state < formats.size(); ++state) {
    std::byte* const data = memory_.take(4 * (has_own_states() ? whole.numel : own.numel));
    flat.state[state].data = has_own_states() ? data + 4 * own.offset : data;
    for (int i = 0; i < pieces; ++i) {
      const std::int64_t there = has_own_states() ? 0 : (i - board_.rank()) * memory_.bytes();
      group.pieces[static_cast<std::size_t>(i)].view.state[state].data = data + there;
    }
  }
}

std::span<std::int64_t> HogwildValues::counts(const FlatGroup& group) {
  const auto found = std::ranges::find(groups_, &group, &Group::flat);
  const std::size_t piece = has_own_states() ? 0 : static_cast<std::size_t>(board_.rank());
  return {found->pieces[piece].counts, group.parameters.size()};
}

GradientAges HogwildValues::push(const ShardRule& rule, const PushRates& with) {
  const Span span("push");
  board_.look();
  GradientAges ages;
  ages.add(steps_of_others() - seen_);
  for (const Group& group : groups_) {
    const auto used = with.used.subspan(group.first_parameter, group.flat->parameters.size());
    if (std::ranges::find(used, char{1}) == used.end()) continue;
    // Each rank begins at its own part, so that the ranks do not all write the same cache lines at the same time.
    const std::size_t pieces = group.pieces.size(), first = static_cast<std::size_t>(board_.rank());
    for (std::size_t k = 0; k < pieces; ++k)
      update(group, group.pieces[(first + k) % pieces], rule.elements(), {with.rates, used});
  }
  end_step();
  return ages;
}

void HogwildValues::skip() {
  board_.look();
  end_step();
}

void HogwildValues::end_step() {
  board_.note_pushed(step());
  seen_ = steps_of_others();
}

std::int64_t HogwildValues::steps_of_others() const {
  std::int64_t steps = 0;
  for (int q = 0; q < board_.size(); ++q) steps += q == board_.rank() ? 0 : board_.pushed(q);
  return steps;
}

void HogwildValues::update(const Group& group, const Piece& piece, const ElementUpdate& rule, const PushRates& with) {
  for (std::size_t i = 0; i < with.used.size(); ++i) {
    // Each update of a parameter has its own number; no update by another rank has the same number.
    before_counts_[i] = std::atomic_ref(piece.counts[i]).fetch_add(with.used[i] ? 1 : 0, std::memory_order_relaxed);
  }
  runs_.clear();
  rule.find_runs(*group.flat, piece.view.optimizer_part, with.used, before_counts_.data(), runs_);
  for (const UpdateRun& run : runs_) {
    for (std::int64_t begin = run.extent.offset; begin < run.extent.end(); begin += kBlock) {
      UpdateRun block = run;
      block.extent = {begin, std::min(kBlock, run.extent.end() - begin)};
      update_block(piece.view, rule, with.rates, block);
    }
  }
}

void HogwildValues::update_block(const FlatGroup& view, const ElementUpdate& rule, const UpdateRates& rates,
                                 const UpdateRun& block) {
  const std::int64_t n = block.extent.numel;
  OptimizerSlice slice = optimizer_slice(view, states_in_memory(view, block.extent));
  float* const values = slice.master.data();
  read_words(values, before_.data(), n);
  std::memcpy(after_.data(), before_.data(), static_cast<std::size_t>(n) * 4);
  slice.master = {after_.data(), static_cast<std::size_t>(n)};
  std::array<float*, kMostStates> states{};
  const std::size_t shared = has_own_states() ? 0 : view.records.state().states.size();
  for (std::size_t i = 0; i < shared; ++i) {
    states[i] = reinterpret_cast<float*>(slice.states[i].data.data());
    read_words(states[i], states_before_[i].data(), n);
    std::memcpy(states_after_[i].data(), states_before_[i].data(), static_cast<std::size_t>(n) * 4);
    slice.states[i].data = std::as_writable_bytes(std::span(states_after_[i].data(), static_cast<std::size_t>(n)));
  }
  rule.update(rule.optimizer_of(block), slice, rates, block);
  merge_words(values, before_.data(), after_.data(), n);
  for (std::size_t i = 0; i < shared; ++i) write_words(states[i], states_before_[i].data(), states_after_[i].data(), n);
}

/// Returns the memory of a state of a whole group. This memory belongs to `rank` alone.
float* HogwildValues::state_of(const Group& group, std::size_t state, int rank) const {
  return reinterpret_cast<float*>(group.pieces[0].view.state[state].data + (rank - board_.rank()) * memory_.bytes());
}

void HogwildValues::bring_together() {
  board_.meet("hogwild ranks come together");
  if (has_own_states()) {
    // Each rank first reads its part of all ranks' states, and writes the means into its own states. Then it copies the
    // other parts of its states from the ranks that have averaged them.
    for (const Group& group : groups_) average_own_part(group);
    board_.meet("hogwild states");
    take_parts_of_others();
    board_.meet("hogwild states");
    take_counts();
  }
  board_.meet("hogwild ranks come together");
}

void HogwildValues::average_own_part(const Group& group) {
  const auto* const counts = reinterpret_cast<const std::int64_t*>(control_.data()) + group.first_parameter;
  const std::size_t states = group.flat->records.state().states.size();
  for (std::size_t parameter = 0; parameter < group.flat->parameters.size(); ++parameter) {
    const Extent own = intersect(group.flat->layout.extent(parameter), group.flat->optimizer_part);
    std::vector<int> updated;
    for (int q = 0; q < board_.size(); ++q) {
      if (counts[static_cast<std::size_t>(q) * parameters_ + parameter] > 0) updated.push_back(q);
    }
    if (updated.empty()) continue;
    for (std::size_t state = 0; state < states; ++state) {
      float* const mean = state_of(group, state, board_.rank());
      for (std::int64_t i = own.offset; i < own.end(); ++i) {
        double sum = 0;
        for (const int q : updated) sum += static_cast<double>(state_of(group, state, q)[i]);
        mean[i] = static_cast<float>(sum / static_cast<double>(updated.size()));
      }
    }
  }
}

void HogwildValues::take_parts_of_others() {
  for (const Group& group : groups_) {
    const std::int64_t part = group.flat->optimizer_part.numel;
    for (std::size_t state = 0; state < group.flat->records.state().states.size(); ++state) {
      for (int q = 0; q < board_.size(); ++q) {
        if (q == board_.rank()) continue;
        std::memcpy(state_of(group, state, board_.rank()) + q * part, state_of(group, state, q) + q * part,
                    static_cast<std::size_t>(part) * 4);
      }
    }
  }
}

/// For each parameter, all ranks take the largest count of any rank. No other code writes counts during this call, and
/// every rank writes the same largest count. So a count may be read before or after it is written.
void HogwildValues::take_counts() {
  auto* const counts = reinterpret_cast<std::int64_t*>(control_.data());
  for (std::size_t parameter = 0; parameter < parameters_; ++parameter) {
    std::int64_t largest = 0;
    for (int q = 0; q < board_.size(); ++q) {
      const std::size_t of = static_cast<std::size_t>(q) * parameters_ + parameter;
      largest = std::max(largest, std::atomic_ref(counts[of]).load(std::memory_order_relaxed));
    }
    std::int64_t& own = counts[static_cast<std::size_t>(board_.rank()) * parameters_ + parameter];
    std::atomic_ref(own).store(largest, std::memory_order_relaxed);
  }
}

void HogwildValues::adopt() {
  board_.meet("hogwild values");
  if (has_own_states()) take_parts_of_others();
  board_.meet("hogwild values");
}

}  // namespace tessera
