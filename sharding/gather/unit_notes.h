#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

namespace tessera {

/// What ranks tell each other of a unit with its reduction, in numbers whose fp32 sum over ranks is exact: 0 or 1 for each
/// of the unit's trainable parameters, and 0 or 1 for each bit of a digest. Behind them comes a weight, whose sum is fp32's.
namespace unit_notes {

/// `notes`: [used.size() + 64 + 1] or longer; the rest is zeros.
void write(std::span<float> notes, std::span<const char> used, std::uint64_t digest, double weight);

/// Where the weight is. `parameters`: used.size() of write.
std::int64_t place_of_weight(std::int64_t parameters);

/// From the sum of the notes of `ranks` ranks: whether all gave the same digest. `parameters`: used.size() of write.
bool have_one_digest(std::span<const float> sum, std::int64_t parameters, int ranks);

/// The same on a device, which the host does not wait for: each number of `bits`, what the sum has behind the parameters, becomes 0 where
/// ranks agree, and negative where not. So do sums of such numbers.
void compare_digests(at::Tensor bits, int ranks);

/// From the sum: whether any rank used each parameter.
void read_used(std::span<const float> sum, std::span<char> used);

}  // namespace unit_notes
}  // namespace tessera
