#include "engine/memory/tensor_heap.h"

#include <c10/core/CPUAllocator.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <string_view>

namespace tessera {
namespace {

constexpr std::size_t kAlignment = 64;  // bytes, as c10::gAlignment: suits cache lines and AVX-512
constexpr std::uint8_t kPriority = 1;   // this allocator's priority: higher than that of LibTorch's own

/// Frees a block of memory. The word before the data holds the address that malloc returned.
void give_back(void* data) {
  if (data) std::free(static_cast<void**>(data)[-1]);
}

class TensorHeap final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &give_back, cpu};
    auto* const base =
        bytes > SIZE_MAX - kAlignment ? nullptr : static_cast<std::byte*>(std::malloc(bytes + kAlignment));
    TORCH_CHECK_WITH(OutOfMemoryError, base, "not enough memory for a CPU tensor of ", bytes, " bytes");
    // The addresses that malloc returns are multiples of 16, so at least a word is left before the next multiple of 64.
    void* const data = base + (kAlignment - reinterpret_cast<std::uintptr_t>(base) % kAlignment);
    static_cast<void**>(data)[-1] = base;
    return {data, data, &give_back, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

/// Makes glibc keep freed memory in the process. Other C libraries have no such setting.
void keep_freed_memory() {
#ifdef __GLIBC__
  for (const char* name : {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_"}) {
    if (std::getenv(name)) return;
  }
  const char* const tunables = std::getenv("GLIBC_TUNABLES");
  if (tunables && std::string_view(tunables).find("glibc.malloc.") != std::string_view::npos) return;
  constexpr int kNever = -1, kLargestMmapThreshold = 32 << 20;  // malloc itself would raise its threshold up to this
                                                                // value
  mallopt(M_MMAP_THRESHOLD, kLargestMmapThreshold);
  mallopt(M_TRIM_THRESHOLD, kNever);
#endif
}

}  // namespace

void install_tensor_heap() {
  static std::once_flag once;
  std::call_once(once, [] {
    static TensorHeap heap;
    c10::SetCPUAllocator(&heap, kPriority);
    keep_freed_memory();
  });
}

}  // namespace tessera
