#include "workshop/bench/studies/bucket_study.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "tessera/engine.h"
#include "workshop/bench/studies/rank_samples.h"

namespace tessera::app {
namespace {

using Clock = SampleClock;

double mean_over_ranks(Collectives& group, double value) {
  std::vector<double> all(group.size());
  throw_if_error(group.all_gather("mean", &value, all.data(), sizeof value).wait());
  return std::accumulate(all.begin(), all.end(), 0.0) / group.size();
}

/// Copies of a module's parameters and buffers.
class Values {
 public:
  explicit Values(const torch::nn::Module& module) {
    for (const auto& item : module.named_parameters()) named_.emplace_back(item.key(), item.value().detach().clone());
    for (const auto& item : module.named_buffers()) named_.emplace_back(item.key(), item.value().clone());
  }

  void restore(torch::nn::Module& module) const {
    const at::NoGradGuard no_grad;
    auto value = named_.begin();
    for (at::Tensor& parameter : module.parameters()) parameter.copy_(value++->second);
    for (at::Tensor& buffer : module.buffers()) buffer.copy_(value++->second);
  }

  /// Returns the name of the first tensor whose bits differ. It is empty if no tensor differs.
  std::string difference(const Values& other) const {
    for (std::size_t i = 0; i < named_.size(); ++i) {
      const at::Tensor &a = named_[i].second, &b = other.named_[i].second;
      if (std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) != 0) return named_[i].first;
    }
    return "";
  }

 private:
  std::vector<std::pair<std::string, at::Tensor>> named_;
};

class ModelStudy {
 public:
  ModelStudy(const Mesh& mesh, Collectives& group, const BucketStudyOptions& options, BucketWorkload work)
      : mesh_(mesh), group_(group), options_(options), work_(std::move(work)) {
    report_.name = work_.name;
    report_.data = work_.data;
    report_.steps_a_round = options.timed_steps;
    for (const at::Tensor& parameter : work_.module->parameters()) {
      report_.parameters += parameter.numel();
      ++report_.tensors;
    }
    for (const double cap : options.caps_mb) report_.sweep.push_back({cap, 0, {}, {}});
    timings_.push_back(&report_.per_tensor);
    for (BucketTiming& timing : report_.sweep) timings_.push_back(&timing);
    for (const std::int64_t bytes : options.reduction_bytes) report_.reductions.push_back({bytes, {}});
  }

  BucketModelReport run() {
    check_bits();
    const Clock::time_point begin = Clock::now();
    for (int round = 0; round < options_.rounds && fits_another(round, nanoseconds_since(begin)); ++round) {
      // Each round begins with another bucket, so that no bucket always follows the same other bucket.
      for (std::size_t i = 0; i < timings_.size(); ++i) time_steps(*timings_[(i + round) % timings_.size()]);
      for (ReductionTiming& reduction : report_.reductions) time_reductions(reduction);
    }
    infer();
    finish();
    return std::move(report_);
  }

 private:
  /// Returns whether another round would end within the budget; rank 0 decides. Another round is assumed to take as
  /// long as the mean of the `done` rounds, which took `ns` in all.
  bool fits_another(int done, std::int64_t ns) {
    const double seconds = static_cast<double>(ns) * 1e-9;
    std::uint8_t fits = done == 0 || seconds + seconds / done <= options_.budget_s;
    throw_if_error(group_.broadcast("another round", &fits, sizeof fits, 0).wait());
    return fits != 0;
  }

  Strategy strategy_of(const BucketTiming& timing) const {
    Strategy strategy;
    strategy.strategy = ShardingStrategy::kNoShard;
    strategy.units.bucket_cap_mb = timing.cap_mb;
    strategy.optimizer = work_.optimizer;
    return strategy;
  }

  StepResult step(Engine& engine, const LabelledBatch& batch) {
    engine.backward(work_.loss(batch));
    return engine.step();
  }

  void check_bits() {
    const Values initial(*work_.module);
    const LabelledBatch batch = work_.next();
    std::optional<Values> expected;
    double expected_loss = 0;
    for (BucketTiming* timing : timings_) {
      initial.restore(*work_.module);
      Engine engine(work_.module, strategy_of(*timing), mesh_);
      const StepResult result = step(engine, batch);
      timing->collectives = engine.traffic().reductions;
      const Values values(*work_.module);
      if (!expected) {
        expected.emplace(values);
        expected_loss = report_.first_loss = result.loss;
      }
      const std::string different = expected_loss == result.loss ? expected->difference(values) : "the loss";
      if (different.empty()) continue;
      throw Error(ExitCode::kInternal, work_.name + ", buckets of " + std::to_string(timing->cap_mb) +
                                           " MiB: after one step " + different +
                                           " has other bits than with one parameter a bucket");
    }
    initial.restore(*work_.module);
  }

  void time_steps(BucketTiming& timing) {
    Engine engine(work_.module, strategy_of(timing), mesh_);
    for (int i = -options_.warm_up_steps; i < options_.timed_steps; ++i) {
      const LabelledBatch batch = work_.next();
      const double communication = engine.traffic().reduction_seconds;
      const Clock::time_point begin = Clock::now();
      losses_.push_back(step(engine, batch).loss);
      if (i < 0) continue;
      timing.step.ns.push_back(nanoseconds_since(begin));
      timing.communication.ns.push_back(
          static_cast<std::int64_t>((engine.traffic().reduction_seconds - communication) * 1e9));
    }
  }

  void time_reductions(ReductionTiming& reduction) {
    if (!memory_) {
      largest_ = *std::max_element(options_.reduction_bytes.begin(), options_.reduction_bytes.end());
      memory_ = value_or_throw(group_.allocate(static_cast<std::size_t>(largest_)));
    }
    const std::int64_t fit = options_.reduction_round_bytes / reduction.bytes;
    const auto calls = std::clamp<std::int64_t>(fit, 1, options_.most_reductions);
    for (std::int64_t call = -3; call < calls; ++call) {  // the first calls are the warm-up
      auto* const values = reinterpret_cast<float*>(memory_->data() + next_part(reduction.bytes));
      throw_if_error(group_.barrier("start").wait());
      const Clock::time_point begin = Clock::now();
      throw_if_error(
          group_.all_reduce("bucket", values, DType::kF32, values, static_cast<std::size_t>(reduction.bytes / 4))
              .wait());
      if (call >= 0) reduction.call.ns.push_back(nanoseconds_since(begin));
    }
  }

  /// Returns the offset in `memory_` of the next reduction of `bytes`. Reductions go through the memory in strides of
  /// at least 1 MiB.
  std::int64_t next_part(std::int64_t bytes) {
    if (part_ + bytes > largest_) part_ = 0;
    const std::int64_t part = part_;
    part_ += std::max(bytes, std::int64_t{1} << 20);
    return part;
  }

  void infer() {
    const at::NoGradGuard no_grad;
    work_.module->eval();
    InferenceTiming& inference = report_.inference;
    for (int i = 0; i < options_.held_out_batches; ++i) {
      const LabelledBatch batch = work_.next_held_out();
      const Clock::time_point begin = Clock::now();
      const at::Tensor logits = work_.logits(batch.input);
      inference.batch.ns.push_back(nanoseconds_since(begin));
      const at::Tensor right = logits.argmax(-1).eq(batch.target);
      inference.accuracy += right.to(at::kDouble).mean().item<double>() / options_.held_out_batches;
      inference.loss += work_.loss(batch).item<double>() / options_.held_out_batches;
    }
    work_.module->train();
  }

  /// Makes one report of all ranks' measurements.
  void finish() {
    for (BucketTiming* timing : timings_) {
      agree_on_samples(group_, timing->step, larger);
      agree_on_samples(group_, timing->communication, smaller);
    }
    std::vector<TimedBytes> points;
    for (ReductionTiming& reduction : report_.reductions) {
      agree_on_samples(group_, reduction.call, larger);
      points.push_back({reduction.bytes, reduction.call.median_s()});
    }
    report_.fit = fit_alpha_beta(points);
    agree_on_samples(group_, report_.inference.batch, larger);
    report_.inference.loss = mean_over_ranks(group_, report_.inference.loss);
    report_.inference.accuracy = mean_over_ranks(group_, report_.inference.accuracy);
    const std::size_t last = std::min<std::size_t>(10, losses_.size());
    report_.last_loss = std::accumulate(losses_.end() - static_cast<std::ptrdiff_t>(last), losses_.end(), 0.0) /
                        static_cast<double>(last);
  }

  const Mesh& mesh_;
  Collectives& group_;
  const BucketStudyOptions& options_;
  BucketWorkload work_;
  BucketModelReport report_;
  std::vector<BucketTiming*> timings_;  ///< the timing with one parameter a bucket, then those of the sweep
  std::vector<double> losses_;
  std::unique_ptr<CommBuffer> memory_;  ///< memory of the single reductions
  std::int64_t largest_ = 0, part_ = 0;
};

}  // namespace

double BucketModelReport::step_gain(const BucketTiming& timing) const {
  return ratio_by_turns(per_tensor.step, timing.step, static_cast<std::size_t>(steps_a_round));
}

double BucketModelReport::communication_gain(const BucketTiming& timing) const {
  return ratio_by_turns(per_tensor.communication, timing.communication, static_cast<std::size_t>(steps_a_round));
}

const BucketTiming& BucketModelReport::best() const {
  return *std::max_element(sweep.begin(), sweep.end(), [this](const BucketTiming& a, const BucketTiming& b) {
    return step_gain(a) < step_gain(b);
  });
}

BucketReport study_buckets(const Mesh& mesh, const BucketStudyOptions& options) {
  const MeshAxes axes = value_or_throw(groups_of(mesh).axes(1, mesh.world_size()));
  BucketReport report{axes.reduce->transport(), mesh.world_size(), {}};
  BucketWorkload resnet = resnet_workload(mesh, options.images, options.small_models);
  BucketWorkload gpt = gpt_workload(mesh, options.images.seed, options.small_models);
  for (BucketWorkload* work : {&resnet, &gpt}) {
    report.models.push_back(ModelStudy(mesh, *axes.reduce, options, std::move(*work)).run());
  }
  return report;
}

}  // namespace tessera::app
