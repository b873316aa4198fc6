#include "runtime/comm/call.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace tessera {

std::string_view name_of(Operation operation) {
  switch (operation) {
    case Operation::kNone:
      return "nothing";
    case Operation::kAllocate:
      return "allocate";
    case Operation::kAllocateCommon:
      return "allocate_common";
    case Operation::kAllGather:
      return "all_gather";
    case Operation::kReduceScatter:
      return "reduce_scatter";
    case Operation::kAllReduce:
      return "all_reduce";
    case Operation::kBroadcast:
      return "broadcast";
    case Operation::kAllToAll:
      return "all_to_all";
    case Operation::kBarrier:
      return "barrier";
  }
  return "?";
}

std::string CallSignature::describe() const {
  if (operation == Operation::kNone) return "no call yet";
  std::string text(name_of(operation));
  if (!label_text().empty()) text += " '" + std::string(label_text()) + "'";
  const bool sums = operation == Operation::kReduceScatter || operation == Operation::kAllReduce;
  if (operation != Operation::kBarrier)
    text += " of " + std::to_string(count) + " " + (sums ? std::string(name_of(dtype)) : "bytes");
  if (operation == Operation::kBroadcast) text += " from " + std::to_string(root);
  if (common) text += " in common memory";
  return text + " (#" + std::to_string(sequence) + ")";
}

CallSignature make_signature(Operation operation, std::string_view label, DType dtype, std::uint64_t count,
                             std::uint32_t root) {
  CallSignature call;
  call.operation = operation;
  call.dtype = dtype;
  call.count = count;
  call.root = root;
  std::copy_n(label.data(), std::min(label.size(), CallSignature::kLabelBytes - 1), call.label.data());
  return call;
}

std::string where(const CallSignature& call) {
  std::string text(call.label_text());
  if (!text.empty()) text += " ";
  return text + std::string(name_of(call.operation)) + " #" + std::to_string(call.sequence);
}

bool operator==(const CallSignature& a, const CallSignature& b) {
  return std::memcmp(&a, &b, sizeof(CallSignature)) == 0;
}

// Multiply and rotate (as in xxHash and its kin), in four lanes that do not wait for one another.
std::uint64_t digest_of(const CallSignature& call) {
  constexpr std::uint64_t kFactor = 0x9e3779b185ebca87u;
  constexpr std::size_t kLanes = 4, kWords = sizeof(CallSignature) / sizeof(std::uint64_t);
  static_assert(kWords % kLanes == 0);
  const auto mix = [](std::uint64_t digest, std::uint64_t word) { return std::rotl((digest ^ word) * kFactor, 31); };
  std::array<std::uint64_t, kWords> words;
  std::memcpy(words.data(), &call, sizeof call);
  std::array<std::uint64_t, kLanes> lanes = {1, 2, 3, 4};
  for (std::size_t i = 0; i < kWords; i += kLanes)
    for (std::size_t k = 0; k < kLanes; ++k) lanes[k] = mix(lanes[k], words[i + k]);
  return mix(mix(mix(lanes[0], lanes[1]), lanes[2]), lanes[3]) * kFactor;
}

}  // namespace tessera
