// Compares the GPU's sum with the CPU's. Both must have the same bits. The program is built twice, like
// tests/optim/device_kernels_test.cc.

#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "runtime/comm/sum/pairwise_sum.h"

#if defined(TESSERA_CUDA_ON_HOST)
#include "tests/support/stand_ins/cuda_on_host.h"
// The kernel's source must be included after this header.
#include "runtime/comm/cuda_host/cuda/device_sum.cu"
#else
#include "runtime/comm/cuda_host/cuda/device_sum.h"
#endif

namespace tessera {
namespace {

/// Memory that the GPU and the CPU both reach, aligned to 128 bytes.
class Memory {
 public:
  explicit Memory(std::size_t bytes) {
#if defined(TESSERA_CUDA_ON_HOST)
    data_ = static_cast<std::byte*>(std::aligned_alloc(128, (bytes / 128 + 1) * 128));
#else
    EXPECT_EQ(cudaMallocManaged(reinterpret_cast<void**>(&data_), bytes + 1), cudaSuccess);
#endif
  }
  ~Memory() {
#if defined(TESSERA_CUDA_ON_HOST)
    std::free(data_);
#else
    cudaFree(data_);
#endif
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
};

void finish() {
#if !defined(TESSERA_CUDA_ON_HOST)
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
#endif
}

/// Fills memory with numbers below 2, including zeros and subnormals. They are so small that no sum overflows and
/// becomes a NaN: NaNs have other bits on a GPU.
void fill(std::byte* data, DType dtype, std::size_t numel, std::uint32_t seed) {
  std::mt19937 random(seed);
  const std::size_t bytes = size_of(dtype);
  for (std::size_t i = 0; i < numel; ++i) {
    const std::uint32_t bits = random() & (bytes == 2 ? 0xbfffu : 0xbfffffffu);
    std::memcpy(data + i * bytes, &bits, bytes);
  }
}

void expect_the_cpus_bits(DType dtype, int count, std::size_t numel, std::size_t shift) {
  std::vector<std::unique_ptr<Memory>> inputs;
  cuda::SumInputs addends;
  std::vector<const void*> sources;
  for (int q = 0; q < count; ++q) {
    const Memory& memory = *inputs.emplace_back(std::make_unique<Memory>((numel + shift) * size_of(dtype)));
    std::byte* const input = memory.data() + shift * size_of(dtype);
    fill(input, dtype, numel, static_cast<std::uint32_t>(q + 1));
    sources.push_back(input);
    addends.inputs[addends.count++] = input;
  }
  std::vector<float> wanted(numel);
  pairwise_sum(sources, dtype, wanted.data(), numel);
  const Memory output((numel + 1) * sizeof(float));
  std::memset(output.data(), 0x5a, (numel + 1) * sizeof(float));
  ASSERT_EQ(cuda::device_sum(addends, dtype, reinterpret_cast<float*>(output.data()), numel, nullptr), cudaSuccess);
  finish();
  EXPECT_EQ(std::memcmp(output.data(), wanted.data(), numel * sizeof(float)), 0)
      << name_of(dtype) << ", " << count << " inputs of " << numel << ", " << shift;
  const std::array<std::byte, 4> untouched{std::byte{0x5a}, std::byte{0x5a}, std::byte{0x5a}, std::byte{0x5a}};
  EXPECT_EQ(std::memcmp(output.data() + numel * sizeof(float), untouched.data(), 4), 0) << "written behind the output";
}

TEST(DeviceSum, GivesTheCpusBits) {
#if !defined(TESSERA_CUDA_ON_HOST)
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
#endif
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (int count = 1; count <= cuda::SumInputs::kMost; ++count) {
      for (const std::size_t numel : {0u, 1u, 4u, 1027u, 4096u}) expect_the_cpus_bits(dtype, count, numel, 0);
      expect_the_cpus_bits(dtype, count, 1000, 1);  // these elements are not aligned for four at a time
    }
  }
}

TEST(DeviceSum, NoInputsAndIntegersAreRefused) {
  float output = 0;
  cuda::SumInputs none;
  EXPECT_EQ(cuda::device_sum(none, DType::kF32, &output, 1, nullptr), cudaErrorInvalidValue);
  none.count = 1;
  EXPECT_EQ(cuda::device_sum(none, DType::kI64, &output, 1, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace tessera
