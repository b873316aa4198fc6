#include "planner/script/form_cost.h"

#include <algorithm>

namespace tessera {
namespace {

bool is_floating(DType dtype) { return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16; }

double seconds_per_byte(const CodingFit& coding, WireForm form) {
  switch (form) {
    case WireForm::kPlain:
      return 0;
    case WireForm::kLossless:
      return coding.lossless_s_per_byte;
    case WireForm::kInt8:
      return coding.int8_s_per_byte;
    case WireForm::kInt4:
      return coding.int4_s_per_byte;
  }
  return 0;
}

}  // namespace

std::int64_t bytes_on_wire(WireForm form, DType dtype, std::int64_t numel) {
  constexpr std::int64_t kBlock = 256, kScaleBytes = 4;
  const std::int64_t plain = numel * static_cast<std::int64_t>(size_of(dtype));
  if (form == WireForm::kLossless)
    return dtype == DType::kF32 ? plain * 853 / 1000 : dtype == DType::kBF16 ? plain * 7 / 10 : plain;
  if (!is_lossy(form) || !is_floating(dtype)) return plain;
  const std::int64_t codes = form == WireForm::kInt8 ? numel : (numel + 1) / 2;
  return (numel + kBlock - 1) / kBlock * kScaleBytes + (codes + 3) / 4 * 4;
}

double coding_seconds(const CodingFit& coding, WireForm form, DType dtype, std::int64_t numel) {
  if (!is_floating(dtype) || (form == WireForm::kLossless && dtype == DType::kF16)) return 0;
  return seconds_per_byte(coding, form) * static_cast<double>(numel * std::int64_t{sizeof(float)});
}

CallCost with_coding(CallCost cost, double coding_s) {
  cost.coding_s = coding_s;
  cost.transfer_s = std::max(cost.transfer_s, coding_s);
  return cost;
}

/// Returns the cost of an all-gather in `form`. A rank encodes its own part once, and decodes the parts of the other
/// ranks.
CallCost all_gather_in(WireForm form, DType dtype, std::int64_t numel, const Links& links, int ranks) {
  if (ranks < 2) return {};
  return with_coding(links.all_gather_cost(ranks, bytes_on_wire(form, dtype, numel)),
                     coding_seconds(links.coding, form, dtype, numel) * links.coding.of_gathers * ranks / 2);
}

}  // namespace tessera
