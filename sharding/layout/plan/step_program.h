#pragma once

// See docs/glossary.md: unit.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

/// The order of a training step, defined once, in integers: which groups its passes visit and in which direction, which
/// records they read and write, and when ranks agree, exchange matrices and make values known.
///
/// MemoryPlan uses it to count what a step reads and writes (record_traffic.h). The planner uses it to write the script
/// of a predicted step, and StepWalk uses it to make steps. A program says what a step *may* visit: the code that makes
/// the step leaves out parameters that got no gradient.

/// The kinds of work that a visit does with a group.
enum class VisitWork : std::uint8_t {
  kMeasure,       ///< lars: the visit adds up norms of weights
  kLayerUpdates,  ///< lamb: as kMeasure; it also updates moments, and writes each element's update over its gradient
  kDirections,    ///< muon: updates momenta, and writes directions over the gradients
  kReadMasters,   ///< rules of whole tensors: reads masters, which the exchange sends to their owners
  kUpdate,        ///< updates elements by their rule, takes in results of matrices, and then publishes the group
  kSwapAverages,  ///< parameters and their averages change places; then the group is published
};

/// What a visit does with records of one kind: nothing, reads them, or writes them.
enum class Access : std::uint8_t { kNone, kRead, kWrite };

/// One group's turn in a pass.
struct Visit {
  std::int32_t unit = 0;   ///< index in MemoryPlan::units()
  std::int32_t group = 0;  ///< index among the groups that train, in the order of units
  VisitWork work = VisitWork::kUpdate;
  bool backward = false;         ///< visits records from the last to the first
  bool needs_gradients = false;  ///< offloaded sums of gradients are in memory for the visit, one unit's at a time
  Access parameters = Access::kNone, states = Access::kNone;
  friend bool operator==(const Visit&, const Visit&) = default;
};

/// The first pass is announced before backward. The code that makes the step announces this pass again when the pass
/// begins, since the used parameters are known then.
enum class StepOpKind : std::uint8_t {
  kRounds,    ///< microbatches before the last one (`begin`: how many), each with a forward and a backward of all units
  kForward,   ///< the forward of all units in the last microbatch
  kAnnounce,  ///< records of the visits [begin, end), which are one pass, are read ahead from here on
  kBackward,  ///< the backward of the last microbatch: all units, the last one first
  /// StepProgram::unit_ops, with their visits [begin, end), follow each unit's reduction (updates in backward)
  kUpdateInBackward,
  kAgree,         ///< ranks tell each other loss, norm and which parameters were used
  kDecide,        ///< decides whether the step is made, its rate, and the clipping of gradients
  kVisit,         ///< the visits [begin, end), in this order
  kAgreeOnNorms,  ///< ranks tell each other each layer's norms
  /// sends matrices or directions to owners and brings results back; makes the visits [begin, end) itself
  kExchange,
  kEndPass,    ///< no record is in use any more; changed records are written in the background
  kPublished,  ///< waits for published values
  kBarrier,    ///< ranks that share one copy of the parameters wait for each other
};

/// `begin`, `end`: a range of visits, if the comment on the kind mentions one.
struct StepOp {
  StepOpKind kind = StepOpKind::kForward;
  std::int64_t begin = 0, end = 0;
  friend bool operator==(const StepOp&, const StepOp&) = default;
};

/// One step.
struct StepProgram {
  std::vector<Visit> visits;
  std::vector<StepOp> ops;
  /// [unit]: the operations that follow the unit's reduction, where units are updated in backward (kUpdateInBackward);
  /// empty otherwise, and for units that do not train. The operations work on the norms and matrices of this unit
  /// alone.
  std::vector<std::vector<StepOp>> unit_ops;
  /// True: each unit's operations announce its records, pass by pass; when a unit is done, the first pass of the next
  /// unit is announced. False: all units are announced at once, since each record is visited once.
  bool announces_units = false;
  /// A skipped step ends with kDecide, and the next step has this program again. False on a GPU whose host does not
  /// wait for the decision: the operations that follow are made, and change no values.
  bool ends_when_skipped = true;
  std::span<const Visit> visits_of(const StepOp& op) const {
    return std::span(visits).subspan(static_cast<std::size_t>(op.begin), static_cast<std::size_t>(op.end - op.begin));
  }
};

/// The inputs that decide the order of a step (MemoryPlan::step_input).
struct StepInput {
  struct Group {
    std::int32_t unit = 0;
    bool of_matrices = false;
    /// whether the device that trains updates a part of the group; otherwise the CPU of a GPU's host updates all of it
    bool by_device = true;
  };
  /// The device that makes the step. Only this part of the input says whether the device is a GPU.
  struct Executor {
    bool queued = false;        ///< true for a GPU, whose host runs ahead of it
    bool host_updates = false;  ///< whether the CPU of its host updates state in the host's memory
  };
  /// Says whether there are records of a kind, and whether they lie in files.
  struct Records {
    bool exist = false, in_files = false;
  };
  std::vector<Group> groups;  ///< trainable groups, in the order of units
  std::int64_t rounds = 1;    ///< microbatches
  /// The work of the first of two passes. kDirections and kReadMasters go over groups of matrices, other work goes over
  /// all groups. kUpdate: a step has one pass.
  VisitWork first_work = VisitWork::kUpdate;
  bool first_reads_parameters = false, first_reads_states = false;  ///< PassPlan::first_pass
  Records parameters, states;
  bool gradients_below = false;
  bool updates_in_backward = false;
  bool publishes_behind = false;  ///< the next forward waits for published values, unit by unit
  bool shares_parameters = false;
  Executor executor;
};

/// Returns the programs of steps that follow each other: one, or two that take turns. A pass begins where the pass
/// before it ended, at the records that are still in memory. So a step whose passes go in another direction than those
/// of the step before has its own program.
std::vector<StepProgram> step_programs(const StepInput& input);

/// Returns the programs of Step::swap_averages, a pass between two steps. There is one program, or there are two that
/// take turns, as for steps. The pass begins where the step before ended.
std::vector<StepProgram> averages_programs(const StepInput& input);

}  // namespace tessera
