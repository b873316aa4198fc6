#include "engine/job/profiler_ranges.h"

#include <ATen/record_function.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/span.h"

namespace tessera {
namespace {

/// This function throws nothing. A span may begin inside an observer of operators, where gathers are made, and on
/// threads whose exceptions no code would catch.
void* begin_range(std::string_view what, std::string_view subject) noexcept {
  try {
    std::optional<at::StepCallbacks> observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (!observers) return nullptr;
    std::string name(what);
    if (!subject.empty()) name.append(" ").append(subject);
    auto range = std::make_unique<at::RecordFunction>(std::move(*observers));
    range->before(std::string_view(name));  // `before` keeps a copy
    return range.release();
  } catch (...) {
    return nullptr;
  }
}

/// The destructor of the range calls the observers, and catches their exceptions.
void end_range(void* range) noexcept { delete static_cast<at::RecordFunction*>(range); }

constexpr Trace::Listener kProfilers = {&begin_range, &end_range};

}  // namespace

void show_spans_to_profilers() { Trace::tell(&kProfilers); }

}  // namespace tessera
