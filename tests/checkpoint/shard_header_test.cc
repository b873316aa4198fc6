// Tests the header of a shard: it is read back as it was written, and hostile headers are refused.

#include "checkpoint/shard_header.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/base/status.h"
#include "tests/checkpoint/made_up.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

ShardHeader some_header() {
  ShardHeader header{{{"value", "frozen", "F16", 0, 3},
                      {"master", "a|b \"c\" \n", "F32", 512, 40},
                      {"exp_avg.scales", "é", "F32", 2, 1},
                      {"count", "n", "I64", 0, 1},
                      {"exp_avg", "é", "U8", 0, 7}}};
  place_pieces(header.pieces);
  return header;
}

TEST(ShardHeader, WrittenHeaderReadsBackTheSame) {
  const ShardHeader header = some_header();
  const std::string head = write_header(header);
  EXPECT_EQ(head.size() % 64, 0u);
  const auto read = read_header("f", head, header.data_bytes());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->pieces, header.pieces);
  EXPECT_TRUE(read_header("f", write_header({}), 0).ok());
}

// Other programs map the file into memory, and expect each tensor at a multiple of its element's size.
TEST(ShardHeader, PiecesAreAligned) {
  const ShardHeader header = some_header();
  std::int64_t next = 0;
  for (const Piece& piece : header.pieces) {
    EXPECT_EQ(piece.begin % element_bytes(piece.dtype), 0);
    EXPECT_EQ(piece.begin, next);
    next = piece.end();
  }
}

// Fault F36 (docs/faults.md): each of these headers has enough bytes, so only the check of its contents refuses it.
TEST(ShardHeader, HostileHeadersAreRefused) {
  const auto piece = [](const std::string& key, const std::string& dtype, const std::string& shape,
                        const std::string& place) {
    return "\"" + key + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + place + "}";
  };
  const std::string good = piece("master|a|0", "F32", "[2]", "[0,8]");
  ASSERT_TRUE(read_header("f", head_of("{" + good + "}"), 8).ok());
  const std::pair<std::string, const char*> bad[] = {
      {"", "the file is empty"},
      {"[]", "wanted a JSON object"},
      {"{" + good + "," + good + "}", "given twice"},
      {"{" + good, "ends too early"},
      {"{" + good + "} x", "not JSON"},
      {"{" + good + "}" + std::string(1, '\0') + "{}", "NUL"},
      {"{" + piece("master|a|0", "F32", "[2]", "[8,16]") + "}", "leave a hole"},
      {"{" + good + "," + piece("master|b|0", "F32", "[2]", "[4,12]") + "}", "overlap"},
      {"{" + piece("master|a|0", "F32", "[3]", "[0,12]") + "}", "the file has 8"},
      {"{" + piece("master|a|0", "F32", "[2]", "[0,12]") + "}", "do not fit its offsets"},
      {"{" + piece("master|a|0", "F32", "[2]", "[8,0]") + "}", "do not fit its offsets"},
      {"{" + piece("master|a|0", "F32", "[4611686018427387906]", "[0,8]") + "}", "/shape"},
      {"{" + piece("master|a|0", "F32", "[9007199254740992]", "[0,8]") + "}", "do not fit its offsets"},
      {"{" + piece("master|a|0", "F32", "[18446744073709551615]", "[0,8]") + "}", "/shape"},
      {"{" + piece("master|a|0", "F32", "[-2]", "[0,8]") + "}", "/shape"},
      {"{" + piece("master|a|0", "F32", "[2.0]", "[0,8]") + "}", "/shape"},
      {"{" + piece("master|b|0", "F32", "[0]", "[0,0]") + "," + good + "}", "/shape"},
      {"{" + piece("master|a|0", "F32", "[1,2]", "[0,8]") + "}", "1 dimension"},
      {"{" + piece("master|a|0", "F32", "[2]", "[0,8,8]") + "}", "2 offsets"},
      {"{" + piece("master|a|0", "F4", "[2]", "[0,8]") + "}", "type \\\"F4\\\""},
      {"{" + piece("master|a|0", "F32", "[2]", R"(["0","8"])") + "}", "/data_offsets"},
      {"{" + piece("master|a", "F32", "[2]", "[0,8]") + "}", "wanted a key"},
      {"{" + piece("|a|0", "F32", "[2]", "[0,8]") + "}", "wanted a key"},
      {"{" + piece("master|a|00", "F32", "[2]", "[0,8]") + "}", "wanted a key"},
      {"{" + piece("master|a|-1", "F32", "[2]", "[0,8]") + "}", "wanted a key"},
      {"{" + piece("master|a|99999999999999999999", "F32", "[2]", "[0,8]") + "}", "wanted a key"},
      {"{" + piece("master|a|9223372036854775807", "F32", "[2]", "[0,8]") + "}", "too large"},
      {"{" + piece("value|a|0", "U8", "[1]", "[0,1]") + "," + piece("value|b|0", "U8", "[3]", "[1,4]") + "," +
           piece("value|c|0", "F32", "[1]", "[4,8]") + "}",
       ""},
      {"{" + piece("value|a|0", "U8", "[4]", "[0,4]") + "," + piece("value|b|0", "I64", "[1]", "[4,12]") + "}",
       "no multiple of 8"},
      {R"({"master|a|0": 3})", "wanted an object"},
      {R"({"master|a|0": {"dtype":"F32","shape":[2]}})", "/data_offsets"},
      {std::string(100, '[') + std::string(100, ']'), "nested more than"},
      {std::string(1 << 20, '['), "nested more than"}};
  for (const auto& [json, what] : bad) {
    const auto read = read_header("rank-00000.safetensors", head_of(json), 8);
    if (std::string(what).empty()) {
      EXPECT_TRUE(read.ok()) << read.status();
      continue;
    }
    ASSERT_FALSE(read.ok()) << json.substr(0, 200);
    EXPECT_EQ(exit_code_of(read.status()), ExitCode::kCorruptData);
    std::string text = message_of(read.status());
    EXPECT_THAT(text, HasSubstr("rank-00000.safetensors"));
    std::string wanted = what;
    while (wanted.find("\\\"") != std::string::npos) wanted.replace(wanted.find("\\\""), 2, "\"");
    EXPECT_THAT(text, HasSubstr(wanted)) << json.substr(0, 200);
  }
}

TEST(ShardHeader, FlippedLengthBitsAreRefused) {
  const std::string head = write_header(some_header());
  EXPECT_FALSE(read_header("f", head.substr(0, 7), some_header().data_bytes()).ok());
  for (int byte = 0; byte < 8; ++byte) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = head;
      changed[byte] = static_cast<char>(changed[byte] ^ (1 << bit));
      EXPECT_FALSE(read_header("f", changed, some_header().data_bytes()).ok());
    }
  }
}

// The parser gets a damaged header only if its hash fits. Even then, the damage must not do harm.
TEST(ShardHeader, ChangedByteIsAnErrorOrAnotherHeader) {
  const std::string head = write_header(some_header());
  for (std::size_t i = 8; i < head.size(); ++i) {
    for (const char byte : {'\0', '"', '{', ']', '9', ',', '\xff'}) {
      std::string changed = head;
      changed[i] = byte;
      const auto read = read_header("f", changed, some_header().data_bytes());
      EXPECT_TRUE(!read.ok() || read->data_bytes() == some_header().data_bytes());
    }
  }
}

}  // namespace
}  // namespace tessera
