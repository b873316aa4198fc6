#include "tests/support/session.h"

#include <gtest/gtest.h>

#include <exception>

#include "runtime/comm/shared/run_ranks.h"
#include "tessera/error.h"

namespace tessera::testing {

Strategy strategy_for(const Placed& placed, const Adjust& adjust, DType dtype) {
  Strategy strategy = tiny_strategy(placed, dtype);
  strategy.gradient_clipping = 0.5;
  if (adjust) adjust(strategy);
  return strategy;
}

void update_in_backward(Strategy& strategy) {
  strategy.gradient_clipping = 0;
  strategy.optimizer.in_backward = true;
}

at::Tensor rows_of(const at::Tensor& batch, const Mesh& mesh) {
  const std::int64_t rows = batch.size(0) / mesh.world_size();
  return batch.narrow(0, mesh.rank() * rows, rows);
}

Session::Session(const Mesh& mesh_given, const Strategy& strategy, TinyOptions options, const OwnRules& own_rules)
    : mesh(mesh_given),
      model(make_tiny(options, true)),
      engine(model.ptr(), strategy, mesh, own_rules),
      batches(make_batches(6, 24, 5, options.vocab)),
      microbatches(static_cast<std::size_t>(strategy.gradient_accumulation)) {}

at::Tensor Session::loss(std::size_t i) {
  const Batch& batch = batches[i % batches.size()];
  const c10::Device device = engine.device();
  return model->forward(rows_of(batch.tokens, mesh).to(device), rows_of(batch.targets, mesh).to(device));
}

StepResult Session::train(std::size_t i) {
  for (std::size_t k = 0; k < microbatches; ++k) engine.backward(loss(i * microbatches + k));
  return engine.step();
}

Values Session::values() {
  const Gathered gathered(engine);
  return values_of(*model);
}

Values trained(const Mesh& mesh, const Strategy& strategy, std::size_t steps, TinyOptions options,
               const OwnRules& own_rules) {
  Session session(mesh, strategy, options, own_rules);
  for (std::size_t i = 0; i < steps; ++i) session.train(i);
  return session.values();
}

void expect_planned_disk_traffic(Session& session, const std::string& what) {
  const DiskUse plan = session.engine.plan().disk;
  EXPECT_GT(plan.bytes, 0) << what;
  for (std::size_t i = 0; i < 2; ++i) session.train(i);  // the first two steps find no records in memory
  for (std::size_t i = 2; i < 8; i += 2) {
    const TrafficCounts before = session.engine.traffic();
    session.train(i);
    session.train(i + 1);
    const TrafficCounts after = session.engine.traffic();
    EXPECT_EQ(after.disk_bytes_read - before.disk_bytes_read, plan.read_in_two_steps) << what;
    EXPECT_EQ(after.disk_bytes_written - before.disk_bytes_written, plan.written_in_two_steps) << what;
  }
}

bool all_same_bits(const Values& a, const Values& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!same_bits(a[i].second, b[i].second)) return false;
  }
  return a.size() == b.size();
}

void expect_close(const Values& got, const Values& wanted, double tolerance, const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const at::Tensor difference = (got[i].second - wanted[i].second).abs() / (wanted[i].second.abs() + 1);
    EXPECT_LE(difference.max().item<double>(), tolerance) << what << ", " << got[i].first;
  }
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

std::string error_of(ExitCode code, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), code) << error.message();
    return error.message();
  }
  return "";
}

std::string usage_error_of(const std::function<void()>& call) { return error_of(ExitCode::kUsage, call); }

void on_each_placement(int ranks, const std::function<void(const Mesh&, const Strategy&)>& body, const Adjust& adjust,
                       DType dtype) {
  on_placements(kOnePerPlacement, ranks, body, adjust, dtype);
}

void on_placements(std::span<const Placed> placements, int ranks,
                   const std::function<void(const Mesh&, const Strategy&)>& body, const Adjust& adjust, DType dtype) {
  for (const Placed& placed : placements) {
    SCOPED_TRACE(name_of(placed));
    run_ranks({.ranks = ranks}, [&](const Mesh& mesh) { body(mesh, strategy_for(placed, adjust, dtype)); });
  }
}

}  // namespace tessera::testing
