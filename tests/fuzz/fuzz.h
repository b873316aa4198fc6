#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

/// libFuzzer calls this function with each input. It returns 0; a fault that it finds ends the process.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace tessera::fuzz {

inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// Ends the process if a reader has broken a promise, so that libFuzzer shows the input.
inline void expect(bool is_kept, const char* promise) {
  if (is_kept) return;
  std::fprintf(stderr, "not kept: %s\n", promise);
  std::abort();
}

}  // namespace tessera::fuzz
