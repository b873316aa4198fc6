// Tests the benchmark of the codecs of the wire.

#include "workshop/bench/codec_speed.h"

#include <gmock/gmock.h>

namespace tessera {
namespace {

TEST(CodecSpeed, EveryPassIsTimedWithItsBytes) {
  const auto timings = bench_codecs(1024, 3);
  std::vector<std::string> names;
  std::vector<std::size_t> bytes;
  for (const PassTiming& timing : timings) {
    EXPECT_EQ(timing.numel, 1024u);
    EXPECT_EQ(timing.pass.ns.size(), 3u);
    EXPECT_EQ(timing.limit.ns.size(), 3u);
    names.push_back(timing.name);
    bytes.push_back(timing.bytes);
  }
  EXPECT_THAT(names,
              ::testing::ElementsAre("int8_encode", "int8_encode_feedback", "int8_decode", "int4_encode",
                                     "int4_encode_feedback", "int4_decode", "votes_encode", "signs_encode_feedback"));
  // A pass moves 4 bytes for each value, and a message: 4 scales and the codes, or one word and the votes. Feedback is
  // both read and written.
  constexpr std::size_t kInt8 = 4 * 4 + 1024, kInt4 = 4 * 4 + 512, kVotes = 4 + 128, kSigns = 4 * 4 + 128;
  EXPECT_THAT(bytes, ::testing::ElementsAre(4096 + kInt8, 3 * 4096 + kInt8, 4096 + kInt8, 4096 + kInt4,
                                            3 * 4096 + kInt4, 4096 + kInt4, 4096 + kVotes, 3 * 4096 + kSigns));
}

}  // namespace
}  // namespace tessera
