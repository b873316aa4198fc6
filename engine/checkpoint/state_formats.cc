#include "engine/checkpoint/state_formats.h"

#include <cstring>

#include "optim/arithmetic/rounding.h"

namespace tessera {
namespace {

/// Returns element `i` of memory that need not be aligned.
template <class Number>
Number load(std::span<const std::byte> bytes, std::size_t i) {
  Number number;
  std::memcpy(&number, bytes.data() + i * sizeof number, sizeof number);
  return number;
}

template <class Number>
void store(std::span<std::byte> bytes, std::size_t i, Number number) {
  std::memcpy(bytes.data() + i * sizeof number, &number, sizeof number);
}

}  // namespace

bool can_convert(const std::string& from, const std::string& to) {
  return from == to || (from == "fp32" && to == "bf16") || (from == "bf16" && to == "fp32");
}

bool is_exact(const std::string& from, const std::string& to) { return from == to || to == "fp32"; }

void convert_state(const std::string& from_format, std::span<const std::byte> from, const std::string& to_format,
                   std::span<std::byte> to) {
  if (from_format == to_format) {
    std::memcpy(to.data(), from.data(), from.size());
  } else if (to_format == "fp32") {
    for (std::size_t i = 0; i < to.size() / 4; ++i) store(to, i, std::uint32_t{load<std::uint16_t>(from, i)} << 16);
  } else {
    for (std::size_t i = 0; i < to.size() / 2; ++i)
      store(to, i, static_cast<std::uint16_t>(bf16_nearest<std::uint32_t>(load<float>(from, i))));
  }
}

}  // namespace tessera
