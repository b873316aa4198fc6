#pragma once

// See docs/glossary.md: agreement, unit.

#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "planner/measured/links.h"
#include "planner/measured/step_profile.h"
#include "sharding/layout/plan/memory_plan.h"

namespace tessera {

/// The two axes of the mesh.
enum class Axis : std::uint8_t { kShard, kReplicate };

/// The queues of calls: a channel makes one call at a time, in the order in which the calls were posted. Each group of
/// ranks has its own channels.
enum class Channel : std::uint8_t {
  kGather,            ///< all-gathers on the shard axis; they share a wire with kReduce
  kReduce,            ///< reductions on the shard axis
  kReplicate,         ///< calls on the replicate axis
  kShardMeeting,      ///< barriers on the shard axis, which send nothing
  kReplicateMeeting,  ///< barriers on the replicate axis
  kWorld,             ///< the agreement of all ranks in a step
};
constexpr std::size_t kChannels = 6;

/// The kinds of time that a rank spends. The rank works in the first four kinds, and waits in the others. kReduction is
/// the time in which the rank computes its share of a sum, if no background thread does this.
enum class Spending : std::uint8_t { kCompute, kUpdate, kRest, kReduction, kGather, kPublish, kAgreement };
constexpr std::size_t kSpendings = 7;

/// A call of a group's transport. A call begins when all ranks of the group have joined it and the channel's previous
/// call has ended. The call ends for all ranks at the same time.
struct WireCall {
  Channel channel = Channel::kGather;
  CallCost cost;
  /// The seconds of compute that a rank loses for each second of the transfer, from 0 to 1 + drag
  /// (Links::cpu_s_per_byte, CodingFit).
  double load = 0;
  double drag = 0;  ///< relative increase of the transfer's time while a rank of the group works (OperationFit)
  const char* what = "";
  int unit = -1;
};

/// One instruction of a rank. All ranks have the same instructions in the same order.
struct Instruction {
  enum class Kind : std::uint8_t {
    kWork,  ///< computes for `seconds`
    kPost,  ///< joins `call` without waiting for its end
    kWait,  ///< waits for the end of `call`
  };
  Kind kind = Kind::kWork;
  Spending spending = Spending::kCompute;
  double seconds = 0;
  int call = -1;
  const char* what = "";  ///< name of the instruction in a trace
  int unit = -1;          ///< index of the unit to which the instruction belongs; -1: it belongs to no unit
};

/// The use of an axis in a step, by one rank.
struct AxisUse {
  std::int64_t calls = 0;
  std::int64_t sent_bytes = 0;
  double latency_s = 0, transfer_s = 0;  ///< sums over all calls, each as if no other call used the wire
  /// The seconds in which the rank itself computes sums in shared memory. They are contained in `latency_s` and
  /// `transfer_s`.
  double own_work_s = 0;
};

/// The instructions of each rank for a step, from the second step on: its work, the calls that it starts, and its waits
/// for calls. Their order depends only on the plan and the program, never on times, since all ranks must make a group's
/// calls in the same order. So the order is known before StepClock simulates the script.
struct StepScript {
  std::vector<Instruction> instructions;
  std::vector<WireCall> calls;
  AxisUse shard, replicate;
  CallCost agreement;  ///< cost of the step's agreement, which is a call of all ranks
  /// Sentences that name the parts of the plan whose time is not predicted.
  std::vector<std::string> left_out;
};

/// Returns the script of a step. Errors: those of units_of; 64 if the step has more than 2^21 uses of units.
absl::StatusOr<StepScript> script_of_step(const MemoryPlan& plan, const StepProfile& profile, const MeshLinks& links);

}  // namespace tessera
