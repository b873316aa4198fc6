// Tests that all configurations train to the stored bits: losses, norms, rates, parameters, averages, and all states
// that a checkpoint holds. The numbers of gathers and reductions, and the bytes to and from disks, hosts and GPUs, are
// stored too.
//
// traffic.txt has this traffic, which is the same on every machine. Bits depend on LibTorch's kernels. There is
// therefore one file for each version of LibTorch, version of the C library (kernels use its exp and log), and
// instruction set of the kernels. This test sets the instruction set to the lowest one, so that all processors with the
// same instructions give the same bits. If there is no file for this processor, only traffic is compared, and the test
// counts as skipped.
//
// docs/testing.md says when the files may be written again.

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>
#include <gnu/libc-version.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/utsname.h>
#include <torch/headeronly/version.h>

#include <cctype>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "checkpoint/files/hash.h"
#include "checkpoint/saved_checkpoint.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "tessera/checkpoint.h"
#include "tessera/durable.h"
#include "tessera/engine.h"
#include "tests/golden_steps/configuration.h"
#include "tests/golden_steps/gloo_ranks.h"
#include "tests/golden_steps/golden_file.h"
#include "tests/golden_steps/gpu_ranks.h"
#include "tests/support/limits/patience.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace {

/// Chooses the kernels of the lowest instruction set. LibTorch and MKL choose once in a process, so this must be called
/// before either of them computes.
void take_least_kernels() {
  setenv("ATEN_CPU_CAPABILITY", "default", 1);
  setenv("MKL_CBWR", "COMPATIBLE", 1);
  at::globalContext().setUserEnabledMkldnn(false);
}

/// Returns a text with everything outside this project on which bits depend.
std::string key_of_bits() {
  utsname machine{};
  uname(&machine);
  std::string kernels = at::get_cpu_capability();
  for (char& c : kernels) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return c10::str("torch-", TORCH_VERSION, "_", machine.machine, "_", kernels, "_glibc-", gnu_get_libc_version());
}

GoldenFile& golden_traffic() {
  static GoldenFile file(
      TESSERA_GOLDEN_FOLDER "/traffic.txt",
      {"What each configuration has moved when golden_runs_test has trained it. Ranks that moved what rank 0 did are",
       "left out, and so are numbers that are 0.",
       "golden_runs_test compares it. docs/testing.md says when it may be written anew."},
      names_of_configurations());
  return file;
}

GoldenFile& golden_bits() {
  static GoldenFile file(
      c10::str(TESSERA_GOLDEN_FOLDER, "/bits.", key_of_bits(), ".txt"),
      {"What each configuration has trained: floating-point numbers in hexadecimal, to the last bit, and hashes of",
       "tensors. Ranks that have told what rank 0 did are left out.",
       "golden_runs_test compares it. docs/testing.md says when it may be written anew."},
      names_of_configurations());
  return file;
}

constexpr std::int64_t kSteps = 6;
/// The step with a loss far above the other losses, for strategies that look for spikes.
constexpr std::int64_t kSpike = 4;

/// Fills parameters with multiples of 2^-10, which are the same everywhere, since LibTorch's generator is not used.
void fill_with_integers(torch::nn::Module& module) {
  const at::NoGradGuard no_gradients;
  std::uint64_t state = 88172645463325252ull;
  for (const auto& item : module.named_parameters()) {
    const bool is_norm = item.key().find("norm.weight") != std::string::npos;
    at::Tensor values = at::empty(item.value().sizes(), at::kFloat);
    for (std::int64_t i = 0; i < values.numel(); ++i) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      const auto integer = static_cast<std::int64_t>(state % 401) - 200;
      values.mutable_data_ptr<float>()[i] = (is_norm ? 1.0f : 0.0f) + static_cast<float>(integer) / 1024.0f;
    }
    item.value().copy_(values);
  }
}

/// Returns a text that gives a number exactly. All forms of NaN have one text.
std::string text_of(double number) {
  if (std::isnan(number)) return "nan";
  char text[40];
  std::snprintf(text, sizeof text, "%a", number);
  return text;
}

std::string line_of(const StepResult& step) {
  return c10::str("step ", step.step, ": loss ", text_of(step.loss), ", norm ", text_of(step.grad_norm), ", rate ",
                  text_of(step.lr), ", scale ", text_of(step.loss_scale), step.overflow ? ", overflow" : "",
                  step.spike ? ", spike" : "");
}

std::string hash_of(const torch::nn::Module& module) {
  RunningHash hash;
  for (const auto& [name, value] : values_of(module)) {
    const at::Tensor whole = value.contiguous();
    hash.add(std::as_bytes(std::span(whole.const_data_ptr<float>(), static_cast<std::size_t>(whole.numel()))));
  }
  return hash_text(hash.value());
}

/// Writes everything that a checkpoint holds except LibTorch's generators, as one hash for each kind of pieces. The
/// text does not depend on how states are cut over ranks.
void write_states(const std::string& path, GoldenFile::Lines& lines) {
  const auto saved = value_or_throw(SavedCheckpoint::open(path, "rank 0"));
  const Manifest& manifest = saved->manifest();
  std::vector<std::string> kinds = {kMaster, kValue, kFactors, kOuterMomentum};
  for (const SavedState& state : manifest.states) {
    kinds.push_back(state.name);
    kinds.push_back(state.name + kScales);
  }
  for (const char* const kept : kKeptOfRanks) {
    for (std::int64_t rank = 0; rank < manifest.ranks; ++rank) kinds.push_back(of_rank(kept, rank));
  }
  for (const std::string& kind : kinds) {
    RunningHash hash;
    std::int64_t bytes = 0;
    for (const SavedParameter& parameter : manifest.parameters) {
      for (const auto& place : saved->pieces(kind, parameter.name)) {
        std::vector<std::byte> values(static_cast<std::size_t>(place.piece.bytes()));
        throw_if_error(saved->read(kind, parameter.name, place.piece.offset, values));
        hash.add(values);
        bytes += place.piece.bytes();
      }
    }
    if (bytes > 0) lines.push_back(c10::str(kind, ": ", bytes, " bytes, ", hash_text(hash.value())));
  }
  std::map<std::int64_t, std::int64_t> parameters;  // [updates]: number of parameters that had as many
  for (const SavedParameter& parameter : manifest.parameters) ++parameters[parameter.updates];
  std::string updates = "updates:";
  for (const auto& [times, count] : parameters) updates += c10::str(" ", times, " of ", count);
  lines.push_back(updates);
}

/// If activations are read before they have been written to disk, they come from memory. The number of these reads, and
/// the number of reads of all files, therefore depend on the speed of the disk.
void write_traffic(const Engine& engine, GoldenFile::Lines& lines) {
  const TrafficCounts traffic = engine.traffic();
  Line("gathers")
      .add("calls", traffic.gathers)
      .add("bytes", traffic.gathered_bytes)
      .add("ahead", traffic.prefetched_gathers)
      .add("beyond the slots", traffic.overflow_slots)
      .to(lines);
  Line("reductions")
      .add("calls", traffic.reductions)
      .add("bytes", traffic.reduced_bytes)
      .add("beyond the buckets", traffic.overflow_buckets)
      .to(lines);
  if (engine.strategy().offload.activations != Tier::kNvme)
    Line("disk").add("read", traffic.disk_bytes_read).add("written", traffic.disk_bytes_written).to(lines);
  Line("GPU")
      .add("streamed", traffic.streamed_bytes)
      .add("uploaded", traffic.uploaded_bytes)
      .add("step to host", traffic.host_step.to_host)
      .add("step to GPU", traffic.host_step.to_gpu)
      .add("gradients to host", traffic.gradients.to_host)
      .add("gradients to GPU", traffic.gradients.to_gpu)
      .to(lines);
}

/// The report of one rank about its training.
struct Told {
  GoldenFile::Lines traffic, bits;
  GoldenFile::Lines states;  ///< the states of all ranks together; only rank 0 reports them
};

class Training {
 public:
  Training(const Mesh& mesh, const Configuration& configuration, const std::filesystem::path& folder)
      : mesh_(mesh),
        configuration_(configuration),
        folder_(folder),
        strategy_(configuration.trained(folder)),
        model_(make_tiny(configuration.model, false)) {
    at::set_num_threads(1);
    fill_with_integers(*model_);
    engine_ = std::make_unique<Engine>(model_, strategy_, mesh_, own_rules_for(strategy_));
  }

  Told told() {
    std::vector<StepResult> steps;
    for (std::int64_t step = 1; step <= kSteps; ++step) steps.push_back(train(step));
    Told told;
    for (StepResult& step : steps) {
      step.wait();
      told.bits.push_back(line_of(step));
    }
    write_traffic(*engine_, told.traffic);
    expect_planned();
    told.bits.push_back("parameters: " + values(Gathered::kRead));
    if (strategy_.ema.decay > 0) told.bits.push_back("averages: " + values(Gathered::kEma));
    save(told.states);
    return told;
  }

 private:
  StepResult train(std::int64_t step) {
    const bool is_spike = strategy_.on_spike.action != SpikeAction::kNone && step == kSpike;
    const std::int64_t microbatches = strategy_.gradient_accumulation;
    for (std::int64_t m = 0; m < microbatches; ++m) {
      const Batch& batch = batches_[static_cast<std::size_t>((step - 1) * microbatches + m)];
      const at::Tensor loss = model_->forward(rows_of(batch.tokens), rows_of(batch.targets));
      engine_->backward(is_spike ? loss * 16 : loss, {.tokens = batch.tokens.numel() / mesh_.world_size()});
    }
    StepResult result = engine_->step();
    if (strategy_.durable.every > 0) commit_durable(*engine_);
    return result;
  }

  at::Tensor rows_of(const at::Tensor& batch) const {
    const std::int64_t rows = batch.size(0) / mesh_.world_size();
    return batch.narrow(0, mesh_.rank() * rows, rows).to(engine_->device());
  }

  std::string values(Gathered::Mode mode) {
    const Gathered gathered(*engine_, mode);
    return hash_of(*model_);
  }

  /// Checks that the plan that golden_plans_test compares is the plan that was carried out.
  void expect_planned() const {
    const PlannedMemory plan = engine_->plan();
    const Strategy strategy = configuration_.planned();
    Tiny unplanned = make_tiny(configuration_.model, true);
    const PlannedMemory wanted = plan_memory(*unplanned, strategy, configuration_.topology(), own_rules_for(strategy));
    EXPECT_EQ(plan.use.bytes, wanted.use.bytes);
    EXPECT_EQ(plan.disk, wanted.disk);
    EXPECT_EQ(plan.streamed_bytes, wanted.streamed_bytes);
    EXPECT_EQ(plan.host_step, wanted.host_step);
    EXPECT_EQ(plan.uploaded_bytes, wanted.uploaded_bytes);
    EXPECT_EQ(plan.gradients, wanted.gradients);
  }

  void save(GoldenFile::Lines& lines) {
    if (strategy_.durable.every > 0) finish_commit(*engine_);
    const std::string path = save_checkpoint(*engine_, folder_ / "checkpoints");
    finish_checkpoint(*engine_);
    if (mesh_.rank() == 0) write_states(path, lines);
  }

  const Mesh& mesh_;
  const Configuration& configuration_;
  const std::filesystem::path& folder_;
  const Strategy strategy_;
  Tiny model_;
  std::unique_ptr<Engine> engine_;
  const std::vector<Batch> batches_ = make_batches(2 * kSteps, 24, 5, 32);
};

/// Returns the lines of all ranks' reports. If a rank reported the same as rank 0, its report is left out.
GoldenFile::Lines of_all_ranks(const std::vector<Told>& told, GoldenFile::Lines Told::*kind) {
  GoldenFile::Lines lines = told[0].*kind;
  for (std::size_t rank = 1; rank < told.size(); ++rank) {
    if (told[rank].*kind == told[0].*kind) continue;
    for (const std::string& line : told[rank].*kind) lines.push_back(c10::str("rank ", rank, ", ", line));
  }
  return lines;
}

GoldenFile::Lines bits_of(const std::vector<Told>& told) {
  GoldenFile::Lines lines = of_all_ranks(told, &Told::bits);
  lines.insert(lines.end(), told[0].states.begin(), told[0].states.end());
  return lines;
}

std::vector<Told> trained(const Configuration& configuration) {
  const TestFolder folder;
  std::vector<Told> told(static_cast<std::size_t>(configuration.ranks));
  const auto body = [&](const Mesh& mesh) {
    told[static_cast<std::size_t>(mesh.rank())] = Training(mesh, configuration, folder.path()).told();
  };
  const ThreadRanks ranks{.ranks = configuration.ranks, .hosts = configuration.topology().num_hosts()};
  if (configuration.is_on_gpu()) {
    run_on_gpus(configuration.ranks, configuration.joined == Joined::kCudaHost, body);
  } else {
    run_ranks(configuration.joined == Joined::kMemory ? ranks : over_gloo(ranks), body);
  }
  return told;
}

class GoldenRuns : public ::testing::TestWithParam<Configuration> {
 protected:
  static void TearDownTestSuite() {
    golden_traffic().write();
    golden_bits().write();
    // CTest counts a test that prints this line as skipped, even if it fails. The line is printed only if none failed.
    if (GoldenFile::is_written_anew() || golden_bits().is_there() || ::testing::UnitTest::GetInstance()->Failed())
      return;
    std::cout << "no golden for this processor: losses not compared, and there is no " << golden_bits().path().string()
              << ". hint: on a tree whose bits are right, TESSERA_WRITE_GOLDEN=1 makes it" << std::endl;
  }
};

TEST_P(GoldenRuns, BitsAndTrafficEqualTheStoredOnes) {
  const Configuration& configuration = GetParam();
  if (configuration.is_on_gpu() && !has_emulated_gpus()) GTEST_SKIP() << "this build emulates no GPUs";
  const std::vector<Told> told = trained(configuration);
  golden_traffic().expect(configuration.name, of_all_ranks(told, &Told::traffic));
  if (GoldenFile::is_written_anew() || golden_bits().is_there())
    golden_bits().expect(configuration.name, bits_of(told));
  if (GoldenFile::is_written_anew()) GTEST_SKIP() << "stored, and not compared";
  if (!golden_bits().is_there()) GTEST_SKIP() << "only traffic was compared";
}

INSTANTIATE_TEST_SUITE_P(Configurations, GoldenRuns, ::testing::ValuesIn(configurations()),
                         [](const auto& info) { return name_of_case(info.param); });

TEST(GoldenRunsFiles, SectionsAreExactlyTheConfigurations) {
  golden_traffic().expect_no_other_sections();
  if (golden_bits().is_there()) golden_bits().expect_no_other_sections();
}

/// When a rank ends, Gloo's connections to it end, and so do the waits of other ranks for it.
TEST(RanksOverGloo, OneFailedRankEndsAllAtOnce) {
  Deadline half_of_the_ranks_limit(std::chrono::seconds(30));
  const auto body = [](const Mesh& mesh) {
    const MeshAxes axes = value_or_throw(groups_of(mesh).axes(1, mesh.world_size()));
    if (mesh.rank() == 1) throw std::runtime_error("rank 1 has failed");
    throw_if_error(axes.world->barrier("nobody else comes").wait());
  };
  try {
    run_ranks(over_gloo({.ranks = 2, .hosts = 2}), body);
    FAIL() << "the failure is lost";
  } catch (const std::exception& error) {
    EXPECT_STREQ(error.what(), "rank 1 has failed");
  }
  EXPECT_FALSE(half_of_the_ranks_limit.passed());
}

/// This initializer runs before any test, and so before LibTorch computes.
[[maybe_unused]] const bool kTakesLeastKernels = (take_least_kernels(), true);

}  // namespace
}  // namespace tessera::testing
