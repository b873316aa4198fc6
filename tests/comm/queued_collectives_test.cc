// Tests collectives that a backend queues. The test's backend makes calls late, as NCCL may.

#include "runtime/comm/device/queued_collectives.h"

#include <ATen/ops/arange.h>
#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

#include "runtime/comm/key_value_store.h"
#include "runtime/comm/local/local_collectives.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tests/comm/collectives_properties.h"
#include "tests/support/limits/patience.h"
#include "tests/support/stand_ins/late_backend.h"
#include "tests/support/stand_ins/wrapped_groups.h"

namespace tessera::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using Fault = LateBackend::Fault;

const c10::Device kCpu(c10::kCPU);

struct Queued {
  c10::intrusive_ptr<LateBackend> backend;
  std::shared_ptr<QueuedGroups> groups = std::make_shared<QueuedGroups>();
  std::shared_ptr<Collectives> group;
  std::atomic<bool> is_reached = true;  ///< whether the device has reached the calls
  std::atomic<int> records = 0, releases = 0;
};

/// Runs `body` on ranks of one process, each with the world as a queued group.
void on_queued(int ranks, double timeout_s, const std::function<void(Queued&)>& body) {
  const std::shared_ptr<KeyValueStore> store = memory_store();
  run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
    auto axes = groups_of(mesh).axes(1, ranks);
    require_ok(axes.status());
    Queued queued;
    queued.backend = c10::make_intrusive<LateBackend>(axes->world);
    std::vector<int> all(ranks);
    std::iota(all.begin(), all.end(), 0);
    const Group group{
        .name = "world", .rank = mesh.rank(), .world_ranks = all, .world_size = ranks, .timeout_s = timeout_s};
    queued.group =
        queued_collectives(group,
                           {.backend = queued.backend,
                            .device = kCpu,
                            .groups = queued.groups,
                            .allocate = [](std::size_t bytes) { return DeviceBuffer::allocate(bytes, kCpu); },
                            .release_memory = [&] { ++queued.releases; },
                            .write_record = [&] { return ++queued.records, "flight record: /here"; },
                            .mark = [&] { return [&] { return queued.is_reached.load(); }; }},
                           store);
    body(queued);
  });
}

std::string text_of(const absl::Status& status) { return message_of(status); }

/// Returns the time limit in seconds for tests in which a call takes too long. The limit grows with the machine's load,
/// so that the watch does not report a call that was only scheduled late.
double little_s() { return patient_s(0.3); }

absl::Status status_in_time(const Collectives& group) {
  for (Deadline limit(10s); group.status().ok() && !limit.passed();) std::this_thread::sleep_for(5ms);
  return group.status();
}

/// Returns small whole numbers, whose sums are exact in every dtype and order. Element i of rank q is q + i % 5.
std::vector<std::byte> numbers(int rank, DType dtype, std::size_t numel) {
  const at::Tensor wide = at::arange(static_cast<std::int64_t>(numel), at::kFloat).remainder(5).add(rank);
  const at::Tensor narrow = wide.to(sum_type_of(dtype));
  const auto* data = static_cast<const std::byte*>(narrow.const_data_ptr());
  return {data, data + narrow.nbytes()};
}

float sum_at(int ranks, std::size_t i) { return static_cast<float>(ranks * (i % 5) + ranks * (ranks - 1) / 2); }

void check_sums(Collectives& group, DType dtype, bool in_place) {
  constexpr std::size_t kPart = 301;
  const int ranks = group.size();
  in_place = in_place && dtype == DType::kF32;
  auto input = numbers(group.rank(), dtype, kPart * static_cast<std::size_t>(ranks));
  std::vector<float> output(kPart * static_cast<std::size_t>(ranks));
  const std::size_t first = kPart * static_cast<std::size_t>(group.rank());
  float* part = in_place ? reinterpret_cast<float*>(input.data()) + first : output.data();
  Work work = group.reduce_scatter("unit", input.data(), dtype, part, kPart);
  require_ok(work.wait());
  for (std::size_t i = 0; i < kPart; ++i) require(part[i] == sum_at(ranks, first + i), "reduce_scatter");

  input = numbers(group.rank(), dtype, output.size());
  float* all = in_place ? reinterpret_cast<float*>(input.data()) : output.data();
  require_ok(group.all_reduce("unit", input.data(), dtype, all, output.size()).wait());
  for (std::size_t i = 0; i < output.size(); ++i) require(all[i] == sum_at(ranks, i), "all_reduce");
}

TEST(QueuedCollectives, EveryOperationIsExact) {
  for (const int ranks : {1, 2, 3, 4}) {
    on_queued(ranks, 60, [&](Queued& queued) {
      Collectives& group = *queued.group;
      for (const std::size_t bytes : {0, 2, 1000}) {
        for (const bool in_place : {false, true}) check_all_gather(group, bytes, /*symmetric=*/true, in_place);
      }
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        for (const bool in_place : {false, true}) check_sums(group, dtype, in_place);
      }
      int data = 10 * group.rank();
      require_ok(group.broadcast("", &data, sizeof data, ranks - 1).wait());
      require(data == 10 * (ranks - 1), "broadcast");
      std::vector<int> send(ranks), received(ranks);
      std::iota(send.begin(), send.end(), ranks * group.rank());
      require_ok(group.all_to_all("", send.data(), received.data(), sizeof(int)).wait());
      for (int q = 0; q < ranks; ++q) require(received[q] == ranks * q + group.rank(), "all_to_all");
      require_ok(group.barrier("").wait());
      require_ok(group.status());
      queued.group.reset();
      EXPECT_EQ(queued.releases, 1);
      EXPECT_EQ(queued.backend->shutdowns, 1);
      EXPECT_EQ(queued.backend->aborts, 0);
      EXPECT_EQ(queued.records, 0);
    });
  }
}

TEST(QueuedCollectives, VisitorsAndIntegerSumsAreRefused) {
  on_queued(1, 60, [](Queued& queued) {
    RecordingVisitor visitor(1);
    float value = 1;
    EXPECT_THAT(text_of(queued.group->all_reduce("unit", &value, DType::kF32, &value, 1, &visitor).wait()),
                HasSubstr("no SumVisitor can see"));
    EXPECT_THAT(text_of(queued.group->all_reduce("unit", &value, DType::kI64, &value, 1).wait()),
                HasSubstr("fp32, bf16 or fp16"));
    require_ok(queued.group->status());
  });
}

/// The caller continues long before the watch notices that a call hangs.
TEST(QueuedCollectives, StuckCallEndsTheGroup) {
  on_queued(1, little_s(), [](Queued& queued) {
    int data = 0;
    require_ok(queued.group->broadcast("first", &data, sizeof data, 0).wait());
    queued.backend->fault = Fault::kStandsStill;
    require_ok(queued.group->broadcast("blocks.3", &data, sizeof data, 0).wait());
    const absl::Status status = status_in_time(*queued.group);
    EXPECT_EQ(exit_code_of(status), ExitCode::kPeerLost);
    EXPECT_THAT(text_of(status), AllOf(ContainsRegex("rank 0/1 blocks.3 broadcast #2: late: timed out after [0-9.]+ s"),
                                       HasSubstr("flight record: /here")));
    EXPECT_EQ(text_of(queued.group->barrier("").wait()), text_of(status));
    EXPECT_EQ(text_of(queued.group->allocate(10).status()), text_of(status));
    queued.group->abort(make_error(ExitCode::kInternal, "later"));
    queued.group.reset();  // this ends the group's watch, too
    EXPECT_EQ(queued.records, 1);
    EXPECT_EQ(queued.backend->aborts, 1);
    EXPECT_EQ(queued.backend->shutdowns, 0);
  });
}

/// Each of these calls takes less than one call's time limit. All of them together take more than that limit.
TEST(QueuedCollectives, TimeLimitCountsEachCallByItself) {
  const double timeout_s = patient_s(1);
  on_queued(1, timeout_s, [&](Queued& queued) {
    int data = 0;
    std::vector<Work> works;
    for (int i = 0; i < 5; ++i) works.push_back(queued.group->broadcast("unit", &data, sizeof data, 0));
    for (Work& work : works) {
      std::this_thread::sleep_for(std::chrono::duration<double>(timeout_s / 4));
      require_ok(work.wait());
    }
    require_ok(queued.group->status());
  });
}

/// Computation may take any time before the device reaches a call. The call's time limit begins only then.
TEST(QueuedCollectives, TimeLimitBeginsWhenTheDeviceReachesTheCall) {
  on_queued(1, little_s(), [](Queued& queued) {
    queued.is_reached = false;
    queued.backend->fault = Fault::kStandsStill;
    int data = 0;
    require_ok(queued.group->broadcast("unit", &data, sizeof data, 0).wait());
    std::this_thread::sleep_for(std::chrono::duration<double>(2 * little_s()));
    require_ok(queued.group->status());
    queued.is_reached = true;
    EXPECT_THAT(text_of(status_in_time(*queued.group)), ContainsRegex("timed out after [0-9.]+ s"));
  });
}

/// NCCL connects only in the first call, which then waits for peers before it is queued.
TEST(QueuedCollectives, CallThatBlocksTheHostIsEndedAtTheTimeLimit) {
  on_queued(1, little_s(), [](Queued& queued) {
    queued.backend->fault = Fault::kBlocksTheHost;
    EXPECT_THAT(text_of(queued.group->barrier("step").wait()),
                ContainsRegex("step barrier #1: late: timed out after [0-9.]+ s"));
    EXPECT_EQ(queued.records, 1);
  });
}

/// A device that hangs in one group's call never reaches the calls of another group.
TEST(QueuedCollectives, StuckCallEndsAllGroupsOfTheRank) {
  on_queued(1, little_s(), [](Queued& queued) {
    const auto make = [&](const char* name) {
      const Group group{.name = name, .rank = 0, .world_ranks = {0}, .world_size = 1, .timeout_s = 60};
      auto backend = c10::make_intrusive<LateBackend>(std::make_shared<LocalCollectives>(0, 1));
      QueuedBackend other{.backend = backend, .device = kCpu, .groups = queued.groups, .allocate = nullptr};
      return std::pair(backend, queued_collectives(group, std::move(other), memory_store()));
    };
    auto [backend, other] = make("other");
    make("gone before");
    queued.backend->fault = Fault::kStandsStill;
    require_ok(queued.group->barrier("step").wait());
    const std::string text = text_of(status_in_time(*other));
    EXPECT_THAT(text, ContainsRegex("step barrier #1: late: timed out after [0-9.]+ s"));
    EXPECT_EQ(text_of(other->barrier("").wait()), text);
    queued.group.reset();  // this ends the group's watch, too
    EXPECT_EQ(backend->aborts, 1);
    other.reset();
    EXPECT_EQ(backend->shutdowns, 0);
  });
}

TEST(QueuedCollectives, FailedAbortEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(on_queued(1, little_s(),
                        [](Queued& queued) {
                          queued.backend->abort_fails = true;
                          queued.backend->fault = Fault::kStandsStill;
                          require_ok(queued.group->barrier("step").wait());
                          std::this_thread::sleep_for(30s);
                        }),
              ::testing::ExitedWithCode(static_cast<int>(ExitCode::kPeerLost)), "cannot be aborted");
}

TEST(QueuedCollectives, CallThatFailsOnTheDeviceEndsTheGroup) {
  on_queued(2, 60, [](Queued& queued) {
    require_ok(queued.group->barrier("all").wait());
    if (queued.group->rank() == 0) queued.backend->fault = Fault::kFailsOnTheDevice;
    int data = 0;
    if (queued.group->rank() == 1) queued.backend->fault = Fault::kStandsStill;  // the peer never joins this call
    // the failure may be known already
    queued.group->broadcast("blocks.3", &data, sizeof data, 0).wait().IgnoreError();
    const std::string text = text_of(status_in_time(*queued.group));
    EXPECT_THAT(text, HasSubstr(queued.group->rank() == 0 ? "late: remote process exited" : "another rank has failed"));
    EXPECT_THAT(text, HasSubstr(queued.group->rank() == 0 ? "rank 1" : "rank 0 was in broadcast 'blocks.3'"));
    queued.group.reset();  // this ends the group's watch, too
    EXPECT_EQ(queued.backend->aborts, 1);
  });
}

/// If a rank gives up for its own reasons, the ranks that wait for it end long before their time limit.
TEST(QueuedCollectives, AbortReachesTheOtherRanks) {
  on_queued(3, 60, [](Queued& queued) {
    if (queued.group->rank() == 1) {
      queued.group->abort(make_error(ExitCode::kIo, "rank 1/3: no disk"));
      EXPECT_EQ(queued.backend->aborts, 1);
      return;
    }
    queued.backend->fault = Fault::kStandsStill;
    require_ok(queued.group->barrier("step").wait());
    EXPECT_THAT(text_of(status_in_time(*queued.group)),
                AllOf(HasSubstr("another rank has failed"), HasSubstr("rank 1 gave up: rank 1/3: no disk")));
  });
}

TEST(QueuedCollectives, FailedFlightRecordIsReportedWithTheCause) {
  const std::shared_ptr<KeyValueStore> store = memory_store();
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    auto axes = groups_of(mesh).axes(1, 1);
    require_ok(axes.status());
    auto backend = c10::make_intrusive<LateBackend>(axes->world);
    backend->fault = Fault::kFailsOnTheDevice;
    const auto group =
        queued_collectives(Group{.name = "world", .world_ranks = {0}},
                           {.backend = backend,
                            .device = kCpu,
                            .groups = std::make_shared<QueuedGroups>(),
                            .allocate = [](std::size_t bytes) { return DeviceBuffer::allocate(bytes, kCpu); },
                            .write_record = []() -> std::string { throw std::runtime_error("no space"); }},
                           store);
    int data = 0;
    group->broadcast("unit", &data, sizeof data, 0).wait().IgnoreError();
    EXPECT_THAT(text_of(status_in_time(*group)),
                AllOf(HasSubstr("remote process exited"), HasSubstr("flight record cannot be written: no space")));
  });
}

/// The CPU threads of both ranks have long continued. Each device has reached a call that the other rank has not
/// queued.
TEST(QueuedCollectives, DevicesStuckInDifferentCallsAreNamed) {
  const std::shared_ptr<KeyValueStore> store = memory_store();
  const auto queue = [&](const std::string& use, std::shared_ptr<Collectives> moves) {
    const int rank = moves->rank(), size = moves->size();
    if (size == 1) return moves;
    auto backend = c10::make_intrusive<LateBackend>(std::move(moves));
    backend->fault = Fault::kStandsStill;
    const Group group{.name = use, .rank = rank, .world_ranks = {0, 1}, .world_size = size, .timeout_s = 60};
    return queued_collectives(
        group, {.backend = backend, .device = kCpu, .groups = std::make_shared<QueuedGroups>(), .allocate = nullptr},
        store);
  };
  const auto wrap = [&](std::shared_ptr<GroupFactory> groups) { return wrapped_groups(std::move(groups), queue); };
  run_ranks({.ranks = 2, .wrap_groups = wrap}, [&](const Mesh& mesh) {
    auto axes = groups_of(mesh).axes(1, 2);
    require_ok(axes.status());
    Collectives& group = mesh.rank() == 0 ? *axes->gather : *axes->reduce;
    int data[2] = {};
    require_ok(mesh.rank() == 0 ? group.all_gather("blocks.1", data, data, sizeof(int)).wait()
                                : group.barrier("step").wait());
    EXPECT_THAT(text_of(status_in_time(group)),
                AllOf(HasSubstr("rank 0 waits in all_gather 'blocks.1' of 4 bytes (#1), which rank 1 has not begun"),
                      HasSubstr("rank 1 waits in barrier 'step' (#1), which rank 0 has not begun")));
  });
}

}  // namespace
}  // namespace tessera::testing
