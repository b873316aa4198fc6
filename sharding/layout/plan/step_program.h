#pragma once

// See docs/glossary.md: unit.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

/// The order of a training step, said once and in integers: which groups its passes visit and in which direction, which
/// records they read and write, and when ranks agree, exchange matrices and make values known.
///
/// MemoryPlan counts with it what a step reads and writes (record_traffic.h), the planner writes the script of a
/// predicted step along it, and StepWalk makes steps by it. A program says what a step *may* visit: the code that makes
/// the step leaves out parameters that got no gradient.

/// What a visit does with a group.
enum class VisitWork : std::uint8_t {
  kMeasure,       ///< lars: the visit adds up norms of weights
  kLayerUpdates,  ///< lamb: the same, while moments move and each element's update takes the gradient's place
  kDirections,    ///< muon: momenta move, and directions take the gradients' place
  kReadMasters,   ///< rules of whole tensors: the exchange takes masters to their owners
  kUpdate,        ///< updates elements by their rule, takes in results of matrices, and then publishes the group
  kSwapAverages,  ///< parameters and their averages change places; then the group is published
};

/// What a visit does with records of one kind.
enum class Access : std::uint8_t { kNone, kRead, kWrite };

/// One group's turn in a pass.
struct Visit {
  std::int32_t unit = 0;   ///< MemoryPlan::input().units
  std::int32_t group = 0;  ///< index among the groups that train, in the order of units
  VisitWork work = VisitWork::kUpdate;
  bool backward = false;         ///< visits records from the last to the first
  bool needs_gradients = false;  ///< sums of gradients that lie below memory are open meanwhile, a unit's at a time
  Access parameters = Access::kNone, states = Access::kNone;
  friend bool operator==(const Visit&, const Visit&) = default;
};

/// The first pass is announced before backward. Who makes the step announces it again when it begins, since it is then
/// known which parameters are used.
enum class StepOpKind : std::uint8_t {
  kRounds,    ///< `begin` microbatches before the last one: in each all units forward, and then all backward
  kForward,   ///< all units in the last microbatch
  kAnnounce,  ///< records of the visits [begin, end), which are one pass, are read ahead from here on
  kBackward,  ///< all units in the last microbatch, the last one first
  /// StepProgram::unit_ops, with their visits [begin, end), follow each unit's reduction (updates in backward)
  kUpdateInBackward,
  kAgree,         ///< ranks tell each other loss, norm and which parameters were used
  kDecide,        ///< decides whether the step is made, with which rate, and how gradients are clipped
  kVisit,         ///< the visits [begin, end), in this order
  kAgreeOnNorms,  ///< ranks tell each other each layer's norms
  /// sends matrices or directions to owners and brings results back; makes the visits [begin, end) itself
  kExchange,
  kEndPass,    ///< no record is in use; changed records are written in the background
  kPublished,  ///< waits for published values
  kBarrier,    ///< ranks that share one copy of the parameters wait for each other
};

/// `begin`, `end`: of visits, where the kind says so.
struct StepOp {
  StepOpKind kind = StepOpKind::kForward;
  std::int64_t begin = 0, end = 0;
  friend bool operator==(const StepOp&, const StepOp&) = default;
};

/// One step.
struct StepProgram {
  std::vector<Visit> visits;
  std::vector<StepOp> ops;
  /// [unit]: what follows a unit's own reduction, where units are updated in backward (kUpdateInBackward); else empty,
  /// as for units that do not train. All in it is about this unit alone: norms that ranks agree on, and matrices.
  std::vector<std::vector<StepOp>> unit_ops;
  /// Whether each unit's operations announce its records, pass by pass; the next unit's first pass is announced when a
  /// unit is done. False: all units are announced at once, since each record comes once.
  bool announces_units = false;
  /// A skipped step ends with kDecide, and the next step has this program again. False on a GPU whose host does not
  /// wait for the decision: the operations that follow are made, and change no values.
  bool ends_when_skipped = true;
  std::span<const Visit> visits_of(const StepOp& op) const {
    return std::span(visits).subspan(static_cast<std::size_t>(op.begin), static_cast<std::size_t>(op.end - op.begin));
  }
};

/// All that decides the order of a step (MemoryPlan::step_input).
struct StepInput {
  struct Group {
    std::int32_t unit = 0;
    bool of_matrices = false;
    /// whether the device that trains updates a part of the group; otherwise the CPU of a GPU's host updates all of it
    bool by_device = true;
  };
  /// The device that makes the step. This alone knows of a GPU.
  struct Executor {
    bool queued = false;        ///< true for a GPU, whose host runs ahead of it
    bool host_updates = false;  ///< whether the CPU of its host updates state in the host's memory
  };
  /// Whether a kind of records is there, and whether its records lie in files.
  struct Records {
    bool exist = false, in_files = false;
  };
  std::vector<Group> groups;  ///< trainable groups, in the order of units
  std::int64_t rounds = 1;    ///< microbatches
  /// The work of the first of two passes. kDirections and kReadMasters go over groups of matrices, others over all
  /// groups. kUpdate: a step has one pass.
  VisitWork first_work = VisitWork::kUpdate;
  bool first_reads_parameters = false, first_reads_states = false;  ///< MemoryPlan::first_pass_of_matrices
  Records parameters, states;
  bool gradients_below = false;
  bool updates_in_backward = false;
  bool publishes_behind = false;  ///< the next forward waits for values of the units that it reads
  bool shares_parameters = false;
  Executor executor;
};

/// Returns the programs of steps that follow each other: one, or two that take turns. A pass goes on where the one
/// before it ended, at the records that are in memory still, so a step whose passes go in another direction than those
/// of the step before has a program of its own.
std::vector<StepProgram> step_programs(const StepInput& input);

/// Returns the programs of Step::swap_averages, a pass between two steps. There is one, or there are two that take
/// turns, like those of steps. It goes on where the step before ended.
std::vector<StepProgram> averages_programs(const StepInput& input);

}  // namespace tessera
