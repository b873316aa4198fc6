// Tests the file of measured link costs.

#include "planner/measured/link_fit_file.h"

#include <gmock/gmock.h>

#include "runtime/base/status.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(LinkFitFile, WrittenFitReadsBackTheSame) {
  const LinkFit fit{.round_s = 4e-5, .message_s = 1.25e-6, .byte_s = 8e-10, .add_s = 0};
  const auto read = parse_link_fit(to_json(fit), "fit.json");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, fit);
}

TEST(LinkFitFile, FileOfVersion01IsRead) {
  const char* const text = R"({
  "round_s": 4e-05,
  "message_s": 1.25e-06,
  "byte_s": 8e-10,
  "add_s": 1e-11
})";
  const auto read = parse_link_fit(text, "fit.json");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, (LinkFit{.round_s = 4e-5, .message_s = 1.25e-6, .byte_s = 8e-10, .add_s = 1e-11}));
}

TEST(LinkFitFile, AllErrorsAreReportedAtOnce) {
  const auto read =
      parse_link_fit("{\"round_s\": -1,\n \"message_s\": \"1\", \"byte_s\": 0, \"alpha\": 1}", "fit.json");
  EXPECT_EQ(exit_code_of(read.status()), ExitCode::kCorruptData);
  EXPECT_THAT(message_of(read.status()), AllOf(HasSubstr("fit.json:1"), HasSubstr("round_s"), HasSubstr("message_s"),
                                               HasSubstr("add_s"), HasSubstr("alpha")));
  EXPECT_FALSE(parse_link_fit("[]", "fit.json").ok());
  EXPECT_FALSE(parse_link_fit("", "fit.json").ok());
  EXPECT_FALSE(read_link_fit("/nowhere/fit.json").ok());
}

}  // namespace
}  // namespace tessera
