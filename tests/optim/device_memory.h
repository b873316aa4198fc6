#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

namespace tessera {
namespace {

inline void check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess); }

/// Values in memory that both the host and the device can access.
template <class T>
class Shared {
 public:
  explicit Shared(const std::vector<T>& values) : numel_(values.size()) {
    const std::size_t bytes = std::max<std::size_t>(1, numel_ * sizeof(T));
#if defined(TESSERA_CUDA_ON_HOST)
    data_ = static_cast<T*>(std::aligned_alloc(128, (bytes + 127) / 128 * 128));
#else
    check(cudaMallocManaged(reinterpret_cast<void**>(&data_), bytes));
#endif
    if (numel_ > 0) std::memcpy(static_cast<void*>(data_), values.data(), numel_ * sizeof(T));
  }
  Shared(Shared&& other) noexcept : numel_(other.numel_), data_(std::exchange(other.data_, nullptr)) {}
  ~Shared() {
#if defined(TESSERA_CUDA_ON_HOST)
    std::free(data_);
#else
    cudaFree(data_);
#endif
  }
  T* data() const { return data_; }
  std::vector<T> values() const {
    wait();
    return std::vector<T>(data_, data_ + numel_);
  }
  /// Sets an element after the device's earlier work is done.
  void set(std::size_t i, const T& value) {
    wait();
    data_[i] = value;
  }

 private:
  static void wait() {
#if !defined(TESSERA_CUDA_ON_HOST)
    check(cudaDeviceSynchronize());
#endif
  }

  std::size_t numel_;
  T* data_ = nullptr;
};

/// Tests with this fixture are skipped if there is no GPU. If TESSERA_CUDA_ON_HOST is defined, the kernels run on the
/// CPU, so no test is skipped.
class DeviceKernels : public ::testing::Test {
 protected:
  void SetUp() override {
#if !defined(TESSERA_CUDA_ON_HOST)
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
#endif
  }
};

}  // namespace
}  // namespace tessera
