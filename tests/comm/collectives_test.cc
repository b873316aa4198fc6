// Tests collectives among threads: their results, and how ranks learn of a failure, a timeout, or calls that do not
// agree.

#include <gmock/gmock.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "runtime/base/status.h"
#include "runtime/comm/flight_recorder.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/shared/run_ranks.h"
#include "runtime/config/transport_rows.h"
#include "tests/comm/collectives_properties.h"
#include "tests/support/limits/patience.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

MeshAxes world_axes(const Mesh& mesh) {
  auto axes = groups_of(mesh).axes(1, mesh.world_size());
  require_ok(axes.status());
  return *std::move(axes);
}

TEST(Transports, GroupsOfGpusAreOfTheKindsWhoseRowSaysSo) {
  for (const TransportRow& row : transport_rows()) {
    EXPECT_EQ(is_of_gpus(kind_of(row.choice)), has(row.choice, transport_traits::kOnGpu)) << row.word;
    EXPECT_FALSE(has(TransportChoice::kAuto, row.traits)) << row.word;
    EXPECT_EQ(transport_named(row.word), row.choice) << row.word;
  }
  EXPECT_EQ(kind_of(TransportChoice::kGloo), TransportKind::kGloo);
  EXPECT_EQ(transport_named(""), TransportChoice::kAuto);
  EXPECT_EQ(transports_with(transport_traits::kOnGpu), "nccl or cuda_host");
  for (const TransportKind kind : {TransportKind::kSolo, TransportKind::kThread, TransportKind::kOwn})
    EXPECT_FALSE(is_of_gpus(kind));
}

class ThreadCollectives : public ::testing::TestWithParam<int> {};

TEST_P(ThreadCollectives, EveryOperationIsExact) {
  run_ranks({.ranks = GetParam()}, [](const Mesh& mesh) {
    const MeshAxes axes = world_axes(mesh);
    check_all_operations(*axes.world, false, 20001);
    check_all_operations(*axes.reduce, true, 20001);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ThreadCollectives, ::testing::Values(1, 2, 3, 4, 5, 8));

TEST(ThreadCollectives, ManySmallCallsInARowAreExact) {
  run_ranks({.ranks = 3}, [](const Mesh& mesh) {
    const MeshAxes axes = world_axes(mesh);
    for (int i = 0; i < 2000; ++i) {
      float mine = static_cast<float>(mesh.rank() + i);
      float sum = 0;
      require_ok(axes.world->all_reduce("sum", &mine, DType::kF32, &sum, 1).wait());
      require(sum == static_cast<float>(3 * i + 3), "sum of call " + std::to_string(i));
    }
  });
}

TEST(ThreadCollectives, MeshAxesJoinTheRightRanks) {
  run_ranks({.ranks = 6}, [](const Mesh& mesh) {
    auto axes = groups_of(mesh).axes(2, 3);
    require_ok(axes.status());
    std::vector<int> shard(3), replicate(2);
    const int mine = mesh.rank();
    require_ok(axes->gather->all_gather("", &mine, shard.data(), sizeof mine).wait());
    require_ok(axes->replicate->all_gather("", &mine, replicate.data(), sizeof mine).wait());
    const int first = mine / 3 * 3;
    require(shard == std::vector<int>({first, first + 1, first + 2}), "shard axis");
    require(replicate == std::vector<int>({mine % 3, mine % 3 + 3}), "replicate axis");
    require(axes->replicate_index == mine / 3 && axes->shard_index == mine % 3, "place");
    require(groups_of(mesh).axes(4, 2).status().code() == absl::StatusCode::kInvalidArgument, "4 x 2 is not 6");
  });
}

TEST(ThreadCollectives, SecondCopyJoinsNeighboursOfTheShardAxis) {
  run_ranks({.ranks = 8}, [](const Mesh& mesh) {
    const auto axes = groups_of(mesh).axes(2, 4);
    require_ok(axes.status());
    const auto group = groups_of(mesh).secondary(*axes, 2);
    require_ok(group.status());
    std::vector<int> members(2);
    const int mine = mesh.rank(), first = mine / 2 * 2;
    require_ok((*group)->all_gather("", &mine, members.data(), sizeof mine).wait());
    require(members == std::vector<int>({first, first + 1}), "neighbours");
  });
}

/// Returns the statuses that the ranks' bodies returned.
std::vector<absl::Status> statuses(int ranks, const std::function<absl::Status(const Mesh&)>& body,
                                   double timeout_s = 60) {
  std::vector<absl::Status> results(ranks);
  run_ranks({.ranks = ranks, .timeout_s = timeout_s}, [&](const Mesh& mesh) { results[mesh.rank()] = body(mesh); });
  return results;
}

TEST(ThreadFailures, RanksThatDisagreeAllFailWithBothCalls) {
  const auto results = statuses(4, [](const Mesh& mesh) {
    const MeshAxes axes = world_axes(mesh);
    std::vector<float> input(400), output(400);
    const std::size_t numel = mesh.rank() == 2 ? 99 : 100;
    return axes.world->reduce_scatter("blocks.3", input.data(), DType::kF32, output.data(), numel).wait();
  });
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(exit_code_of(results[rank]), ExitCode::kInternal);
    EXPECT_THAT(message_of(results[rank]),
                AllOf(HasSubstr("rank " + std::to_string(rank) + "/4 blocks.3 reduce_scatter #1"),
                      HasSubstr("rank 0 calls reduce_scatter 'blocks.3' of 100 fp32"),
                      HasSubstr("rank 2 calls reduce_scatter 'blocks.3' of 99 fp32")));
  }
}

TEST(ThreadFailures, DifferentOperationsAndLabelsAreNoticed) {
  for (const bool labels : {false, true}) {
    const auto results = statuses(2, [&](const Mesh& mesh) {
      const MeshAxes axes = world_axes(mesh);
      float value = 1;
      if (mesh.rank() == 0) return axes.world->all_reduce("a", &value, DType::kF32, &value, 1).wait();
      if (labels) return axes.world->all_reduce("b", &value, DType::kF32, &value, 1).wait();
      return axes.world->barrier("a").wait();
    });
    for (const auto& result : results) EXPECT_EQ(exit_code_of(result), ExitCode::kInternal) << result;
  }
}

TEST(ThreadFailures, FailedGroupReturnsTheSameErrorAgain) {
  statuses(2, [](const Mesh& mesh) {
    const MeshAxes axes = world_axes(mesh);
    float value = 1;
    const auto first = axes.world->all_reduce(mesh.rank() ? "a" : "b", &value, DType::kF32, &value, 1).wait();
    const auto second = axes.world->barrier("later").wait();
    require(!first.ok() && first == second, "the same status twice");
    return first;
  });
}

// A rank that learned of a failure may call again while another rank is still in the previous call.
TEST(ThreadFailures, ReasonReachesLateRanksWhileOthersGoOnCalling) {
  for (int trial = 0; trial < 300; ++trial) {
    const auto results = statuses(3, [&](const Mesh& mesh) {
      const MeshAxes axes = world_axes(mesh);
      absl::Status first;
      for (int i = 0; i < 8; ++i) {
        if (mesh.rank() == 1 && i == 3) axes.world->abort(make_error(ExitCode::kCorruptData, "the reason"));
        first.Update(axes.world->barrier(std::to_string(i)).wait());
      }
      return first;
    });
    for (const absl::Status& result : results) ASSERT_THAT(message_of(result), HasSubstr("the reason")) << trial;
  }
}

TEST(ThreadFailures, ExceptionOfOneRankEndsTheOthersAndIsRethrown) {
  std::atomic<int> told = 0;
  const auto body = [&](const Mesh& mesh) {
    const MeshAxes axes = world_axes(mesh);
    if (mesh.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      throw std::runtime_error("the model of rank 1 is broken");
    }
    const absl::Status status = axes.world->barrier("step").wait();
    if (message_of(status).find("rank 1 gave up: the model of rank 1 is broken") != std::string::npos) ++told;
    throw std::runtime_error(message_of(status));
  };
  try {
    run_ranks({.ranks = 3}, body);
    FAIL() << "did not throw";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "the model of rank 1 is broken");
  }
  EXPECT_EQ(told, 2);
}

TEST(ThreadFailures, RankThatReturnsEarlyIsNamedAsLeft) {
  const auto results = statuses(3, [](const Mesh& mesh) {
    const MeshAxes axes = world_axes(mesh);
    TESSERA_RETURN_IF_ERROR(axes.world->barrier("first").wait());
    return mesh.rank() == 1 ? absl::OkStatus() : axes.world->barrier("second").wait();
  });
  EXPECT_TRUE(results[1].ok());
  for (int rank : {0, 2}) {
    EXPECT_EQ(exit_code_of(results[rank]), ExitCode::kPeerLost);
    EXPECT_THAT(message_of(results[rank]), AllOf(HasSubstr("second barrier #2"), HasSubstr("rank 1 ")));
  }
  EXPECT_THAT(message_of(results[0]) + message_of(results[2]), HasSubstr("rank 1 has left, last in barrier 'first'"));
}

TEST(ThreadFailures, EndedRankIsNotWaitedForWhileItsGroupsLive) {
  const auto results = statuses(3, [](const Mesh& mesh) {
    const MeshAxes axes = world_axes(mesh);
    TESSERA_ASSIGN_OR_RETURN(const auto user, groups_of(mesh).user_group());
    TESSERA_RETURN_IF_ERROR(axes.world->barrier("first").wait());
    if (mesh.rank() != 1) return axes.world->barrier("second").wait();
    groups_of(mesh).leave();
    return user->barrier("the end").wait();  // the other ranks never make this call
  });
  for (int rank : {0, 2}) EXPECT_EQ(exit_code_of(results[rank]), ExitCode::kPeerLost);
  EXPECT_THAT(message_of(results[0]) + message_of(results[2]), HasSubstr("rank 1 has left, last in barrier 'first'"));
  EXPECT_FALSE(results[1].ok());
}

/// Makes a barrier that rank 1 reaches only after rank 0 has stopped waiting for it.
absl::Status meet_late(const MeshAxes& axes, std::atomic<bool>& has_given_up) {
  if (axes.world->rank() == 1) has_given_up.wait(false);
  const absl::Status status = axes.world->barrier("late").wait();
  has_given_up = true;
  has_given_up.notify_all();
  return status;
}

TEST(ThreadFailures, TimeoutNamesTheMissingRankAndItsLastCall) {
  const double timeout_s = patient_s(0.3);
  Deadline soon(std::chrono::seconds(3));
  std::atomic<bool> has_given_up = false;
  const auto results = statuses(
      2,
      [&](const Mesh& mesh) {
        const MeshAxes axes = world_axes(mesh);
        TESSERA_RETURN_IF_ERROR(axes.world->barrier("warm").wait());
        return meet_late(axes, has_given_up);
      },
      timeout_s);
  EXPECT_FALSE(soon.passed());
  EXPECT_EQ(exit_code_of(results[0]), ExitCode::kPeerLost);
  EXPECT_THAT(message_of(results[0]),
              AllOf(HasSubstr("rank 0/2 late barrier #2"), ContainsRegex("timed out after [0-9.]+ s"),
                    HasSubstr("rank 1, last in barrier 'warm' (#1)")));
  EXPECT_THAT(message_of(results[1]), HasSubstr("rank 0 gave up"));
}

// Fault F5 (docs/faults.md): after a failure, one can compare the calls that the ranks were making when it happened.
TEST(ThreadFailures, FlightRecordsHaveTheLastCallsOfAllGroups) {
  const std::string folder = ::testing::TempDir() + "flight-" + std::to_string(::getpid());
  ::setenv("TESSERA_FLIGHT_RECORDS", folder.c_str(), 1);
  const double timeout_s = patient_s(0.3);
  std::atomic<bool> has_given_up = false;
  const auto results = statuses(
      2,
      [&](const Mesh& mesh) {
        const MeshAxes axes = world_axes(mesh);
        float sum[2] = {1, 2};
        for (int i = 0; i < 70; ++i)
          TESSERA_RETURN_IF_ERROR(axes.reduce->all_reduce("sums", sum, DType::kF32, sum, 2).wait());
        return meet_late(axes, has_given_up);
      },
      timeout_s);
  ::unsetenv("TESSERA_FLIGHT_RECORDS");
  for (const char* rank : {"0", "1"}) {
    EXPECT_EQ(exit_code_of(results[*rank - '0']), ExitCode::kPeerLost);
    std::ifstream file(folder + "/rank-0000" + rank + ".json");
    const nlohmann::json record = nlohmann::json::parse(file);
    EXPECT_THAT(record.at("why").get<std::string>(), HasSubstr("late barrier"));
    std::map<std::string, nlohmann::json> groups;
    for (const auto& group : record.at("groups")) {
      const auto name = group.at("name").get<std::string>();
      groups[name.substr(name.rfind('.') + 1)] = group.at("calls");
    }
    ASSERT_EQ(groups.at("reduce").size(), FlightRecorder::kCalls);
    EXPECT_EQ(groups.at("reduce").back().at("number"), 70);
    EXPECT_EQ(groups.at("reduce").back().at("operation"), "all_reduce");
    EXPECT_TRUE(groups.at("reduce").back().at("ended_s").is_number());
    ASSERT_EQ(groups.at("world").size(), 1u);
    EXPECT_EQ(groups.at("world")[0].at("label"), "late");
    EXPECT_TRUE(groups.at("world")[0].at("ended_s").is_null());
  }
  std::filesystem::remove_all(folder);
}

TEST(ThreadFailures, AbortEndsCallsUnderWayInEveryGroupWithItsReason) {
  const auto results = statuses(3, [](const Mesh& mesh) {
    MeshAxes axes = world_axes(mesh);
    if (mesh.rank() == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      EXPECT_FALSE(groups_of(mesh).told_by_peer());
      groups_of(mesh).abort(make_error(ExitCode::kIo, "the disk is full"));
      EXPECT_FALSE(groups_of(mesh).told_by_peer());
      return axes.reduce->barrier("own").wait();
    }
    const absl::Status told = (mesh.rank() == 0 ? axes.gather : axes.world)->barrier("step").wait();
    groups_of(mesh).abort(
        make_error(exit_code_of(told), message_of(told)));  // tessera::run calls this when a program throws the error
    EXPECT_TRUE(groups_of(mesh).told_by_peer());
    axes = MeshAxes();  // an exception destroys the Engine with its groups, and then the rank's last words are written
    EXPECT_TRUE(groups_of(mesh).told_by_peer());
    return told;
  });
  for (const auto& result : results) {
    EXPECT_EQ(exit_code_of(result), ExitCode::kIo);
    EXPECT_THAT(message_of(result), HasSubstr("the disk is full"));
  }
  EXPECT_THAT(message_of(results[0]), HasSubstr("rank 2 gave up"));
}

TEST(ThreadFailures, DifferentPlacesOfCommonMemoryFailOnAllRanks) {
  const auto results = statuses(2, [](const Mesh& mesh) {
    const MeshAxes axes = world_axes(mesh);
    auto buffer = axes.world->allocate_common(4096);
    require_ok(buffer.status());
    std::byte* full = (*buffer)->data() + 64 * mesh.rank();
    return axes.world->all_gather("blocks.3", full + 8 * mesh.rank(), full, 8).wait();
  });
  for (const auto& result : results)
    EXPECT_THAT(message_of(result), AllOf(HasSubstr("blocks.3 all_gather"), HasSubstr("different places"))) << result;
}

TEST(ThreadFailures, CommonAndOwnMemoryInOneCallIsADisagreement) {
  const auto results = statuses(2, [](const Mesh& mesh) {
    const MeshAxes axes = world_axes(mesh);
    auto buffer = axes.world->allocate_common(4096);
    require_ok(buffer.status());
    std::vector<std::byte> own(16);
    std::byte* data = mesh.rank() == 0 ? (*buffer)->data() : own.data();
    return axes.world->broadcast("blocks.3", data, 16, 0).wait();
  });
  for (const auto& result : results)
    EXPECT_THAT(message_of(result), HasSubstr("rank 0 calls broadcast 'blocks.3' of 16 bytes from 0 in common memory"));
}

TEST(ThreadFailures, WrongArgumentsAreRefusedOnAllRanks) {
  const auto results = statuses(2, [](const Mesh& mesh) {
    const MeshAxes axes = world_axes(mesh);
    float value = 0;
    if (mesh.rank() == 0) return axes.world->all_reduce("x", &value, DType::kI64, &value, 1).wait();
    return axes.world->barrier("x").wait();
  });
  EXPECT_THAT(message_of(results[0]), HasSubstr("got int64"));
  EXPECT_THAT(message_of(results[1]), HasSubstr("rank 0 gave up"));
}

TEST(RunRanks, RanksThatDoNotFillTheirHostsAreRefused) {
  EXPECT_THROW(run_ranks({.ranks = 3, .hosts = 2}, [](const Mesh&) {}), std::invalid_argument);
}

}  // namespace
}  // namespace tessera
