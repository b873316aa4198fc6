#pragma once

// See docs/glossary.md: unit.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

namespace tessera {

/// Notes about a unit, which ranks exchange together with its reduction. They begin with a 0 or 1 for each of the
/// unit's trainable parameters, and for each bit of a digest. The fp32 sums of these numbers over ranks are exact.
/// Behind these numbers are a weight and a number of samples. The sums of weights and of samples are rounded to fp32;
/// the sum of samples is exact up to 2^24.
namespace unit_notes {

/// `notes` has used.size() + 64 + 2 elements or more; the elements behind these are filled with zeros.
void write(std::span<float> notes, std::span<const char> used, std::uint64_t digest, double weight,
           std::int64_t samples);

/// Returns the index of the weight in the notes. `parameters` is used.size() of write.
std::int64_t place_of_weight(std::int64_t parameters);
/// Returns the index of the number of samples in the notes.
std::int64_t place_of_samples(std::int64_t parameters);

/// Returns whether all ranks gave the same digest, read from the sum of the notes of `ranks` ranks. `parameters` is
/// used.size() of write.
bool have_one_digest(std::span<const float> sum, std::int64_t parameters, int ranks);

/// Compares digests on a device, without making the host wait. `bits` is the part of the sum behind the parameters.
/// Each number of it becomes 0 where the ranks agree, and negative where they do not. So a sum of such numbers is 0
/// only if the ranks agree everywhere.
void compare_digests(at::Tensor bits, int ranks);

/// Reads from the sum whether any rank used each parameter.
void read_used(std::span<const float> sum, std::span<char> used);

}  // namespace unit_notes
}  // namespace tessera
