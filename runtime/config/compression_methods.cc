#include "runtime/config/compression_methods.h"

namespace tessera {

std::span<const CompressionMethod> compression_methods() {
  static constexpr CompressionMethod kMethods[] = {
      {"power_sgd_rank", [](const CompressionConfig& c) { return c.power_sgd_rank > 0; }},
      {"top_k", [](const CompressionConfig& c) { return c.top_k > 0; }},
      {"random_k", [](const CompressionConfig& c) { return c.random_k > 0; }},
      {"sign", [](const CompressionConfig& c) { return c.sign != SignForm::kNone; }},
      {"one_bit", [](const CompressionConfig& c) { return c.one_bit; }},
      {"qsgd_levels", [](const CompressionConfig& c) { return c.qsgd_levels > 0; }},
      {"terngrad", [](const CompressionConfig& c) { return c.terngrad; }},
      {"hook", [](const CompressionConfig& c) { return c.hook; }}};
  return kMethods;
}

bool keeps_gradients(const CompressionConfig& c) {
  return c.error_feedback || c.power_sgd_rank > 0 || c.top_k > 0 || c.random_k > 0 || c.sign == SignForm::kFeedback ||
         c.one_bit;
}

}  // namespace tessera
