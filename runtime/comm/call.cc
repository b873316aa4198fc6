#define XXH_INLINE_ALL  // the length is constant, so the hash is inlined as some ten instructions
#include "runtime/comm/call.h"

#include <xxhash.h>

#include <algorithm>
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

std::uint64_t digest_of(const CallSignature& call) { return XXH3_64bits(&call, sizeof call); }

}  // namespace tessera
