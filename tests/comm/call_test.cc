// Tests the digests by which ranks compare their calls.

#include "runtime/comm/call.h"

#include <gmock/gmock.h>

#include <cstring>
#include <unordered_map>
#include <utility>

namespace tessera {
namespace {

constexpr int kBits = 8 * sizeof(CallSignature);

CallSignature flipped(CallSignature call, int first, int second) {
  unsigned char bytes[sizeof call];
  std::memcpy(bytes, &call, sizeof call);
  for (int bit : {first, second}) bytes[bit / 8] ^= static_cast<unsigned char>(1u << (bit % 8));
  std::memcpy(&call, bytes, sizeof call);
  return call;
}

// Two changed bits must not cancel each other in the digest, wherever they are in the signature. `first == second`
// leaves the call unchanged.
TEST(CallSignature, DigestsOfSignaturesThatDifferInTwoBitsDiffer) {
  const CallSignature call = make_signature(Operation::kReduceScatter, "blocks.3", DType::kBF16, 4096, 1);
  std::unordered_map<std::uint64_t, std::pair<int, int>> seen;
  for (int first = 0; first < kBits; ++first)
    for (int second = first == 0 ? 0 : first + 1; second < kBits; ++second) {
      const auto [other, is_new] = seen.try_emplace(digest_of(flipped(call, first, second)), first, second);
      ASSERT_TRUE(is_new) << "bits " << first << " and " << second << " as bits " << other->second.first << " and "
                          << other->second.second;
    }
}

TEST(CallSignature, SameCallsHaveTheSameDigest) {
  const auto make = [] { return make_signature(Operation::kBroadcast, "order", DType::kU8, 12, 3); };
  EXPECT_EQ(digest_of(make()), digest_of(make()));
  EXPECT_TRUE(make() == make());
}

}  // namespace
}  // namespace tessera
