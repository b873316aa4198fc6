// Tests how measured links are written and read, and how the costs of links depend on the group.

#include "planner/measured/links.h"

#include <gtest/gtest.h>

#include <fstream>
#include <limits>

#include "runtime/base/status.h"

namespace tessera {
namespace {

Links some_links() {
  Links links{.transport = "hierarchical(host, gloo)", .ranks = 4, .hosts = 2};
  links.all_gather = {1.0 / 3, 8e-10, 0.5, 1e-9};
  links.reduce_scatter = {0, std::numeric_limits<double>::denorm_min()};
  links.all_reduce = {1e9, 0.1};
  links.small = {1e-5, 0};
  links.cpu_s_per_byte = 1e-11;
  links.sum_s_per_byte = 3e-11;
  links.coding = {2e-10, 1.0 / 7, 0, 0.5};
  links.gathers_in_background = false;
  return links;
}

/// Returns the error for the text of some_links() with `from` replaced by `to`.
std::string refusal(const std::string& from, const std::string& to) {
  std::string text = to_json(some_links());
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  const auto links = parse_links(text, "links.json");
  EXPECT_FALSE(links.ok()) << text;
  EXPECT_EQ(exit_code_of(links.status()), ExitCode::kCorruptData);
  const std::string message = message_of(links.status());
  EXPECT_NE(message.find("hint: "), std::string::npos) << message;
  return message.substr(0, message.find("\n[T0629]"));  // the hint names the program that writes such files
}

TEST(Links, WrittenLinksReadBackTheSame) {
  const auto links = parse_links(to_json(some_links()), "x");
  ASSERT_TRUE(links.ok()) << links.status();
  EXPECT_EQ(*links, some_links());
}

TEST(Links, FileOfVersion01IsRead) {
  const char* const text = R"({
  "transport": "gloo",
  "ranks": 4,
  "hosts": 2,
  "all_gather": {"alpha_s": 1e-4, "beta_s_per_byte": 2e-10, "busy_alpha_s": 3e-4, "busy_beta_s_per_byte": 4e-10},
  "reduce_scatter": {"alpha_s": 5e-4, "beta_s_per_byte": 0, "busy_alpha_s": 0, "busy_beta_s_per_byte": 0},
  "all_reduce": {"alpha_s": 6e-4, "beta_s_per_byte": 0, "busy_alpha_s": 0, "busy_beta_s_per_byte": 0},
  "small": {"alpha_s": 7e-4, "beta_s_per_byte": 0, "busy_alpha_s": 0, "busy_beta_s_per_byte": 0},
  "cpu_s_per_byte": 8e-11,
  "sum_s_per_byte": 9e-11,
  "coding": {"lossless_s_per_byte": 1e-10, "int8_s_per_byte": 2e-11, "int4_s_per_byte": 3e-11, "load": 0.5},
  "reduces_in_background": false,
  "gathers_in_background": true
})";
  const auto links = parse_links(text, "links.json");
  ASSERT_TRUE(links.ok()) << links.status();
  Links wanted{.transport = "gloo", .ranks = 4, .hosts = 2};
  wanted.all_gather = {1e-4, 2e-10, 3e-4, 4e-10};
  wanted.reduce_scatter.alpha_s = 5e-4;
  wanted.all_reduce.alpha_s = 6e-4;
  wanted.small.alpha_s = 7e-4;
  wanted.cpu_s_per_byte = 8e-11;
  wanted.sum_s_per_byte = 9e-11;
  wanted.coding = {1e-10, 2e-11, 3e-11, 0.5};
  wanted.reduces_in_background = false;
  EXPECT_EQ(*links, wanted);
}

TEST(Links, FileGivesTheLinksOfItsText) {
  const std::string path = ::testing::TempDir() + "timing_links.json";
  std::ofstream(path) << to_json(some_links());
  const auto links = read_links(path);
  ASSERT_TRUE(links.ok()) << links.status();
  EXPECT_EQ(*links, some_links());
  EXPECT_EQ(exit_code_of(read_links(path + ".not").status()), ExitCode::kNoInput);
}

TEST(Links, EveryRefusalNamesFileLineAndKey) {
  EXPECT_EQ(refusal("8e-10", "-1"),
            "links.json:7:24: /all_gather/beta_s_per_byte: must be a number from 0 to 1e+09, got -1");
  EXPECT_EQ(refusal("8e-10", "\"fast\""),
            "links.json:7:24: /all_gather/beta_s_per_byte: must be a number from 0 to 1e+09, got the string \"fast\"");
  EXPECT_EQ(refusal("8e-10", "1e10"),
            "links.json:7:24: /all_gather/beta_s_per_byte: must be a number from 0 to 1e+09, got 10000000000.0");
  EXPECT_NE(refusal("8e-10", "1e999").find("links.json:7:"), std::string::npos);
  EXPECT_NE(refusal("8e-10", "NaN").find("links.json:7:"), std::string::npos);
  EXPECT_EQ(refusal("\"ranks\": 4", "\"ranks\": 1"),
            "links.json:3:12: /ranks: must be an integer from 2 to 1048576, got 1");
  EXPECT_EQ(refusal("\"ranks\": 4", "\"ranks\": 4.0"),
            "links.json:3:12: /ranks: must be an integer from 2 to 1048576, got 4.0");
  EXPECT_EQ(refusal("\"hosts\": 2", "\"hosts\": 5"), "links.json:4:12: /hosts: must be an integer from 1 to 4, got 5");
  EXPECT_EQ(refusal("\"ranks\": 4", "\"ranks\": 18446744073709551615"),
            "links.json:3:12: /ranks: must be an integer from 2 to 1048576, got 18446744073709551615");
  EXPECT_EQ(refusal("\"gathers_in_background\": false", "\"gathers_in_background\": 0"),
            "links.json:38:28: /gathers_in_background: must be true or false, got 0");
  EXPECT_EQ(refusal("\"load\": 0.5", "\"load\": 1.5"), "links.json:35:13: /coding/load: must be a number from 0 to 1");
  EXPECT_EQ(refusal("\"small\"", "\"smal\""),
            "links.json:1:1: /small: is needed, but not there\n"
            "links.json:23:3: /smal: unknown key. [T0426] hint: did you mean \"small\"?");
  EXPECT_EQ(refusal("\"hierarchical(host, gloo)\"", "\"\""),
            "links.json:2:16: /transport: must be a string that is not empty, got the string \"\"");
}

TEST(Links, TextThatIsNoObjectIsRefused) {
  for (const std::string text :
       {"", "[]", "1", "{", "{}", "null", "\xff", "{\"all_gather\": []}", "{\"a\": 1, \"a\": 2}"}) {
    const auto links = parse_links(text, "links.json");
    ASSERT_FALSE(links.ok()) << text;
    EXPECT_EQ(message_of(links.status()).rfind("links.json:", 0), 0u) << links.status();
  }
  EXPECT_FALSE(parse_links(std::string(100000, '['), "x").ok());
  std::string many = "{\"x\": [0";
  for (int i = 0; i < 1000; ++i) many += ",0";
  EXPECT_FALSE(parse_links(many + "]}", "x").ok());
}

// A host sends the same number of bytes for any number of ranks. Two groups that share the host's link take twice as
// long.
TEST(Links, RanksOfOneHostShareItsLink) {
  Links one_each{.transport = "gloo", .ranks = 2, .hosts = 2};
  one_each.all_gather = one_each.reduce_scatter = one_each.all_reduce = {1e-5, 8e-9};
  EXPECT_EQ(one_each.of_group(2, 2, 1), one_each);
  const Links four = one_each.of_group(4, 2, 1), replicas = one_each.of_group(2, 2, 2);
  EXPECT_DOUBLE_EQ(four.all_reduce.beta_s_per_byte, 8e-9 * 0.5 / 0.75);
  EXPECT_DOUBLE_EQ(four.all_gather.beta_s_per_byte * (0.75 * 4), one_each.all_gather.beta_s_per_byte * (0.5 * 4));
  EXPECT_DOUBLE_EQ(replicas.reduce_scatter.beta_s_per_byte, 16e-9);
  EXPECT_EQ(replicas.all_reduce.alpha_s, 1e-5);
  // Only numbers that are sent to the other host have fewer bits. A rank sends 1/4 of a buffer of such numbers, and 3/4
  // of a buffer in all. A rank gathers half of its buffer from the other host.
  EXPECT_DOUBLE_EQ(four.coding.of_reductions, 0.25 / 0.75);
  EXPECT_DOUBLE_EQ(four.coding.of_gathers, 0.5);
  // A measurement with two ranks per host gives the same costs.
  Links two_each = four;
  two_each.ranks = 4;
  two_each.coding = {};
  EXPECT_DOUBLE_EQ(two_each.of_group(4, 2, 1).all_reduce.beta_s_per_byte, four.all_reduce.beta_s_per_byte);
  EXPECT_DOUBLE_EQ(two_each.of_group(2, 2, 2).all_reduce.beta_s_per_byte, 16e-9);
  // A measurement on one host gives no costs between two hosts.
  Links inside = one_each;
  inside.hosts = 1;
  EXPECT_EQ(inside.of_group(4, 2, 2), inside);
  EXPECT_EQ(one_each.of_group(2, 1, 1), one_each);
}

TEST(Links, AlphaGrowsWithThePeersAndBetaWithTheBytes) {
  const Links links = some_links();
  const CallCost four = links.cost(links.all_gather, 4, 1000);
  EXPECT_EQ(four.latency_s, links.all_gather.alpha_s);
  EXPECT_EQ(four.transfer_s, 8e-10 * 1000);
  EXPECT_EQ(four.sent_bytes, 1000);
  EXPECT_DOUBLE_EQ(links.cost(links.all_gather, 10, 1000).latency_s, 3 * links.all_gather.alpha_s);
  EXPECT_EQ(links.cost(links.all_gather, 10, 1000).transfer_s, four.transfer_s);
  EXPECT_EQ(links.cost(links.all_gather, 1, 1000).seconds(), 0);
  EXPECT_DOUBLE_EQ(four.busy_seconds(), links.all_gather.busy_alpha_s + 1e-9 * 1000);
  EXPECT_DOUBLE_EQ(links.cost(links.all_gather, 10, 1000).busy_latency_s, 3 * links.all_gather.busy_alpha_s);
  const CallCost reduction = links.cost(links.reduce_scatter, 4, 1000);
  EXPECT_EQ(reduction.busy_seconds(), reduction.seconds()) << "no less than when nobody computes";
  EXPECT_EQ(links.all_gather_cost(5, 100).sent_bytes, 400);
}

}  // namespace
}  // namespace tessera
