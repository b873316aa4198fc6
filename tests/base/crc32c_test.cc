// Tests CRC-32C with the values of RFC 3720.

#include "runtime/base/crc32c.h"

#include <gtest/gtest.h>

#include <string>

namespace tessera {
namespace {

TEST(Crc32c, EqualsTheTestVectorsOfRfc3720) {
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(crc32c(std::string(32, '\xFF')), 0x62A8AB43u);
}

}  // namespace
}  // namespace tessera
