#pragma once

#include <cuda_runtime_api.h>
#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

// Runs the source of CUDA kernels on the host, so that what they compute is tested where there is no GPU. The threads of
// a thread block are fibers of one thread; a fiber runs until it comes to a barrier of its warp or its block. Blocks run
// one after the other. It shows results, and barriers that not all threads come to; not races, speed, or what the
// device's compiler makes of the source.

#undef __shared__
#define __shared__ static  // one block at a time
#undef __global__
#define __global__
#undef __device__
#define __device__
#undef __launch_bounds__
#define __launch_bounds__(threads)

namespace cuda_on_host {

struct Index {
  unsigned x = 0;
};

class ThreadBlock {
 public:
  enum class Stop { kWarp, kBlock, kEnd };
  static constexpr unsigned kWarp = 32;

  ThreadBlock(unsigned threads, std::function<void()> body) : body_(std::move(body)), fibers_(threads) {
    for (std::size_t i = 0; i < threads; ++i) prepare(fibers_[i], stack(i));
  }

  void run() {
    current() = this;
    for (unsigned i = 0; i < fibers_.size(); ++i) resume(i);
    while (!all(0, fibers_.size(), Stop::kEnd)) {
      bool moved = false;
      for (std::size_t begin = 0; begin < fibers_.size(); begin += kWarp) {
        const std::size_t end = std::min(fibers_.size(), begin + kWarp);
        if (all(begin, end, Stop::kWarp)) moved = resume(begin, end);
      }
      if (!moved && all(0, fibers_.size(), Stop::kBlock)) moved = resume(0, fibers_.size());
      if (!moved) throw std::logic_error("a barrier that not all threads come to");
    }
  }

  void stop_at(Stop where) {
    Fiber& fiber = fibers_[running_];
    fiber.stop = where;
    swapcontext(&fiber.context, &scheduler_);
  }

  /// What `lane` of this warp gave, all of them giving at once.
  template <class T>
  T exchange(T value, unsigned lane) {
    const unsigned first = running_ / kWarp * kWarp, mine = running_;
    std::memcpy(fibers_[mine].given, &value, sizeof value);
    stop_at(Stop::kWarp);
    if (first + lane < fibers_.size()) std::memcpy(&value, fibers_[first + lane].given, sizeof value);
    stop_at(Stop::kWarp);
    return value;
  }

  static ThreadBlock*& current() {
    static ThreadBlock* block = nullptr;
    return block;
  }
  unsigned running() const { return running_; }

 private:
  struct Fiber {
    ucontext_t context;
    Stop stop = Stop::kEnd;
    char given[8] = {};
  };

  static constexpr std::size_t kStackBytes = 64 << 10;

  void prepare(Fiber& fiber, char* stack) {
    getcontext(&fiber.context);
    fiber.context.uc_stack = {.ss_sp = stack, .ss_flags = 0, .ss_size = kStackBytes};
    fiber.context.uc_link = &scheduler_;
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(&ThreadBlock::run_fiber), 0);
  }

  /// Made once: blocks run one after the other.
  static char* stack(std::size_t fiber) {
    static std::vector<std::unique_ptr<char[]>> stacks;
    while (stacks.size() <= fiber) stacks.emplace_back(new char[kStackBytes]);
    return stacks[fiber].get();
  }

  static void run_fiber() {
    current()->body_();
    current()->fibers_[current()->running_].stop = Stop::kEnd;
  }
  bool all(std::size_t begin, std::size_t end, Stop where) const {
    for (std::size_t i = begin; i < end; ++i)
      if (fibers_[i].stop != where) return false;
    return true;
  }
  void resume(std::size_t i) {
    running_ = static_cast<unsigned>(i);
    swapcontext(&scheduler_, &fibers_[i].context);
  }
  bool resume(std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) resume(i);
    return true;
  }

  const std::function<void()> body_;
  std::vector<Fiber> fibers_;
  ucontext_t scheduler_;
  unsigned running_ = 0;
};

inline Index block_index, block_size, grid_size;

struct ThreadIndex {
  struct X {
    operator unsigned() const { return ThreadBlock::current()->running(); }  // NOLINT
  } x;
};

}  // namespace cuda_on_host

inline cuda_on_host::ThreadIndex threadIdx;  // NOLINT: CUDA's names
inline cuda_on_host::Index& blockIdx = cuda_on_host::block_index;
inline cuda_on_host::Index& blockDim = cuda_on_host::block_size;
inline cuda_on_host::Index& gridDim = cuda_on_host::grid_size;

inline void __syncthreads() {
  using cuda_on_host::ThreadBlock;
  ThreadBlock::current()->stop_at(ThreadBlock::Stop::kBlock);
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned delta, unsigned width) {
  auto& block = *cuda_on_host::ThreadBlock::current();
  const unsigned lane = block.running() % cuda_on_host::ThreadBlock::kWarp;
  return block.exchange(value, lane % width + delta < width ? lane + delta : lane);
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  auto& block = *cuda_on_host::ThreadBlock::current();
  unsigned most = value;
  for (unsigned lane = 0; lane < cuda_on_host::ThreadBlock::kWarp; ++lane) {
    const unsigned other = block.exchange(value, lane);
    most = other > most ? other : most;
  }
  return most;
}

namespace tessera::cuda {

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, cudaStream_t,
                   Arguments... arguments) {
  cuda_on_host::grid_size.x = blocks;
  cuda_on_host::block_size.x = threads;
  for (unsigned block = 0; block < blocks; ++block) {
    cuda_on_host::block_index.x = block;
    cuda_on_host::ThreadBlock(threads, [&] { kernel(arguments...); }).run();
  }
  return cudaSuccess;
}

inline cudaError_t multiprocessors(int& count) {
  count = 1;
  return cudaSuccess;
}

}  // namespace tessera::cuda
