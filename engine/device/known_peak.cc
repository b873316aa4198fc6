#include "engine/device/known_peak.h"

#include <algorithm>
#include <cstddef>
#include <iterator>

namespace tessera {
namespace {

struct KnownPeak {
  std::string_view part_of_name;
  double of_16_bits, of_fp32;  ///< in TFLOP/s
};

/// Returns whether `name` contains `part` as whole words: "A10" is not in "A100", nor "A100" in "RTX A1000".
bool has_words(std::string_view name, std::string_view part) {
  const auto is_of_word = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
  };
  const std::size_t at = name.find(part);
  if (at == std::string_view::npos) return false;
  const std::size_t end = at + part.size();
  return (at == 0 || !is_of_word(name[at - 1])) && (end == name.size() || !is_of_word(name[end]));
}

/// If a name begins with another name of the table, the longer name comes first.
constexpr KnownPeak kPeaks[] = {
    {"B200", 2250, 75},   {"H100 PCIe", 756, 51}, {"H100 NVL", 835, 60}, {"H100", 989.4, 67}, {"H200", 989.4, 67},
    {"GH200", 989.4, 67}, {"A100", 312, 19.5},    {"A800", 312, 19.5},   {"H800", 989.4, 67}, {"A30", 165, 10.3},
    {"A10", 125, 31.2},   {"A40", 149.7, 37.4},   {"L40S", 362, 91.6},   {"L40", 181, 90.5},  {"L4", 121, 30.3}};

}  // namespace

double known_peak_tflops(std::string_view name, DType dtype) {
  const auto* const found =
      std::ranges::find_if(kPeaks, [&](const KnownPeak& peak) { return has_words(name, peak.part_of_name); });
  if (found == std::end(kPeaks)) return 0;
  return dtype == DType::kF32 ? found->of_fp32 : found->of_16_bits;
}

}  // namespace tessera
