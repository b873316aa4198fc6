#include "offload/io_ring.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "offload/aligned_memory.h"

namespace tessera {
namespace {

TEST(IoRing, Smoke) {
  auto file = BlockFile::create({.directory = "/work/main/build", .bytes = 1 << 20, .who = "test"});
  ASSERT_TRUE(file.ok()) << file.status();
  auto memory = AlignedMemory::make(2 << 20, "test");
  ASSERT_TRUE(memory.ok());
  for (IoEngine engine : {IoEngine::kUring, IoEngine::kThreads}) {
    auto ring = IoRing::make({.engine = engine});
    ASSERT_TRUE(ring.ok()) << ring.status();
    const BlockFile* files[] = {file->get()};
    const std::span<std::byte> spans[] = {memory->span()};
    (*ring)->register_resources(files, spans);
    std::memset(memory->data(), 7, 1 << 20);
    ASSERT_TRUE((*ring)->submit({IoKind::kWrite, file->get(), 0, memory->data(), 1 << 20, "test", 1}).ok());
    auto st = (*ring)->wait(1);
    ASSERT_TRUE(st.ok()) << st;
    ASSERT_TRUE((*ring)->submit({IoKind::kRead, file->get(), 0, memory->data() + (1 << 20), 1 << 20, "test", 2}).ok());
    ASSERT_TRUE((*ring)->wait(2).ok());
    EXPECT_EQ(std::memcmp(memory->data(), memory->data() + (1 << 20), 1 << 20), 0);
    std::cerr << (*ring)->describe() << " " << (*file)->mode() << "\n";
  }
}

}  // namespace
}  // namespace tessera
