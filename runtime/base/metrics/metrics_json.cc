#include <nlohmann/json.hpp>

#include "runtime/base/metrics/metrics_form.h"

namespace tessera {
namespace {

class JsonLines final : public MetricsForm {
 public:
  absl::StatusOr<std::string> bytes_of(const std::vector<Metric>& metrics) override {
    nlohmann::ordered_json line = nlohmann::ordered_json::object();
    for (const Metric& metric : metrics) {
      std::visit([&](const auto& value) { line[metric.name] = value; }, metric.value);
    }
    // dump() itself writes non-finite numbers as null.
    return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  }
  bool drops_halves() const override { return false; }
};

}  // namespace

std::unique_ptr<MetricsForm> json_lines_form() { return std::make_unique<JsonLines>(); }

}  // namespace tessera
