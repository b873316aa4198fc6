#include "planner/script/script_writer.h"

#include <algorithm>

namespace tessera {
namespace {

bool is_meeting(Channel channel) { return channel == Channel::kShardMeeting || channel == Channel::kReplicateMeeting; }

}  // namespace

int ScriptWriter::ranks(Axis axis) const {
  const MeshPosition& mesh = plan_.placement().mesh;
  return axis == Axis::kShard ? mesh.shard_size : mesh.replicate_size;
}

void ScriptWriter::work(Spending spending, double seconds, const char* what, int unit) {
  script_.instructions.push_back({Instruction::Kind::kWork, spending, seconds, kNoCall, what, unit});
}

int ScriptWriter::post(Channel channel, const CallCost& cost, const char* what, int unit) {
  const auto number = static_cast<int>(script_.calls.size());
  WireCall& call = script_.calls.emplace_back(WireCall{channel, cost, 0, 0, what, unit});
  script_.instructions.push_back({Instruction::Kind::kPost, Spending::kCompute, 0, number, what, unit});
  if (channel == Channel::kWorld) script_.agreement = script_.agreement + cost;
  if (channel == Channel::kWorld || is_meeting(channel)) return number;
  const Axis axis = channel == Channel::kReplicate ? Axis::kReplicate : Axis::kShard;
  count(axis, cost);
  const Links& links = this->links(axis);
  const double taken =
      links.cpu_s_per_byte * static_cast<double>(cost.sent_bytes) + links.coding.load * cost.coding_s + cost.sum_s;
  if (cost.transfer_s == 0) return number;
  call.drag = std::max(0.0, cost.busy_transfer_s / cost.transfer_s - 1);
  call.load = std::min(taken / cost.transfer_s, 1 + call.drag);
  return number;
}

void ScriptWriter::wait(int call, Spending spending) {
  const int unit = script_.calls[static_cast<std::size_t>(call)].unit;
  script_.instructions.push_back({Instruction::Kind::kWait, spending, 0, call, "wait", unit});
}

void ScriptWriter::sum(Axis axis, const CallCost& cost, int unit) {
  count(axis, cost);
  use(axis).own_work_s += cost.seconds();
  work(Spending::kReduction, cost.seconds(), "sum", unit);
}

void ScriptWriter::count(Axis axis, const CallCost& cost) {
  AxisUse& use = this->use(axis);
  ++use.calls;
  use.sent_bytes += cost.sent_bytes;
  use.latency_s += cost.latency_s;
  use.transfer_s += cost.transfer_s;
}

}  // namespace tessera
