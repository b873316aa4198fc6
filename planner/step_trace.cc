#include "planner/step_trace.h"

#include <nlohmann/json.hpp>

namespace tessera {

void StepTrace::span(int rank, std::size_t lane, const char* what, int unit, double begin_s, double end_s) {
  if (!ranks_.contains(rank) || end_s <= begin_s) return;
  std::string name = what;
  if (unit >= 0) name.append(" ").append(units_[static_cast<std::size_t>(unit)]);
  const nlohmann::json json = {
      {"name", name}, {"ph", "X"},  {"ts", (offset_s_ + begin_s) * 1e6}, {"dur", (end_s - begin_s) * 1e6},
      {"pid", rank},  {"tid", lane}};
  if (!events_.empty()) events_ += ",\n";
  events_ += json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace tessera
