#include "benchmarks/native/optimizer_bench.h"

#include <sys/mman.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>

#include "optim/grad_norm.h"
#include "optim/rule_optimizer.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

/// Zeros on huge pages where the kernel grants them, every page there already.
class Memory {
 public:
  explicit Memory(std::size_t bytes) : bytes_(bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    madvise(memory, bytes, MADV_HUGEPAGE);
    data_ = static_cast<std::byte*>(memory);
    for (std::size_t i = 0; i < bytes; i += 4096) data_[i] = std::byte{0};
  }
  ~Memory() { munmap(data_, bytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  template <class T>
  std::span<T> as() const {
    return {reinterpret_cast<T*>(data_), bytes_ / sizeof(T)};
  }

 private:
  std::byte* data_;
  std::size_t bytes_;
};

class Subject {
 public:
  Subject(const OptimizerCase& what, std::size_t numel, InstructionSet set)
      : what_(what),
        numel_(numel),
        state_(state_bytes(what.state, static_cast<std::int64_t>(numel))),
        gradient_(numel * 4),
        updated_(numel * 4 + 2 * static_cast<std::size_t>(state_.total())),
        runs_{{.begin = 0, .numel = numel, .first_block = 0, .tensor = 0}},
        norm_(runs_, set),
        totals_(std::vector<std::uint64_t>{numel}, std::vector<std::vector<NormRun>>{runs_}) {
    OptimizerConfig config;
    config.state_dtype = what.state;
    optimizer_ = std::make_unique<RuleOptimizer>(config, EmaConfig{}, set);
    float value = 1e-3f;
    for (float& g : gradient_.as<float>()) g = (value = -value);
    lay_out();
  }

  void step() {
    float clip = 1.0f;
    if (what_.mixed()) {
      norm_.reset();
      norm_.add(gradient_.as<float>());
      if (!norm_.finite()) throw std::logic_error("the gradients are finite");
      const double* const sums[] = {norm_.sums().data()};
      double square = 0.0;
      clip = static_cast<float>(1.0 / (std::sqrt(totals_.add_up(sums, {&square, 1})) + 1e-6));
    }
    optimizer_->step({.gradient_scale = std::min(clip, 1.0f), .lr = 1e-3f, .step = ++steps_}, slice_);
  }

  /// The same bytes in the same memory: gradients as often as the step reads them, all else once in place.
  void limit() {
    const std::span<std::uint64_t> updated = updated_.as<std::uint64_t>(), gradient = gradient_.as<std::uint64_t>();
    std::uint64_t sum = 0;
    for (int pass = 0; pass < gradient_reads(); ++pass) {
      for (const std::uint64_t word : gradient) sum ^= word;
    }
    // What is written must depend on what is read, and leave it as it is.
    sum = sum == 1 ? 1 : 0;
    for (std::uint64_t& word : updated) word += sum;
  }

  std::size_t bytes() const { return gradient_reads() * 4 * numel_ + 2 * updated_.as<std::byte>().size(); }

 private:
  int gradient_reads() const { return what_.mixed() ? 2 : 1; }

  void lay_out() {
    std::byte* next = updated_.as<std::byte>().data();
    const auto take = [&](std::size_t bytes) {
      std::byte* piece = next;
      next += bytes;
      return piece;
    };
    slice_.gradient = gradient_.as<float>();
    if (what_.param == DType::kF32) {
      slice_.master = {reinterpret_cast<float*>(take(numel_ * 4)), numel_};
    } else {
      slice_.master_kind = MasterKind::kSplitBF16;
      slice_.parameter_dtype = DType::kBF16;
      slice_.parameter = take(numel_ * 2);
      slice_.low = {reinterpret_cast<std::int16_t*>(take(numel_ * 2)), numel_};
    }
    for (StateSlice* state : {&slice_.states[0], &slice_.states[1]}) {
      state->data = {take(static_cast<std::size_t>(state_.data)), static_cast<std::size_t>(state_.data)};
    }
    for (StateSlice* state : {&slice_.states[0], &slice_.states[1]}) {
      if (state_.scales == 0) break;
      const auto count = static_cast<std::size_t>(state_.scales / 4);
      state->scales = {reinterpret_cast<float*>(take(count * 4)), count};
    }
  }

  const OptimizerCase what_;
  const std::size_t numel_;
  const StateBytes state_;
  Memory gradient_, updated_;
  const std::vector<NormRun> runs_;
  NormSums norm_;
  const NormTotals totals_;
  std::unique_ptr<Optimizer> optimizer_;
  OptimizerSlice slice_;
  std::int64_t steps_ = 0;
};

template <class Body>
std::int64_t nanoseconds_of(const Body& body) {
  const auto start = Clock::now();
  body();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

}  // namespace

std::vector<OptimizerTiming> bench_optimizer(std::size_t numel, int rounds, InstructionSet set) {
  numel = (numel + kStateBlock - 1) / kStateBlock * kStateBlock;
  std::vector<std::unique_ptr<Subject>> subjects;
  std::vector<OptimizerTiming> timings;
  const auto add = [&](std::span<const OptimizerCase> cases) {
    for (const OptimizerCase& what : cases) {
      subjects.push_back(std::make_unique<Subject>(what, numel, set));
      timings.push_back({what.name, numel, subjects.back()->bytes(), {}, {}});
    }
  };
  add(kOptimizerCases);
  add(kMomentCases);
  for (int round = -1; round < rounds; ++round) {
    for (std::size_t i = 0; i < subjects.size(); ++i) {
      const std::int64_t limit = nanoseconds_of([&] { subjects[i]->limit(); });
      const std::int64_t step = nanoseconds_of([&] { subjects[i]->step(); });
      if (round < 0) continue;
      timings[i].limit.ns.push_back(limit);
      timings[i].step.ns.push_back(step);
    }
  }
  return timings;
}

nlohmann::json to_json(const std::vector<OptimizerTiming>& timings) {
  nlohmann::json cases = nlohmann::json::array();
  for (const OptimizerTiming& timing : timings) {
    std::vector<double> samples;
    for (const std::int64_t ns : timing.step.ns) samples.push_back(static_cast<double>(ns) * 1e-9);
    cases.push_back({{"name", timing.name},
                     {"numel", timing.numel},
                     {"bytes", timing.bytes},
                     {"samples_s", samples},
                     {"median_s", timing.step.median_s()},
                     {"limit_s", timing.limit.median_s()},
                     {"of_limit", timing.limit.median_s() / timing.step.median_s()}});
  }
  return {{"cases", cases}};
}

}  // namespace tessera
