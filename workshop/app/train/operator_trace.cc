#include "workshop/app/train/operator_trace.h"

#include <ATen/Context.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <set>
#include <string>
#include <system_error>

#include "runtime/base/log.h"
#include "runtime/border/throw.h"

namespace tessera::app {

namespace profiler = torch::autograd::profiler;

void OperatorTrace::start() {
  std::set<profiler::ActivityType> activities = {profiler::ActivityType::CPU};
  if (at::hasCUDA()) activities.insert(profiler::ActivityType::CUDA);
  const profiler::ProfilerConfig config(profiler::ProfilerState::KINETO);
  try {
    profiler::prepareProfiler(config, activities);
    profiler::enableProfiler(config, activities);
  } catch (const c10::Error& error) {
    throw Error(ExitCode::kUnavailable, std::string("--trace-operators: ") + error.what_without_backtrace() +
                                            ". [T0020] hint: take --trace, which needs no profiler of LibTorch");
  }
  is_on_ = true;
}

void OperatorTrace::try_to_write(const std::filesystem::path& path) {
  is_on_ = false;
  std::error_code ignored;
  std::filesystem::remove(path, ignored);  // a file that is there afterwards is thus new
  profiler::disableProfiler()->save(path.string());
  if (!std::filesystem::exists(path, ignored))
    log_warning("--trace-operators: " + path.string() + " could not be written");
}

}  // namespace tessera::app
