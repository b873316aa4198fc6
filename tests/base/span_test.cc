// Tests spans and the trace that records them.

#include "tessera/span.h"

#include <gmock/gmock.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

namespace tessera {
namespace {

nlohmann::json events(int process = 0) { return nlohmann::json::parse("[" + Trace::events_as_json(process) + "]"); }

TEST(Trace, RecordsSpansOnlyWhileItIsOn) {
  { const Span before("before"); }
  Trace::start();
  {
    const Span outer("reduce", "blocks.3");
    const Span inner("agree");
  }
  Trace::stop();
  { const Span after("after"); }
  const nlohmann::json recorded = events(7);
  ASSERT_EQ(recorded.size(), 2u);
  EXPECT_EQ(recorded[0]["name"], "agree");
  EXPECT_EQ(recorded[1]["name"], "reduce blocks.3");
  for (const auto& event : recorded) {
    EXPECT_EQ(event["ph"], "X");
    EXPECT_EQ(event["pid"], 7);
  }
  const double begin = recorded[1]["ts"], end = begin + recorded[1]["dur"].get<double>();
  EXPECT_LE(begin, recorded[0]["ts"].get<double>());
  EXPECT_GE(end, recorded[0]["ts"].get<double>() + recorded[0]["dur"].get<double>());
  Trace::start();
  Trace::stop();
  EXPECT_EQ(events().size(), 0u);
}

TEST(Trace, NumbersThreadsAndKeepsAnyName) {
  Trace::start();
  { const Span here("a"); }
  std::thread([] { const Span there("b", "\"\xff\n"); }).join();
  Trace::stop();
  const nlohmann::json recorded = events();
  ASSERT_EQ(recorded.size(), 2u);
  EXPECT_NE(recorded[0]["tid"], recorded[1]["tid"]);
}

TEST(Trace, SpanAddsItsTimeWithOrWithoutATrace) {
  const auto begin = std::chrono::steady_clock::now();
  double seconds = 0;
  for (int i = 0; i < 2; ++i) {
    const Span span("wait", {}, &seconds);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_GE(seconds, 0.004);
  EXPECT_LE(seconds, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
}

}  // namespace
}  // namespace tessera
