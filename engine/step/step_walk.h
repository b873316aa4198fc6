#pragma once

// See docs/glossary.md: lease, unit.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/memory/state_views.h"
#include "engine/step/agree/step_context.h"
#include "engine/step/publisher.h"
#include "sharding/carrier.h"
#include "sharding/compute_device.h"
#include "sharding/layout/plan/step_program.h"
#include "sharding/unit.h"

namespace tessera {

/// Makes steps in the order of the plan's programs (StepProgram), from a step's last backward on. It announces records,
/// goes from visit to visit, and opens and closes offloaded sums of gradients. It makes exchanges between ranks, and
/// makes new values known to the ranks that hold copies of them. If there are two programs, they alternate; only this
/// class knows which one comes next.
///
/// A derived class does the work of a visit: Update on the CPU, or DeviceUpdate on a GPU, where all work is queued. The
/// thread that trains makes all calls. Calls that exchange data are collective. They throw tessera::Error if a
/// collective fails, or if records cannot be read or written (74).
///
/// | call          | when                                      | what it walks                        |
/// |---------------|-------------------------------------------|--------------------------------------|
/// | `expect`      | a step's last backward begins             | the first announcement               |
/// | `update_unit` | in backward, a unit's sums are complete   | the unit's operations                |
/// | `finish`      | all units are updated in backward         | what follows the decision            |
/// | `update_all`  | after backward, the step is decided       | the program's visits and exchanges   |
/// | `swap`        | between two steps                         | the program that exchanges averages  |
class StepWalk {
 public:
  /// Call it when a step's last backward begins. All units are updated in this backward or after it. The function reads
  /// ahead the first records. `order`: the units' indices in the order in which they are updated, if they are updated
  /// in backward.
  void expect(std::span<const int> order);
  /// Call it when backward has updated all units. Returns when their values are known to all ranks, or are being sent.
  void finish();

 protected:
  /// `waits` measures how long a GPU's queue waits for collectives.
  explicit StepWalk(const StepContext& context, QueueClock* waits = nullptr);
  StepWalk(const StepWalk&) = delete;
  StepWalk& operator=(const StepWalk&) = delete;
  /// Drops the sums that are still held after a failure, since they are not needed.
  ~StepWalk() { sums_.drop(); }

  /// Makes a step that is decided. The next step uses the other program, if there are two.
  void update_all();
  /// Updates one unit in backward. REQUIRES: the unit's sums stay in memory until this returns.
  void update_unit(Unit& unit);
  /// Exchanges parameters and averages. The next call or step uses the other program, if there are two.
  void swap();

  /// Returns StepProgram::ends_when_skipped: whether the decision must be known before `update_all`. `update_all` is
  /// then not called for a skipped step.
  bool ends_when_skipped() const { return programs_.front().ends_when_skipped; }
  bool updates_in_backward() const { return in_backward_; }
  /// Returns the index of the unit that `update_unit` updates now; nothing if all units are updated together.
  std::optional<std::int32_t> unit_under_way() const { return unit_; }
  /// Returns the index of the unit to which the visits of a pass belong; nothing if the pass goes over all units.
  std::optional<std::int32_t> unit_of(std::span<const Visit> pass) const {
    return in_backward_ ? std::optional(pass.front().unit) : std::nullopt;
  }
  /// Returns the seconds that were spent so far on publishing updated values.
  double publication_seconds() const { return publisher_.seconds(); }

 private:
  /// Begins a pass, whose records are read ahead. If `is_decided` is false, the step is not decided yet. Then
  /// transfers of data other than records begin too, and all parameters are assumed to be used, as they nearly always
  /// are.
  virtual void announce(std::span<const Visit> visits, bool is_decided) = 0;
  /// It is called when no record is in use any more.
  virtual void end_pass() = 0;
  /// Returns whether a visit updates its group. If it does and Visit::needs_gradients is set, the group's gradients are
  /// opened before the visit.
  virtual bool is_updated(const Visit& visit) const = 0;
  /// Does the work of a visit. After it, the updated values are published.
  virtual void make(const Visit& visit) = 0;
  /// Exchanges the norms that were measured during visits: the norms of all units, or in backward the norms of the unit
  /// under way.
  virtual void agree_on_norms() = 0;
  /// Sends matrices to their owners, and brings results back. `visits`: the visits whose masters the exchange reads;
  /// empty under muon.
  virtual void exchange(std::span<const Visit> visits) = 0;

  FlatGroup& flat_of(const Visit& visit) const { return *flats_[static_cast<std::size_t>(visit.group)]; }
  const StepProgram& next_of(const std::vector<StepProgram>& programs) const {
    return programs[turn_ % programs.size()];
  }
  std::span<const Visit> visits_of(int unit) const;
  void expect_next_unit();
  void walk(const std::vector<StepProgram>& programs);
  void follow(const StepProgram& program, const StepOp& op);
  void visit_all(std::span<const Visit> visits);
  void begin_gradients(const StepProgram& program);
  void hold_gradients(const Visit& visit);
  void let_gradients_go();

  Publisher publisher_;
  Carrier* const gradients_;       ///< null if no gradients are offloaded
  std::vector<FlatGroup*> flats_;  ///< trainable groups, in the order of units
  const std::vector<StepProgram> programs_, averages_;
  const bool in_backward_;
  std::optional<std::int32_t> unit_;  ///< the value of unit_under_way()
  std::size_t turn_ = 0;              ///< index of the program that is used next; if there are two, they alternate
  std::vector<Visit> expected_;       ///< visits in backward, in the order given to `expect`
  std::vector<int> order_;            ///< units that announce their records (StepProgram::announces_units), in order
  std::size_t announced_ = 0;         ///< number of these units that have announced their records
  Unit* held_ = nullptr;              ///< the unit whose gradients `sums_` holds
  Lease sums_;                        ///< lease of the sums, if gradients are offloaded
};

inline Direction direction_of(const Visit& visit) {
  return visit.backward ? Direction::kBackward : Direction::kForward;
}
/// Returns the use that a visit makes of records of a kind. REQUIRES: `kind` is not kAll.
inline Access access_of(const Visit& visit, StateKind kind) {
  return kind == StateKind::kParameters ? visit.parameters : visit.states;
}
/// Returns the kind of records that a visit goes through.
StateKind kind_of(const Visit& visit);
StateUse use_of(const Visit& visit);

}  // namespace tessera
