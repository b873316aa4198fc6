#pragma once

// See docs/glossary.md: unit.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

/// This header defines the order of a training step, in integers. A program lists the groups that the passes of a step
/// visit, the direction of each pass, and the records that it reads and writes. It also lists when ranks agree,
/// exchange matrices, and publish values.
///
/// MemoryPlan uses the program to count the bytes that a step reads and writes (record_traffic.h). The planner uses it
/// to write the script of a predicted step, and StepWalk uses it to make steps. A program has all groups that a step
/// *may* visit: the code that makes the step leaves out parameters that got no gradient.

/// The kinds of work that a visit does with a group.
enum class VisitWork : std::uint8_t {
  kMeasure,       ///< lars: the visit adds up norms of weights
  kLayerUpdates,  ///< lamb: like kMeasure; the visit also updates moments, and writes each element's update over its
                  ///< gradient
  kDirections,    ///< muon: the visit updates momenta, and writes directions over the gradients
  kReadMasters,   ///< rules of whole tensors: the visit reads masters, which the exchange sends to their owners
  kUpdate,        ///< the visit updates elements by their rule, applies results of matrices, and then publishes the
                  ///< group
  kSwapAverages,  ///< the visit exchanges parameters and averages, and then publishes the group
};

/// The use of records of one kind by a visit: it does not use them, reads them, or writes them.
enum class Access : std::uint8_t { kNone, kRead, kWrite };

/// The visit of one group in a pass.
struct Visit {
  std::int32_t unit = 0;   ///< index in MemoryPlan::units()
  std::int32_t group = 0;  ///< index among the groups that train, in the order of units
  VisitWork work = VisitWork::kUpdate;
  bool backward = false;         ///< whether records are visited from the last to the first
  bool needs_gradients = false;  ///< whether offloaded sums of gradients must be in memory for the visit; one unit's
                                 ///< sums are in memory at a time
  Access parameters = Access::kNone, states = Access::kNone;
  friend bool operator==(const Visit&, const Visit&) = default;
};

/// The kinds of operations. The first pass is announced before backward. When the pass begins, the code that makes the
/// step announces it again, since the used parameters are known then.
enum class StepOpKind : std::uint8_t {
  kRounds,    ///< the microbatches before the last one (`begin`: their number), each with a forward and a backward of
              ///< all units
  kForward,   ///< the forward of all units in the last microbatch
  kAnnounce,  ///< records of the visits [begin, end), which are one pass, are read ahead from here on
  kBackward,  ///< the backward of the last microbatch: all units, the last one first
  /// updates in backward: StepProgram::unit_ops, with their visits [begin, end), follow each unit's reduction
  kUpdateInBackward,
  kAgree,         ///< ranks tell each other the loss, the norm, and which parameters were used
  kDecide,        ///< the decision whether the step is made, its rate, and the clipping of gradients
  kVisit,         ///< the visits [begin, end), in this order
  kAgreeOnNorms,  ///< ranks tell each other the norms of each layer
  /// matrices or directions are sent to owners, and results are sent back; this operation makes the visits [begin, end)
  /// itself
  kExchange,
  kEndPass,    ///< the end of a pass: no record is in use any more, and changed records are written in the background
  kPublished,  ///< the step waits for published values
  kBarrier,    ///< ranks that share one copy of the parameters wait for each other
};

/// An operation. [`begin`, `end`) is a range of visits, if the comment on the kind mentions such a range.
struct StepOp {
  StepOpKind kind = StepOpKind::kForward;
  std::int64_t begin = 0, end = 0;
  friend bool operator==(const StepOp&, const StepOp&) = default;
};

/// The program of one step.
struct StepProgram {
  std::vector<Visit> visits;
  std::vector<StepOp> ops;
  /// [unit]: the operations that follow the unit's reduction if units are updated in backward (kUpdateInBackward). The
  /// list is empty otherwise, and for units that do not train. The operations use only the norms and matrices of this
  /// unit.
  std::vector<std::vector<StepOp>> unit_ops;
  /// If it is true, each unit's operations announce its records, pass by pass. When a unit is done, the first pass of
  /// the next unit is announced. If it is false, all units are announced at once, since each record is visited once.
  bool announces_units = false;
  /// If it is true, a skipped step ends with kDecide, and the next step uses this program again. It is false on a GPU
  /// whose host does not wait for the decision: a skipped step then makes the later operations too, and they change no
  /// values.
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
  /// The device that makes the step. Only this member of the input tells whether the device is a GPU.
  struct Executor {
    bool queued = false;        ///< whether the device is a GPU; the host runs ahead of a GPU
    bool host_updates = false;  ///< whether the CPU of the device's host updates state in the host's memory
  };
  /// Whether there are records of a kind, and whether they lie in files.
  struct Records {
    bool exist = false, in_files = false;
  };
  std::vector<Group> groups;  ///< trainable groups, in the order of units
  std::int64_t rounds = 1;    ///< number of microbatches
  /// The work of the first of two passes, or kUpdate if a step has only one pass. kDirections and kReadMasters go over
  /// groups of matrices; other work goes over all groups.
  VisitWork first_work = VisitWork::kUpdate;
  bool first_reads_parameters = false, first_reads_states = false;  ///< PassPlan::first_pass
  Records parameters, states;
  bool gradients_below = false;
  bool updates_in_backward = false;
  bool publishes_behind = false;  ///< whether the next forward waits for published values, unit by unit
  bool shares_parameters = false;
  Executor executor;
};

/// Returns the programs of steps that follow each other: one program, or two that alternate. A pass begins where the
/// pass before it ended, at the records that are still in memory. There are therefore two programs if passes go in
/// other directions than those of the step before.
std::vector<StepProgram> step_programs(const StepInput& input);

/// Returns the programs of Step::swap_averages, a pass between two steps. As for steps, there is one program, or there
/// are two that alternate. The pass begins where the step before it ended.
std::vector<StepProgram> averages_programs(const StepInput& input);

}  // namespace tessera
