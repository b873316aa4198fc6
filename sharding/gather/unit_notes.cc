#include "sharding/gather/unit_notes.h"

#include <algorithm>

#include "sharding/layout/plan/memory_plan.h"

namespace tessera::unit_notes {

void write(std::span<float> notes, std::span<const char> used, std::uint64_t digest, double weight,
           std::int64_t samples) {
  std::ranges::fill(notes, 0.0F);
  for (std::size_t i = 0; i < used.size(); ++i) notes[i] = used[i] ? 1.0F : 0.0F;
  for (std::size_t bit = 0; bit < MemoryPlan::kDigestBits; ++bit) {
    notes[used.size() + bit] = static_cast<float>(digest >> bit & 1);
  }
  const auto parameters = static_cast<std::int64_t>(used.size());
  notes[static_cast<std::size_t>(place_of_weight(parameters))] = static_cast<float>(weight);
  notes[static_cast<std::size_t>(place_of_samples(parameters))] = static_cast<float>(samples);
}

std::int64_t place_of_weight(std::int64_t parameters) { return parameters + MemoryPlan::kDigestBits; }
std::int64_t place_of_samples(std::int64_t parameters) { return place_of_weight(parameters) + 1; }

/// Returns whether all ranks have the same digest. Then each bit was set by all ranks or by no rank.
bool have_one_digest(std::span<const float> sum, std::int64_t parameters, int ranks) {
  const auto bits = sum.subspan(static_cast<std::size_t>(parameters), MemoryPlan::kDigestBits);
  return std::ranges::all_of(bits, [&](float set) { return set == 0.0F || set == static_cast<float>(ranks); });
}

/// `bits` has the number of ranks that set each bit. Replaces this number by a number that is 0 only if all ranks or no
/// rank set the bit.
void compare_digests(at::Tensor bits, int ranks) { bits.mul_(bits.sub(ranks)); }

void read_used(std::span<const float> sum, std::span<char> used) {
  for (std::size_t i = 0; i < used.size(); ++i) used[i] = sum[i] > 0.0F ? 1 : 0;
}

}  // namespace tessera::unit_notes
