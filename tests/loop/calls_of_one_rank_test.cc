// Tests programs in which only one rank makes a call that all ranks must make. Ranks are processes. Such a program
// works if ranks share memory. Otherwise every rank gets an error within 10 s, and the error names the calls. Programs
// wait most of the time, so all of them run at the same time.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/engine.h"
#include "tessera/error.h"
#include "tessera/init.h"
#include "tessera/run.h"
#include "tessera/weights.h"
#include "tests/support/fork_ranks.h"
#include "tests/support/free_port.h"
#include "tests/support/limits/patience.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int kSteps = 4, kOdd = 2;  // at step kOdd one rank does something else

struct Training {
  torch::nn::Sequential model;
  Engine& engine;
  int rank;
  at::Tensor batch(int step) const { return at::randn({4, 6}) + step; }
  at::Tensor loss(int step) { return model->forward(batch(step)).square().mean(); }
};

/// The work of a rank at a step. It returns false when the rank's program ends.
using Step = std::function<bool(Training&, int step)>;

bool train(Training& training, int step) {
  training.engine.backward(training.loss(step));
  training.engine.step();
  return true;
}

/// Returns a program's step. Only rank 0 calls `alone`, before it trains step kOdd.
Step rank_zero_alone(std::function<void(Training&)> alone) {
  return [alone = std::move(alone)](Training& training, int step) {
    if (training.rank == 0 && step == kOdd) alone(training);
    return train(training, step);
  };
}

enum class Setting {
  kShared,   ///< "host_sharing"
  kStrict,   ///< kShared under TESSERA_STRICT
  kPrivate,  ///< a copy on each rank
  kGloo,
};
const char* name_of(Setting setting) {
  constexpr const char* kNames[] = {"shared", "strict", "private", "gloo"};
  return kNames[static_cast<int>(setting)];
}

struct Program {
  const char* name;
  Step step;
  std::vector<Setting> settings;  ///< settings in addition to kGloo
  int steps_more_of_rank_zero = 0;
};

constexpr double kTimeLimit = 3600;  // limit of a call in seconds; no program here takes that long

void evaluate(Training& training) {
  const at::NoGradGuard no_grad;
  for (int step = 0; step < 3; ++step) (void)training.loss(step).item<float>();
}

const Program kPrograms[] = {
    {"a loss that is nobody's, on rank 1",
     [](Training& training, int step) {
       const bool is_odd = training.rank == 1 && step == kOdd;
       training.engine.backward(is_odd ? at::zeros({}).requires_grad_() : training.loss(step));
       training.engine.step();
       return true;
     },
     {Setting::kPrivate}},
    {"rank 0 evaluates by hand", rank_zero_alone(evaluate), {Setting::kShared, Setting::kStrict, Setting::kPrivate}},
    {"rank 0 samples",
     rank_zero_alone([](Training& training) {
       const at::NoGradGuard no_grad;
       at::Tensor x = training.batch(0);
       for (int i = 0; i < 3; ++i) x = training.model->forward(x);
     }),
     {Setting::kShared}},
    {"rank 0 saves",
     rank_zero_alone([](Training& training) {
       const TestFolder folder;
       save_weights(training.engine, folder.path() / "weights.pt");
     }),
     {}},
    {"rank 0 reads a norm",
     rank_zero_alone([](Training& training) {
       for (const at::Tensor& value : training.model->parameters()) (void)value.norm().item<float>();
     }),
     {Setting::kShared}},
    {"rank 1 skips a backward",
     [](Training& training, int step) {
       if (training.rank != 1 || step != kOdd) return train(training, step);
       (void)training.loss(step);
       return true;
     },
     {Setting::kPrivate}},
    {"rank 1 returns early",
     [](Training& training, int step) { return (training.rank != 1 || step != kOdd) && train(training, step); },
     {}},
    {"rank 0 has one batch more", train, {}, 1},
};

void set_variables(int rank, int ranks, int port) {
  const auto put = [](const char* name, int value) { ::setenv(name, std::to_string(value).c_str(), 1); };
  put("RANK", rank);
  put("WORLD_SIZE", ranks);
  put("LOCAL_RANK", rank);
  put("LOCAL_WORLD_SIZE", ranks);
  put("MASTER_PORT", port);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("TESSERA_LOG_LEVEL", "off", 1);
}

/// Returns the seconds of a clock that all processes of this machine share.
double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/// `began_step` is set to the time at which the rank began its last step.
void run_program(const Program& program, Setting setting, double& began_step) {
  Strategy strategy;
  strategy.strategy = ShardingStrategy::kFullShard;
  strategy.units.classes = {"Linear"};
  strategy.host_sharing = setting == Setting::kShared || setting == Setting::kStrict;
  strategy.comm.timeout_s = kTimeLimit;
  if (setting == Setting::kGloo) strategy.comm.transport = TransportChoice::kGloo;
  const Mesh mesh = init(strategy.comm);
  torch::nn::Sequential model(torch::nn::Linear(6, 6), torch::nn::Tanh(), torch::nn::Linear(6, 6), torch::nn::Tanh(),
                              torch::nn::Linear(6, 6));
  Engine engine(model, strategy, mesh);
  Training training{model, engine, mesh.rank()};
  const int steps = kSteps + (mesh.rank() == 0 ? program.steps_more_of_rank_zero : 0);
  for (int step = 0; step < steps; ++step) {
    began_step = now_s();
    if (!program.step(training, step)) return;
  }
}

/// Starts ranks that run the program in tessera::run. A rank's status is the error that ended it. The ranks' store gets
/// the times at which a rank began its last step ("began/RANK") and got its error ("failed/RANK").
std::unique_ptr<ForkedRanks> start(const Program& program, Setting setting) {
  const int port = free_port();
  return std::make_unique<ForkedRanks>(2, [&program, setting, port](int rank, KeyValueStore& outside) -> absl::Status {
    set_variables(rank, 2, port);
    if (setting == Setting::kStrict) ::setenv("TESSERA_STRICT", "1", 1);
    std::string message;
    const auto tell = [&](const char* what, double when) {
      outside.set(what + std::to_string(rank), std::to_string(when)).IgnoreError();
    };
    const int code = run([&] {
      double began_step = 0;
      try {
        run_program(program, setting, began_step);
        tell("began/", began_step);
      } catch (const c10::Error& error) {
        tell("failed/", now_s());
        tell("began/", began_step);
        message = error.what_without_backtrace();
        throw;
      }
    });
    return code == 0 ? absl::OkStatus() : make_error(static_cast<ExitCode>(code), message);
  });
}

/// Returns a time that a rank has told the store, or nothing.
std::optional<double> time_of(KeyValueStore& store, const char* what, int rank) {
  const auto told = store.get(what + std::to_string(rank), std::chrono::milliseconds(0));
  return told.ok() ? std::optional(std::stod(*told)) : std::nullopt;
}

TEST(CallsOfOneRank, CallOnOneRankSucceedsOrIsNamedOnAllRanks) {
  struct Started {
    const Program* program;
    Setting setting;
    std::unique_ptr<ForkedRanks> ranks;
  };
  std::vector<Started> all;
  for (const Program& program : kPrograms) {
    for (const Setting setting : program.settings) all.push_back({&program, setting, start(program, setting)});
    all.push_back({&program, Setting::kGloo, start(program, Setting::kGloo)});
  }
  for (Started& each : all) {
    const RankEnd ends[] = {each.ranks->wait(0, std::chrono::seconds(60)),
                            each.ranks->wait(1, std::chrono::seconds(60))};
    KeyValueStore& store = each.ranks->store();
    const double began = std::max(time_of(store, "began/", 0).value_or(0), time_of(store, "began/", 1).value_or(0));
    for (const int rank : {0, 1}) {
      SCOPED_TRACE(std::string(each.program->name) + ", " + name_of(each.setting) + ", rank " + std::to_string(rank));
      const RankEnd& end = ends[rank];
      EXPECT_EQ(end.signal, 0);
      if (each.setting == Setting::kShared) {
        EXPECT_EQ(end.exit_code, ExitCode::kOk) << end.message;
        continue;
      }
      EXPECT_NE(end.exit_code, ExitCode::kOk);
      const auto failed = time_of(store, "failed/", rank);
      EXPECT_EQ(failed.has_value(), !end.message.empty());
      EXPECT_TRUE(!failed || in_time(*failed - began, 10)) << *failed - began << " s";
      // this rank's program had already ended; the rank learns of the error while ranks leave the job
      if (end.message.empty()) continue;
      // A rank that uses Gloo may get the error of a lost peer (75), with the peer's message if this message has
      // arrived.
      EXPECT_THAT(end.exit_code, AnyOf(ExitCode::kInternal, ExitCode::kCorruptData, ExitCode::kPeerLost))
          << end.message;
      EXPECT_THAT(end.message, AnyOf(HasSubstr("ranks disagree: rank"), HasSubstr("has left"), HasSubstr("has ended"),
                                     HasSubstr("Connection closed by peer")));
      EXPECT_THAT(end.message, AnyOf(HasSubstr("hint"), HasSubstr("every rank must make the same calls")));
    }
  }
}

}  // namespace
}  // namespace tessera::testing
