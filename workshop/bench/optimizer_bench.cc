#include "workshop/bench/optimizer_bench.h"

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

/// Zeros on huge pages, if the kernel grants them. Every page is present from the start.
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

  /// Reads and writes the same bytes as a step, in the same memory and in the same order, with almost no arithmetic. It
  /// reads the gradient once more if a step takes its norm. Then it reads blocks of everything that a step reads, and
  /// writes back everything except the gradient. Memory is prefetched `kAhead` bytes ahead.
  template <std::size_t kAhead>
  void limit() {
    constexpr std::size_t kBlock = 64;  // number of elements; 8-bit elements then fill a cache line
    std::uint64_t sum = 0;
    const auto read_gradient = [&](std::size_t block) {
      const std::size_t bytes = kBlock * sizeof(float);
      const std::uint64_t* const words = asked_ahead<kAhead>(gradient_.as<std::byte>().data() + block * bytes, bytes);
      for (std::size_t i = 0; i < bytes / 8; ++i) sum ^= words[i];
    };
    for (std::size_t block = 0; what_.mixed() && block < numel_ / kBlock; ++block) read_gradient(block);
    for (std::size_t block = 0; block < numel_ / kBlock; ++block) {
      read_gradient(block);
      // Each written value must depend on the value that was read, and be equal to it.
      const std::uint64_t nothing = sum == 1 ? 1 : 0;
      for (const auto& [data, element] : pieces_) {
        const std::size_t bytes = kBlock * element;
        std::uint64_t* const words = asked_ahead<kAhead>(data + block * bytes, bytes);
        for (std::size_t i = 0; i < bytes / 8; ++i) words[i] += nothing;
      }
    }
  }

  std::size_t bytes() const { return gradient_reads() * 4 * numel_ + 2 * updated_.as<std::byte>().size(); }

 private:
  /// A stream that a step reads and writes back; the scales of 8-bit blocks are left out.
  struct Piece {
    std::byte* data;
    std::size_t element;  ///< bytes of an element
  };

  template <std::size_t kAhead>
  static std::uint64_t* asked_ahead(std::byte* data, std::size_t bytes) {
    constexpr std::size_t kLine = 64;
    for (std::size_t at = 0; at < bytes; at += kLine) __builtin_prefetch(data + at + kAhead);
    return reinterpret_cast<std::uint64_t*>(data);
  }

  int gradient_reads() const { return what_.mixed() ? 2 : 1; }

  void lay_out() {
    std::byte* next = updated_.as<std::byte>().data();
    const auto take = [&](std::size_t bytes) {
      std::byte* piece = next;
      next += bytes;
      return piece;
    };
    const auto take_each = [&](std::size_t element) {
      pieces_.push_back({take(numel_ * element), element});
      return pieces_.back().data;
    };
    slice_.gradient = gradient_.as<float>();
    if (what_.param == DType::kF32) {
      slice_.master = {reinterpret_cast<float*>(take_each(4)), numel_};
    } else {
      slice_.master_kind = MasterKind::kSplitBF16;
      slice_.parameter_dtype = DType::kBF16;
      slice_.parameter = take_each(2);
      slice_.low = {reinterpret_cast<std::int16_t*>(take_each(2)), numel_};
    }
    for (StateSlice* state : {&slice_.states[0], &slice_.states[1]}) {
      state->data = {take_each(static_cast<std::size_t>(state_.data) / numel_), static_cast<std::size_t>(state_.data)};
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
  std::vector<Piece> pieces_;
  std::int64_t steps_ = 0;
};

template <class Body>
std::int64_t nanoseconds_of(const Body& body) {
  const auto start = Clock::now();
  body();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

}  // namespace

std::vector<PassTiming> bench_optimizer(std::size_t numel, int rounds, InstructionSet set) {
  numel = (numel + kStateBlock - 1) / kStateBlock * kStateBlock;
  std::vector<std::unique_ptr<Subject>> subjects;
  std::vector<PassTiming> timings;
  const auto add = [&](std::span<const OptimizerCase> cases) {
    for (const OptimizerCase& what : cases) {
      subjects.push_back(std::make_unique<Subject>(what, numel, set));
      timings.push_back({what.name, numel, subjects.back()->bytes(), {}, {}});
    }
  };
  add(kOptimizerCases);
  add(kMomentCases);
  std::vector<Samples> asked_far(subjects.size());
  for (int round = -1; round < rounds; ++round) {
    for (std::size_t i = 0; i < subjects.size(); ++i) {
      const std::int64_t near = nanoseconds_of([&] { subjects[i]->limit<1024>(); }),
                         far = nanoseconds_of([&] { subjects[i]->limit<2560>(); });
      const std::int64_t step = nanoseconds_of([&] { subjects[i]->step(); });
      if (round < 0) continue;
      timings[i].limit.ns.push_back(near);
      asked_far[i].ns.push_back(far);
      timings[i].pass.ns.push_back(step);
    }
  }
  // fp32 is fastest with a short prefetch distance, and narrow moments are fastest with a long one.
  for (std::size_t i = 0; i < timings.size(); ++i) {
    if (asked_far[i].median_s() < timings[i].limit.median_s()) timings[i].limit = std::move(asked_far[i]);
  }
  return timings;
}

}  // namespace tessera
