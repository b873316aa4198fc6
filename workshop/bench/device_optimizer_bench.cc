#include <algorithm>
#include <memory>

#include "optim/cuda/device_norm.h"
#include "optim/cuda/device_step.h"
#include "optim/grad_norm.h"
#include "runtime/base/status.h"
#include "workshop/bench/device_timing.h"
#include "workshop/bench/optimizer_bench.h"

namespace tessera {
namespace {

// Times an optimizer step on the GPU.
//
// A Subject is one kind of step with its device memory. It has one tensor in one group on one rank, with the tables
// that a step's kernels read (StepTables, NormTables). `step` queues the norm, the decision and the pass. CopyLimit
// times it. Cases run one after the other, since each may fill the GPU.

absl::Status put(const TimedMemory& memory, const void* values, std::size_t bytes) {
  return status_of_cuda(cudaMemcpy(memory.as<void>(), values, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
}

template <class Values>
absl::Status copied(TimedMemory& memory, const Values& values) {
  const std::size_t bytes = values.size() * sizeof(values[0]);
  TESSERA_ASSIGN_OR_RETURN(memory, TimedMemory::of(bytes));
  return put(memory, values.data(), bytes);
}

/// The device memory and the tables of a gradient's norm. There is one tensor, and its message consists of the norm's
/// sums.
class NormMemory {
 public:
  explicit NormMemory(std::size_t numel)
      : runs_{{.begin = 0, .numel = numel, .first_block = 0, .tensor = 0}},
        totals_(std::vector<std::uint64_t>{numel}, std::vector<std::vector<NormRun>>{runs_}) {}

  absl::Status allocate(float* gradient) {
    TESSERA_ASSIGN_OR_RETURN(message_, TimedMemory::of(totals_.most_sums() * sizeof(double)));
    const NormBuffer buffers[] = {{gradient, runs_}};
    TESSERA_ASSIGN_OR_RETURN(tile_sums_, TimedMemory::of(norm_scratch_count(buffers) * sizeof(double)));
    const NormLaunch launch = norm_launch(buffers, message_.as<double>(), tile_sums_.as<double>());
    TESSERA_RETURN_IF_ERROR(copied(nodes_, launch.nodes));
    TESSERA_RETURN_IF_ERROR(copied(first_node_, launch.first_node));
    TESSERA_RETURN_IF_ERROR(copied(spans_, launch.spans));
    sums_ = {nodes_.as<NormTileNode>(), first_node_.as<std::uint32_t>(), spans_.as<NormSpan>(),
             static_cast<std::uint32_t>(launch.first_node.size() - 1), static_cast<std::uint32_t>(launch.spans.size())};
    TESSERA_RETURN_IF_ERROR(copied(links_, totals_.links()));
    TESSERA_RETURN_IF_ERROR(copied(first_link_, totals_.first_link()));
    TESSERA_RETURN_IF_ERROR(copied(part_ranks_, std::vector<std::int32_t>{0}));
    TESSERA_ASSIGN_OR_RETURN(link_scratch_, TimedMemory::of(totals_.links().size() * sizeof(double)));
    TESSERA_ASSIGN_OR_RETURN(squares_, TimedMemory::of(sizeof(double)));
    TESSERA_ASSIGN_OR_RETURN(sum_, TimedMemory::of(256));
    return absl::OkStatus();
  }

  /// Returns the tables of the sums on a rank.
  const NormTables& sums() const { return sums_; }
  void fill(StepTables& tables) const {
    tables.messages.of_all = message_.as<std::byte>();
    tables.norm = {1,
                   part_ranks_.as<std::int32_t>(),
                   links_.as<NormLink>(),
                   first_link_.as<std::uint32_t>(),
                   link_scratch_.as<double>(),
                   squares_.as<double>(),
                   sum_.as<double>()};
  }

 private:
  const std::vector<NormRun> runs_;
  const NormTotals totals_;
  TimedMemory message_, tile_sums_, nodes_, first_node_, spans_;                // memory for the norm on a rank
  TimedMemory links_, first_link_, part_ranks_, link_scratch_, squares_, sum_;  // memory for the norm over ranks
  NormTables sums_;
};

/// One kind of step and its memory.
class Subject {
 public:
  static absl::StatusOr<std::unique_ptr<Subject>> of(const OptimizerCase& what, std::size_t numel) {
    auto subject = std::unique_ptr<Subject>(new Subject(what, numel));
    TESSERA_RETURN_IF_ERROR(subject->allocate());
    return subject;
  }

  absl::Status step() {
    if (what_.mixed()) {
      TESSERA_RETURN_IF_ERROR(status_of_cuda(cuda::norm_sums(norm_.sums(), nullptr), "norm_sums"));
      TESSERA_RETURN_IF_ERROR(status_of_cuda(cuda::norm_totals(tables_, nullptr), "norm_totals"));
    }
    StepRequest request;
    request.numbers = {.beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01, .is_decoupled = true};
    request.base_lr = 1e-3;
    request.lr_ratios[0] = 1.0;
    request.max_norm = what_.mixed() ? 1.0 : 0.0;
    TESSERA_RETURN_IF_ERROR(status_of_cuda(cuda::decide_step(request, tables_, nullptr), "decide_step"));
    return status_of_cuda(cuda::update_step(run_, tables_, nullptr), "update_step");
  }

  std::size_t bytes() const { return (what_.mixed() ? 2 : 1) * 4 * numel_ + 2 * updated_bytes(); }

 private:
  Subject(const OptimizerCase& what, std::size_t numel)
      : what_(what), numel_(numel), state_(state_bytes(what.state, static_cast<std::int64_t>(numel))), norm_(numel) {}

  std::size_t updated_bytes() const { return 4 * numel_ + 2 * static_cast<std::size_t>(state_.total()); }

  absl::Status allocate() {
    const auto data = static_cast<std::size_t>(state_.data), scales = static_cast<std::size_t>(state_.scales);
    TESSERA_ASSIGN_OR_RETURN(gradient_, TimedMemory::of(4 * numel_));
    TESSERA_ASSIGN_OR_RETURN(weights_, TimedMemory::of(4 * numel_));
    TESSERA_ASSIGN_OR_RETURN(states_, TimedMemory::of(2 * data));
    TESSERA_ASSIGN_OR_RETURN(scales_, TimedMemory::of(2 * scales));
    for (TimedMemory* small : {&used_, &steps_, &constants_, &decision_, &groups_, &begins_, &uniform_}) {
      TESSERA_ASSIGN_OR_RETURN(*small, TimedMemory::of(256));
    }
    TESSERA_RETURN_IF_ERROR(fill_gradient());
    TESSERA_RETURN_IF_ERROR(norm_.allocate(gradient_.as<float>()));
    const std::uint8_t used = 1;
    TESSERA_RETURN_IF_ERROR(put(used_, &used, sizeof used));
    const StepGroup group{.first_parameter = 0, .parameters = 1};
    TESSERA_RETURN_IF_ERROR(put(groups_, &group, sizeof group));
    StepDecision decision{};
    decision.scaler.scale = 1.0f;
    TESSERA_RETURN_IF_ERROR(put(decision_, &decision, sizeof decision));
    fill_tables();
    fill_run();
    return absl::OkStatus();
  }

  void fill_tables() {
    norm_.fill(tables_);
    tables_.parameters = tables_.groups = 1;
    tables_.group = groups_.as<StepGroup>();
    tables_.used = used_.as<std::uint8_t>();
    tables_.is_uniform = uniform_.as<std::uint8_t>();
    tables_.constants = constants_.as<RuleConstants>();
    tables_.steps = steps_.as<std::int64_t>();
    tables_.decision = decision_.as<StepDecision>();
  }

  void fill_run() {
    const auto data = static_cast<std::size_t>(state_.data), scales = static_cast<std::size_t>(state_.scales);
    run_.parameters = 1;
    run_.begins = begins_.as<ParameterBegin>();
    StepArguments& a = run_.arguments;
    a.numel = numel_;
    a.gradient = gradient_.as<float>();
    if (what_.mixed()) {
      a.parameter = weights_.as<void>();
      a.low = weights_.as<std::int16_t>() + numel_;
    } else {
      a.master = weights_.as<float>();
    }
    a.states[0] = {states_.as<std::byte>(), scales_.as<float>()};
    a.states[1] = {states_.as<std::byte>() + data, scales_.as<float>() + scales / sizeof(float)};
    a.weights = what_.mixed() ? WeightFormat::kSplitBF16 : WeightFormat::kF32;
    a.state_dtype = what_.state;
  }

  absl::Status fill_gradient() {
    std::vector<float> values(std::min<std::size_t>(numel_, 1 << 20));
    float value = 1e-3f;
    for (float& g : values) g = (value = -value);
    for (std::size_t begin = 0; begin < numel_; begin += values.size()) {
      const std::size_t count = std::min(values.size(), numel_ - begin);
      TESSERA_RETURN_IF_ERROR(status_of_cuda(
          cudaMemcpy(gradient_.as<float>() + begin, values.data(), 4 * count, cudaMemcpyHostToDevice), "cudaMemcpy"));
    }
    return absl::OkStatus();
  }

  const OptimizerCase what_;
  const std::size_t numel_;
  const StateBytes state_;
  TimedMemory gradient_, weights_, states_, scales_;
  NormMemory norm_;
  TimedMemory used_, steps_, constants_, decision_, groups_, begins_, uniform_;
  StepTables tables_;
  DeviceRun run_;
};

}  // namespace

absl::StatusOr<std::vector<PassTiming>> bench_device_optimizer(std::size_t numel, int rounds) {
  numel = (numel + kStateBlock - 1) / kStateBlock * kStateBlock;
  TESSERA_ASSIGN_OR_RETURN(const CopyLimit limit, CopyLimit::make());
  std::vector<PassTiming> timings;
  for (const OptimizerCase& what : kOptimizerCases) {  // one after the other, since each may fill the GPU
    TESSERA_ASSIGN_OR_RETURN(const auto subject, Subject::of(what, numel));
    PassTiming& timing = timings.emplace_back(PassTiming{what.name, numel, subject->bytes(), {}, {}});
    TESSERA_RETURN_IF_ERROR(limit.time(timing, rounds, [&] { return subject->step(); }));
  }
  return timings;
}

}  // namespace tessera
