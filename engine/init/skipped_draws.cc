#include "engine/init/skipped_draws.h"

#include <ATen/CPUGeneratorImpl.h>

#include <array>
#include <mutex>

namespace tessera {
namespace {

constexpr int kState = at::MERSENNE_STATE_N, kMiddle = at::MERSENNE_STATE_M;
using State = std::array<std::uint32_t, kState>;

inline std::uint32_t twist(std::uint32_t from, std::uint32_t to) {
  const std::uint32_t mixed = (from & 0x80000000u) | (to & 0x7fffffffu);
  return (mixed >> 1) ^ (-(to & 1u) & 0x9908b0dfu);
}

/// The next 624 words, in place: each from the word at its place, the one behind it and the one 397 further on.
void next_words(State& state) {
  std::uint32_t* const w = state.data();
  for (int i = 0; i < kState - kMiddle; ++i) w[i] = w[i + kMiddle] ^ twist(w[i], w[i + 1]);
  for (int i = kState - kMiddle; i < kState - 1; ++i) w[i] = w[i + kMiddle - kState] ^ twist(w[i], w[i + 1]);
  w[kState - 1] = w[kMiddle - 1] ^ twist(w[kState - 1], w[0]);
}

}  // namespace

std::optional<std::uint64_t> words_to_fill(const std::string& op, std::int64_t numel) {
  const auto count = static_cast<std::uint64_t>(numel);
  if (op == "aten::uniform_") return count;
  if (op == "aten::normal_" && numel >= 16) return count + (count % 16 == 0 ? 0 : 16);
  return std::nullopt;
}

void skip_words(at::Generator& generator, std::uint64_t words) {
  const std::lock_guard lock(generator.mutex());
  auto* const cpu = generator.get<at::CPUGeneratorImpl>();
  at::mt19937 engine = cpu->engine();
  at::mt19937_data_pod data = engine.data();
  // `left_` is one more than what may still be drawn of `state_`, from `next_` on.
  while (words > 0) {
    const auto ready = static_cast<std::uint64_t>(data.left_ - 1);
    const std::uint64_t taken = words < ready ? words : ready;
    data.left_ -= static_cast<int>(taken);
    data.next_ += static_cast<std::uint32_t>(taken);
    words -= taken;
    if (words == 0) break;
    next_words(data.state_);
    data.left_ = kState;
    data.next_ = 1;
    --words;
  }
  engine.set_data(data);
  cpu->set_engine(engine);
}

}  // namespace tessera
