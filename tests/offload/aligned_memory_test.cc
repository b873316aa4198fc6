// Tests memory that is aligned to pages.

#include "offload/files/aligned_memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <fstream>

#include "runtime/base/status.h"
#include "tests/offload/scratch.h"

namespace tessera {
namespace {

// Returns the number of pages of address space that the process has.
std::size_t mapped_pages() {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages;
}

TEST(AlignedMemory, IsAlignedZeroAndExact) {
  (void)mapped_pages();  // this lets streams allocate their memory before the count begins
  for (const std::size_t bytes : {1ul, 4096ul, 5000ul, (2ul << 20) - 1, (2ul << 20), (6ul << 20) + 4097}) {
    const std::size_t before = mapped_pages();
    const auto memory = AlignedMemory::make(bytes, "test").value();
    EXPECT_EQ(memory.bytes(), AlignedMemory::occupied_bytes(bytes));
    EXPECT_LT(memory.bytes() - bytes, 4096u);
    EXPECT_EQ(mapped_pages() - before, memory.bytes() / 4096);
    const std::size_t alignment = memory.bytes() >= (2u << 20) ? 2u << 20 : 4096;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.data()) % alignment, 0u);
    EXPECT_TRUE(std::ranges::all_of(memory.span(), [](std::byte b) { return b == std::byte{0}; }));
  }
  EXPECT_EQ(AlignedMemory::make(0, "test").value().bytes(), 0u);
}

TEST(AlignedMemory, MovedMemoryIsGivenBackOnce) {
  const std::size_t before = mapped_pages();
  {
    AlignedMemory first = AlignedMemory::make(8 << 20, "test").value();
    AlignedMemory second = std::move(first);
    first = AlignedMemory::make(4 << 20, "test").value();
    second = std::move(first);
    EXPECT_EQ(second.bytes(), 4u << 20);
  }
  EXPECT_EQ(mapped_pages(), before);
}

TEST(AlignedMemory, TooMuchIsAnError) {
  EXPECT_EQ(exit_code_of(AlignedMemory::make(std::size_t{1} << 62, "test").status()), ExitCode::kOsResource);
  const absl::Status status = AlignedMemory::make(std::size_t{1} << 50, "rank 4").status();
  EXPECT_EQ(exit_code_of(status), ExitCode::kOsResource);
  EXPECT_NE(message_of(status).find("rank 4: wanted 1.00 PiB"), std::string::npos) << status;
}

}  // namespace
}  // namespace tessera
