#include "tests/programs/harness.h"

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "runtime/base/status.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tests/support/pairwise.h"

namespace tessera::testing {
namespace {

/// AdamW divides by the root of the second moment plus eps. LibTorch's eps is 1e-8. If two runs then differ in the last
/// bit of a gradient that is nearly zero, the parameter may differ by a whole step. This eps makes the runs comparable.
constexpr double kEps = 1e-2;

Strategy strategy_of(const Placed& placed, const ProgramOptions& options) {
  Strategy strategy = strategy_for(placed, nullptr, options.dtype);
  strategy.optimizer.eps = kEps;
  if (options.adjust) options.adjust(strategy);
  return strategy;
}

void expect_close(double got, double wanted, double tolerance, const std::string& what) {
  EXPECT_LE(std::abs(got - wanted), tolerance * (std::abs(wanted) + 1)) << what << ": " << got << ", wanted " << wanted;
}

void compare(const Scene& got, const Scene& wanted, const ProgramOptions& options) {
  ASSERT_EQ(got.numbers.size(), wanted.numbers.size());
  for (std::size_t i = 0; i < got.numbers.size(); ++i) {
    expect_close(got.numbers[i], wanted.numbers[i], options.loss_tolerance,
                 "rank " + std::to_string(got.rank()) + ", number " + std::to_string(i));
  }
  ASSERT_EQ(got.values.size(), wanted.values.size());
  for (std::size_t i = 0; i < got.values.size(); ++i) {
    const at::Tensor& value = wanted.values[i].second;
    ASSERT_EQ(got.values[i].second.sizes(), value.sizes()) << wanted.values[i].first;
    const at::Tensor difference = (got.values[i].second - value).abs() / (value.abs() + 1);
    const double most = difference.numel() == 0 ? 0 : difference.max().item<double>();
    EXPECT_LE(most, options.tolerance) << "rank " << got.rank() << ", " << wanted.values[i].first;
  }
}

void run_cell(const Cell& cell, const Program& program, const ProgramOptions& options, const Scene* plain) {
  const Strategy strategy = strategy_of(cell.placed, options);
  try {
    run_ranks({.ranks = cell.ranks, .timeout_s = options.timeout_s}, [&](const Mesh& mesh) {
      at::set_num_threads(1);
      const ::testing::ScopedTrace trace(__FILE__, __LINE__, cell.name());  // each thread needs its own trace
      Scene scene(strategy, mesh);
      program(scene);
      if (plain) compare(scene, *plain, options);
    });
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
}

}  // namespace

bool Scene::is_sharded() const {
  if (is_plain()) return false;
  if (strategy_.offload.parameters.tier == Tier::kNvme) return true;
  if (mesh_->world_size() == 1 || strategy_.host_sharing) return false;
  return strategy_.strategy == ShardingStrategy::kFullShard || strategy_.strategy == ShardingStrategy::kShardGradOp;
}

bool Scene::shares_parameters() const {
  return !is_plain() && mesh_->world_size() > 1 && strategy_.host_sharing && !is_sharded() &&
         strategy_.strategy != ShardingStrategy::kNoShard;  // an unsharded optimizer is not divided
}

at::Tensor Scene::rows(const at::Tensor& batch, std::int64_t index, std::int64_t count) const {
  const std::int64_t rows = batch.size(0) / count;
  const at::Tensor microbatch = batch.narrow(0, index * rows, rows);
  return is_plain() ? microbatch : rows_of(microbatch, *mesh_);
}

void Scene::note(Trainer& trainer, const torch::nn::Module& module) {
  trainer.read([&] {
    for (auto& value : values_of(module)) values.push_back(std::move(value));
  });
}

void Scene::refused(const Trainer::Action& call, const Refusal& wanted) const {
  if (is_plain()) return;
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), wanted.code.value_or(error.exit_code())) << error.message();
    for (const std::string& text : wanted.texts) EXPECT_THAT(error.message(), ::testing::HasSubstr(text));
    return;
  } catch (const c10::Error& error) {
    // An operator threw the error. If the Engine made the operator throw, the group has ended with the expected code.
    if (wanted.code) {
      EXPECT_EQ(exit_code_of(groups_of(*mesh_).status()), *wanted.code) << error.what();
    }
    for (const std::string& text : wanted.texts) EXPECT_THAT(error.what(), ::testing::HasSubstr(text));
    return;
  }
  ADD_FAILURE() << "rank " << rank() << ": accepted, wanted a refusal with \"" << wanted.texts.at(0) << "\"";
}

void for_each_cell(const std::function<void(const Cell&)>& body) {
  const Placed placements[] = {Placed(ShardingStrategy::kFullShard, /*shared=*/false, /*on_disk=*/true),
                               ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp,
                               ShardingStrategy::kShardGradients, ShardingStrategy::kNoShard};
  for (const auto& [ranks, shared, placed] : pairwise_of(std::array{1, 2, 3}, std::array{true, false}, placements)) {
    const Cell cell{ranks, Placed(placed.kind, shared, placed.on_disk)};
    SCOPED_TRACE(cell.name());
    body(cell);
  }
}

void expect_like_plain(const Program& program, const ProgramOptions& options) {
  at::set_num_threads(1);
  Scene plain(strategy_of(ShardingStrategy::kNoShard, options));
  program(plain);
  EXPECT_FALSE(plain.numbers.empty()) << "the program noted nothing";
  for_each_cell([&](const Cell& cell) { run_cell(cell, program, options, &plain); });
}

void on_matrix(const Program& program, const ProgramOptions& options) {
  for_each_cell([&](const Cell& cell) { on_cell(cell, program, options); });
}

void on_cell(const Cell& cell, const Program& program, const ProgramOptions& options) {
  run_cell(cell, program, options, nullptr);
}

}  // namespace tessera::testing
