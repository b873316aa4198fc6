// Tests the texts of status lines.

#include "workshop/app/train/train_report.h"

#include <gtest/gtest.h>

#include <limits>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/test_folder.h"

namespace tessera::app {
namespace train_report_test {

TEST(DurationText, DurationsAreShortInTheirTwoLargestUnits) {
  EXPECT_EQ(duration_text(0), "0 s");
  EXPECT_EQ(duration_text(-1), "0 s");
  EXPECT_EQ(duration_text(59.4), "59 s");
  EXPECT_EQ(duration_text(59.6), "1 min 0 s");
  EXPECT_EQ(duration_text(314), "5 min 14 s");
  EXPECT_EQ(duration_text(12'000), "3 h 20 min");
  EXPECT_EQ(duration_text(187'200), "2 d 4 h");
  for (const double endless : {1e30, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
    EXPECT_EQ(duration_text(endless), "more than 30 years");
}

TEST(ShareText, GivesTheShareAndTheScaledSpeedup) {
  EXPECT_EQ(share_text(0.123, 2), "comm 12.3 %, scaled speed-up 1.88 of 2");
  EXPECT_EQ(share_text(0.123, 2, 1.789), "comm 12.3 %, scaled speed-up 1.88 of 2, measured 1.79");
  EXPECT_EQ(share_text(0, 1), "comm 0.0 %, scaled speed-up 1.00 of 1");
}

TEST(DataText, TellsTheSharesOfTheStep) {
  StepResult result;
  EXPECT_EQ(data_text(result), "data 0.0 % (batches 0.0 %, uploads 0.0 %)");
  result.seconds = 2;
  result.data_seconds = 0.5;
  result.batch_seconds = 0.25;
  result.upload_seconds = 0.002;
  EXPECT_EQ(data_text(result), "data 25.0 % (batches 12.5 %, uploads 0.1 %)");
}

TEST(FlopsText, TellsMfuWhereThePeakIsKnown) {
  StepResult result;
  result.seconds = 0.5;
  result.flop = 206'000'000'000;
  EXPECT_EQ(flops_text(result), "0.412 TFLOP/s");
  result.flop *= 1000;
  result.peak_tflops = 989.4;
  EXPECT_EQ(flops_text(result), "412.0 TFLOP/s, MFU 41.6 %");
}

TEST(BatchAdvice, SaysHowManyMoreRanksWouldPay) {
  EXPECT_EQ(batch_advice(512, 64),
            "critical batch about 512 sequences; you use 64: up to 8.0 x as many ranks would pay");
  EXPECT_EQ(batch_advice(6400, 64),
            "critical batch about 6400 sequences; you use 64: up to 100 x as many ranks would pay");
  EXPECT_EQ(batch_advice(64, 64), "critical batch about 64 sequences; you use 64: more ranks would pay little");
  EXPECT_EQ(batch_advice(6.4, 64),
            "critical batch about 6.4 sequences; you use 64: a smaller batch would learn about as much in a step");
}

TEST(StragglerText, NamesTheSlowestRankAndTheShareOfTheStep) {
  StepResult result;
  EXPECT_EQ(straggler_text(result), "slowest rank not known");
  result.seconds = 0.5;
  result.waited_for_rank = 3;
  result.waited_for_seconds = 0.012;
  EXPECT_EQ(straggler_text(result), "waited for rank 3: 12.0 ms (2.4 %)");
}

// The table's first line is the line that `tessera train --metrics NAME.csv` of version 0.1 writes.
TEST(TrainReport, TableOfVersion01IsGoneOnWith) {
  const std::string columns =
      "run,step,epoch,loss,grad_norm,lr,overflow,spike,loss_scale,tokens,tokens_per_second,seconds,"
      "communication_seconds,seconds_p50,seconds_p95,bytes_allocated,bytes_planned,bytes_gathered,bytes_reduced,"
      "disk_bytes_read,disk_bytes_written,streamed_bytes,bytes_to_host,bytes_to_gpu,uploaded_bytes,"
      "gradient_bytes_to_host,gradient_bytes_to_gpu,disk_wait_seconds\n";
  const TestFolder folder;
  RunOutputs outputs;
  outputs.metrics = folder.write("metrics.csv", columns);
  outputs.is_restart = true;
  outputs.run_id = "second";
  TrainReport report({.steps = 9, .outputs = outputs});
  const absl::Status opened = report.open({});
  ASSERT_TRUE(opened.ok()) << opened;
  StepResult result;
  result.step = 7;
  result.loss = 0.5;
  result.seconds = 2;
  result.noise_scale = 3;  // a field that 0.1 does not have
  report.add(result, /*epoch=*/1, TrafficCounts{});
  const std::string table = folder.read("metrics.csv");
  ASSERT_EQ(table.substr(0, columns.size()), columns);
  std::istringstream row(table.substr(columns.size()));
  std::vector<std::string> cells;
  for (std::string cell; std::getline(row, cell, ',');) cells.push_back(cell);
  ASSERT_EQ(cells.size(), 28u) << table;
  EXPECT_EQ(cells[0] + "," + cells[1] + "," + cells[2], "second,7,1");
  EXPECT_EQ(std::stod(cells[3]), 0.5) << "loss";
  EXPECT_EQ(std::stod(cells[11]), 2) << "seconds";
  EXPECT_EQ(std::stod(cells[27]), 0) << "disk_wait_seconds";
}

TEST(TrainReport, EventFileHasLatenciesUnderTheirNames) {
  const TestFolder folder;
  RunOutputs outputs;
  outputs.events = folder / "events";
  TrainReport report({.steps = 9, .outputs = outputs});
  const absl::Status opened = report.open({});
  ASSERT_TRUE(opened.ok()) << opened;
  const std::string before = folder.read("events");
  const CallLatency gather{.call = "gather", .unit = "blocks.3", .count = 2, .p50 = 1, .p95 = 2, .p99 = 3, .max = 4};
  report.add(std::span(&gather, 1), /*after_step=*/7);
  const std::string event = folder.read("events").substr(before.size());
  for (const char* const name : {"p50_seconds", "p95_seconds", "p99_seconds", "max_seconds"})
    EXPECT_NE(event.find("latency/gather/blocks.3/" + std::string(name)), std::string::npos) << name;
}

TEST(CommunicationShare, EqualsCommunicationSecondsOverAllSeconds) {
  StepResult result;
  EXPECT_EQ(result.communication_share(), 0);  // no communication was measured
  result.seconds = 0.5;
  result.communication_seconds = 0.125;
  EXPECT_EQ(result.communication_share(), 0.25);
}

}  // namespace train_report_test
}  // namespace tessera::app
