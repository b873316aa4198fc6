#pragma once

#include <cuda_runtime_api.h>
#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

// Runs the source of CUDA kernels on the host, so that their results are tested where there is no GPU. The threads of a
// thread block are fibers of one thread. A fiber runs until it reaches a barrier of its warp or its block. Blocks run
// one after the other. Such a run shows wrong results, and barriers that not all threads reach. It does not show races
// or speed, or the effects of the device's compiler.

#undef __shared__
#define __shared__ static  // all blocks can use the same memory, since one block runs at a time
#undef __global__
#define __global__
#undef __device__
#define __device__
#undef __launch_bounds__
#define __launch_bounds__(...)

namespace cuda_on_host {

/// CUDA's dim3. Kernels here use only x.
struct Index {
  unsigned x = 0;
};

/// The copies of one thread that are under way, divided into groups.
class Copies {
 public:
  void add(void* to, const void* from, std::size_t bytes) { open_.push_back({to, from, bytes}); }
  void commit() { groups_.push_back(std::move(open_)), open_.clear(); }
  void wait_prior(std::size_t groups) {
    while (groups_.size() > groups) {
      for (const Copy& copy : groups_.front()) std::memcpy(copy.to, copy.from, copy.bytes);
      groups_.pop_front();
    }
  }
  void forget() {
    open_.clear();
    groups_.clear();
  }

 private:
  struct Copy {
    void* to;
    const void* from;
    std::size_t bytes;
  };
  std::vector<Copy> open_;
  std::deque<std::vector<Copy>> groups_;
};

/// Runs the blocks of one launch.
class ThreadBlock {
 public:
  enum class Stop { kWarp, kBlock, kEnd };
  static constexpr unsigned kWarp = 32;

  ThreadBlock(unsigned threads, std::function<void()> body) : body_(std::move(body)), threads_(threads) {
    if (threads > kMostThreads) throw std::logic_error("a thread block of more than 1024 threads");
  }

  /// Runs one thread block.
  void run() {
    current() = this;
    for (std::size_t i = 0; i < threads_; ++i) fibers_[i].copies.forget();
    resume(0, threads_);
    while (!all(0, threads_, Stop::kEnd)) {
      bool moved = false;
      for (std::size_t begin = 0; begin < threads_; begin += kWarp) {
        const std::size_t end = std::min(threads_, begin + kWarp);
        if (all(begin, end, Stop::kWarp)) moved = resume(begin, end);
      }
      if (!moved && all(0, threads_, Stop::kBlock)) moved = resume(0, threads_);
      if (moved) continue;
      for (std::size_t i = 0; i < threads_; ++i) fibers_[i].has_begun = false;  // the next launch starts all threads
      throw std::logic_error("a barrier that not all threads come to");
    }
  }

  void stop_at(Stop where) {
    Fiber& fiber = fibers_[running_];
    fiber.stop = where;
    change(fiber.place, scheduler_);
  }

  /// Exchanges values within this warp: every lane gives `value`. Returns the result of `take`, which gets a function
  /// that returns the value of a lane.
  template <class T, class Take>
  T exchange(T value, const Take& take) {
    std::memcpy(fibers_[running_].given, &value, sizeof value);
    stop_at(Stop::kWarp);
    const std::size_t first = running_ / kWarp * kWarp;
    const T taken = take([&](unsigned lane) {
      T given = value;
      if (first + lane < threads_) std::memcpy(&given, fibers_[first + lane].given, sizeof given);
      return given;
    });
    stop_at(Stop::kWarp);
    return taken;
  }

  static ThreadBlock*& current() {
    static ThreadBlock* block = nullptr;
    return block;
  }
  unsigned running() const { return running_; }
  Copies& copies() { return fibers_[running_].copies; }

 private:
  /// The place at which a fiber continues, in the form of the compiler's own setjmp. swapcontext would make a system
  /// call each time.
  using Place = void* [5];

  struct Fiber {
    ucontext_t beginning;
    bool has_begun = false;
    Place place;
    Stop stop = Stop::kEnd;
    char given[8] = {};
    Copies copies;
  };

  static constexpr std::size_t kStackBytes = 64 << 10, kMostThreads = 1024;

  /// Returns the fibers of all launches, which run one after the other. A fiber waits for the next launch at the place
  /// where the last launch ended, since starting a fiber takes two system calls.
  static Fiber* fibers() {
    static const std::unique_ptr<Fiber[]> all(new Fiber[kMostThreads]);
    return all.get();
  }

  static void prepare(Fiber& fiber, char* stack) {
    getcontext(&fiber.beginning);
    fiber.beginning.uc_stack = {.ss_sp = stack, .ss_flags = 0, .ss_size = kStackBytes};
    makecontext(&fiber.beginning, reinterpret_cast<void (*)()>(&ThreadBlock::run_fiber), 0);
  }

  /// Returns the stack of a fiber. Stacks are made only once, since launches run one after the other.
  static char* stack(std::size_t fiber) {
    static std::vector<std::unique_ptr<char[]>> stacks;
    while (stacks.size() <= fiber) stacks.emplace_back(new char[kStackBytes]);
    return stacks[fiber].get();
  }

  /// Runs one thread of each block, one block after the other, in this launch and in later launches.
  static void run_fiber() {
    for (;; current()->stop_at(Stop::kEnd)) current()->body_();
  }

  // These are separate functions that GCC must not inline or analyse. Otherwise GCC would conclude that nothing returns
  // to the place where setjmp was called.
  [[gnu::noipa, noreturn]] static void go_to(Place& place) { __builtin_longjmp(place, 1); }
  [[gnu::noipa]] static void change(Place& from, Place& to) {
    if (__builtin_setjmp(from) == 0) go_to(to);
  }
  [[gnu::noipa]] void begin(Fiber& fiber) {
    prepare(fiber, stack(running_));
    fiber.has_begun = true;
    if (__builtin_setjmp(scheduler_) == 0) setcontext(&fiber.beginning);
  }

  bool all(std::size_t begin, std::size_t end, Stop where) const {
    for (std::size_t i = begin; i < end; ++i)
      if (fibers_[i].stop != where) return false;
    return true;
  }
  void resume(std::size_t i) {
    running_ = static_cast<unsigned>(i);
    Fiber& fiber = fibers_[i];
    if (fiber.has_begun) {
      change(scheduler_, fiber.place);
    } else {
      begin(fiber);
    }
  }
  bool resume(std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) resume(i);
    return true;
  }

  const std::function<void()> body_;
  const std::size_t threads_;
  Fiber* const fibers_ = fibers();
  Place scheduler_;
  unsigned running_ = 0;
};

inline Index block_index, block_size, grid_size;

/// CUDA's threadIdx. x is the index, within the block, of the thread that runs now.
struct ThreadIndex {
  struct X {
    operator unsigned() const { return ThreadBlock::current()->running(); }  // NOLINT
  } x;
};

}  // namespace cuda_on_host

inline cuda_on_host::ThreadIndex threadIdx;  // NOLINT: the names are CUDA's
inline cuda_on_host::Index& blockIdx = cuda_on_host::block_index;
inline cuda_on_host::Index& blockDim = cuda_on_host::block_size;
inline cuda_on_host::Index& gridDim = cuda_on_host::grid_size;

inline void __syncthreads() {
  using cuda_on_host::ThreadBlock;
  ThreadBlock::current()->stop_at(ThreadBlock::Stop::kBlock);
}
inline void __syncwarp() {
  using cuda_on_host::ThreadBlock;
  ThreadBlock::current()->stop_at(ThreadBlock::Stop::kWarp);
}
// An asynchronous copy (CUDA's "pipeline primitives") is made when code waits for it, so code that does not wait reads
// wrong values.
inline void __pipeline_memcpy_async(void* to, const void* from, std::size_t bytes) {
  cuda_on_host::ThreadBlock::current()->copies().add(to, from, bytes);
}
inline void __pipeline_commit() { cuda_on_host::ThreadBlock::current()->copies().commit(); }
inline void __pipeline_wait_prior(std::size_t groups) {
  cuda_on_host::ThreadBlock::current()->copies().wait_prior(groups);
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned delta, unsigned width) {
  auto& block = *cuda_on_host::ThreadBlock::current();
  const unsigned lane = block.running() % cuda_on_host::ThreadBlock::kWarp;
  const unsigned from = lane % width + delta < width ? lane + delta : lane;
  return block.exchange(value, [&](const auto& given_by) { return given_by(from); });
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  auto& block = *cuda_on_host::ThreadBlock::current();
  return block.exchange(unsigned{predicate != 0}, [&](const auto& given_by) {
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < cuda_on_host::ThreadBlock::kWarp; ++lane) ballot |= given_by(lane) << lane;
    return ballot;
  });
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  auto& block = *cuda_on_host::ThreadBlock::current();
  return block.exchange(value, [&](const auto& given_by) {
    unsigned most = value;
    for (unsigned lane = 0; lane < cuda_on_host::ThreadBlock::kWarp; ++lane) most = std::max(most, given_by(lane));
    return most;
  });
}

namespace tessera::cuda {

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, cudaStream_t,
                   Arguments... arguments) {
  cuda_on_host::grid_size.x = blocks;
  cuda_on_host::block_size.x = threads;
  cuda_on_host::ThreadBlock each(threads, [&] { kernel(arguments...); });
  for (unsigned block = 0; block < blocks; ++block) {
    cuda_on_host::block_index.x = block;
    each.run();
  }
  return cudaSuccess;
}

inline cudaError_t multiprocessors(int& count) {
  count = 1;
  return cudaSuccess;
}

}  // namespace tessera::cuda
