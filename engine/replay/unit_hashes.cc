#include "engine/replay/unit_hashes.h"

#include <bit>

#include "engine/memory/state_views.h"
#include "runtime/base/noise.h"

namespace tessera {
namespace {

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;  // this is 2^64 over the golden ratio

/// Mixes the elements of one parameter into a hash. Each word that is mixed holds an element's number and its bits, so
/// no two of 2^32 elements give the same word.
class Mixer {
 public:
  Mixer(HashedKind kind, std::int64_t number)
      : key_(mix_bits(mix_bits(static_cast<std::uint64_t>(kind) * kGolden) + static_cast<std::uint64_t>(number))) {}

  std::uint64_t operator()(std::int64_t element, std::uint32_t bits) const {
    const auto place = static_cast<std::uint64_t>(element);
    return mix_bits(key_ + (place >> 32) * kGolden + ((place << 32) | bits));
  }

 private:
  std::uint64_t key_;
};

std::uint32_t bits_of(float value) {
  constexpr std::uint32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000, kNaN = 0x7fc00000;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return (bits & kMagnitude) > kInfinity ? kNaN : bits;
}

/// Returns which state is read for a group's masters: only the parameters, if fp32 parameters are their own masters.
StateKind kind_of_masters(const FlatGroup& group) {
  if (group.dtype == DType::kF32) return StateKind::kParameters;
  return group.master_kind == MasterKind::kSplitBF16 ? StateKind::kAll : StateKind::kMastersAndStates;
}

std::uint64_t hash_of_view(const FlatParameter& parameter, std::int64_t first, const StateView& view) {
  const auto numel = static_cast<std::size_t>(view.run.numel);
  if (!view.low) return hash_of_run(HashedKind::kMasters, parameter.number, first, {view.master, numel});
  // The bits of a split master's two halves are hashed as they are.
  const Mixer mix(HashedKind::kMasters, parameter.number);
  const auto* const high = reinterpret_cast<const std::uint16_t*>(view.parameter);
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < numel; ++i) {
    const std::uint32_t bits = std::uint32_t{high[i]} << 16 | static_cast<std::uint16_t>(view.low[i]);
    sum += mix(first + static_cast<std::int64_t>(i), bits);
  }
  return sum;
}

}  // namespace

std::uint64_t hash_of_run(HashedKind kind, std::int64_t number, std::int64_t first, std::span<const float> values) {
  const Mixer mix(kind, number);
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < values.size(); ++i) sum += mix(first + static_cast<std::int64_t>(i), bits_of(values[i]));
  return sum;
}

void add_gradient_hashes(const std::vector<std::unique_ptr<Unit>>& units, std::span<std::uint64_t> hashes) {
  for_each_trainable(units, [&](const FlatGroup& group) {
    for (std::size_t i = 0; i < group.parameters.size(); ++i) {
      const Extent whole = group.layout.extent(i), part = intersect(whole, group.gradient_part);
      if (part.numel <= 0) continue;
      const float* const values = group.gradient + (part.offset - group.gradient_part.offset);
      hashes[static_cast<std::size_t>(group.unit->index)] +=
          hash_of_run(HashedKind::kGradients, group.parameters[i].number, part.offset - whole.offset,
                      {values, static_cast<std::size_t>(part.numel)});
    }
  });
}

void add_master_hashes(const std::vector<std::unique_ptr<Unit>>& units, std::span<std::uint64_t> hashes) {
  for_each_trainable(units, [&](const FlatGroup& group) {
    for (std::size_t i = 0; i < group.parameters.size(); ++i) {
      const Extent whole = group.layout.extent(i), part = intersect(whole, group.optimizer_part);
      if (part.numel <= 0) continue;
      for_each_state(group, kind_of_masters(group), part, StateUse::kRead, [&](const StateView& view) {
        hashes[static_cast<std::size_t>(group.unit->index)] +=
            hash_of_view(group.parameters[i], view.run.offset - whole.offset, view);
      });
    }
  });
}

}  // namespace tessera
