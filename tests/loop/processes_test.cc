// Tests the functions that Tessera offers a training loop besides the Engine. Ranks are processes, over shared memory,
// Gloo, and both.

#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <stdlib.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "offload/files/fault_plan.h"
#include "tessera/checkpoint.h"
#include "tessera/collectives.h"
#include "tessera/engine.h"
#include "tessera/error.h"
#include "tessera/init.h"
#include "tessera/run.h"
#include "tests/support/fork_ranks.h"
#include "tests/support/free_port.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

struct World {
  int ranks = 2, hosts = 1;
  TransportChoice transport = TransportChoice::kAuto;
};

const World kWorlds[] = {{2}, {3, 1, TransportChoice::kGloo}, {4, 2}};

void set_variables(int rank, const World& world, int port) {
  const int per_host = world.ranks / world.hosts;
  const auto put = [](const char* name, int value) { ::setenv(name, std::to_string(value).c_str(), 1); };
  put("RANK", rank);
  put("WORLD_SIZE", world.ranks);
  put("LOCAL_RANK", rank % per_host);
  put("LOCAL_WORLD_SIZE", per_host);
  put("GROUP_RANK", rank / per_host);
  put("MASTER_PORT", port);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("TESSERA_LOG_LEVEL", "off", 1);
}

/// Calls tessera::run on each rank of `world`, with a mesh. The status of a rank is the exit code of this call.
/// Ranks use `told` to send each other messages without the mesh.
std::vector<RankEnd> run_on(const World& world, const std::function<void(const Mesh&, KeyValueStore& told)>& body) {
  const int port = free_port();
  return fork_ranks(world.ranks, [&](int rank, KeyValueStore& told) -> absl::Status {
    set_variables(rank, world, port);
    CommConfig comm;
    comm.transport = world.transport;
    const int code = run([&] { body(init(comm), told); });
    return code == 0 ? absl::OkStatus() : make_error(static_cast<ExitCode>(code), "run returned an error");
  });
}

void expect_success(const std::vector<RankEnd>& ends) {
  for (std::size_t rank = 0; rank < ends.size(); ++rank)
    EXPECT_TRUE(ends[rank].exit_code == ExitCode::kOk && ends[rank].signal == 0)
        << "rank " << rank << ": " << ends[rank].message << ", signal " << ends[rank].signal;
}

TEST(UserCollectivesOfProcesses, ResultsAreExactOnEveryTransport) {
  for (const World& world : kWorlds) {
    expect_success(run_on(world, [&](const Mesh& mesh, KeyValueStore&) {
      const int n = mesh.world_size();
      for (const std::int64_t numel : {3, 100'003}) {
        const at::Tensor tensor = at::full({numel}, mesh.rank() + 1.0, at::kDouble);
        all_reduce(mesh, tensor);
        TORCH_CHECK(tensor.eq(n * (n + 1) / 2).all().item<bool>(), "all_reduce of ", numel);
      }
      const std::vector<std::string> texts = all_gather(mesh, std::string(mesh.rank(), 'x'));
      for (int rank = 0; rank < n; ++rank) TORCH_CHECK(texts.at(rank) == std::string(rank, 'x'), "strings");
      TORCH_CHECK(broadcast(mesh, std::to_string(mesh.rank()), n - 1) == std::to_string(n - 1), "broadcast");
      try {
        all_reduce(mesh, at::full({mesh.rank() + 1}, 1.0));
        TORCH_CHECK(false, "shapes that differ were accepted");
      } catch (const Error& error) {
        TORCH_CHECK(error.exit_code() == ExitCode::kUsage, error.message());
      }
      barrier(mesh);
    }));
  }
}

TEST(Run, RanksEndTogether) {
  for (const World& world : kWorlds) {
    const int port = free_port();
    expect_success(fork_ranks(world.ranks, [&](int rank, KeyValueStore& told) -> absl::Status {
      set_variables(rank, world, port);
      CommConfig comm;
      comm.transport = world.transport;
      const int code = run([&] {
        const Mesh mesh = init(comm);
        if (!mesh.is_main()) return;
        std::this_thread::sleep_for(300ms);  // as if this rank wrote a file
        TORCH_CHECK(told.set("written", "yes").ok());
      });
      TESSERA_ASSIGN_OR_RETURN(const bool written, told.has("written"));
      if (code != 0) return make_error(static_cast<ExitCode>(code), "run returned an error");
      return written ? absl::OkStatus() : make_error(ExitCode::kInternal, "left before rank 0 was ready");
    }));
  }
}

TEST(Run, RankWaitingAtItsEndLearnsOfAnotherRanksFailure) {
  for (const World& world : kWorlds) {
    Deadline soon(15s);
    const auto ends = run_on(world, [](const Mesh& mesh, KeyValueStore&) {
      if (mesh.is_main()) return;
      std::this_thread::sleep_for(200ms);
      throw Error(ExitCode::kCorruptData, "the file is damaged");
    });
    EXPECT_FALSE(soon.passed());
    for (const RankEnd& end : ends) EXPECT_NE(end.exit_code, ExitCode::kOk);
    EXPECT_EQ(ends[1].exit_code, ExitCode::kCorruptData);
  }
}

// The disk turns out to be full after the program has ended its work. The exit code still shows this.
TEST(Run, SaveThatFailsAfterTheProgramsEndSetsTheExitCode) {
  const TestFolder folder;
  const auto ends = run_on({2}, [&](const Mesh& mesh, KeyValueStore&) {
    const ScopedFaults full(
        {{.site = FaultSite::kWrite, .path = "rank-00001", .nth = 1, .action = FaultAction::kErrno, .number = ENOSPC}});
    Strategy strategy;
    strategy.checkpoint.async = true;
    Engine engine(torch::nn::Linear(4, 4), strategy, mesh);
    save_checkpoint(engine, folder.path());
  });
  for (const RankEnd& end : ends) EXPECT_EQ(end.exit_code, ExitCode::kIo) << end.message;
}

TEST(Run, HandledErrorDoesNotDelayTheEnd) {
  expect_success(run_on({2}, [](const Mesh& mesh, KeyValueStore&) {
    try {
      const Engine engine(torch::nn::Linear(4, mesh.rank() + 1), Strategy(), mesh);
      TORCH_CHECK(false, "modules that differ were accepted");
    } catch (const Error&) {  // the mesh has ended on both ranks
    }
  }));
}

}  // namespace
}  // namespace tessera::testing
