#include "app/operator_trace.h"

#include <ATen/Context.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <unistd.h>

#include <memory>
#include <set>

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
    throw Error(ExitCode::kUnavailable,
                std::string("--trace-operators: ") + error.what_without_backtrace() + ". hint: --trace needs nothing");
  }
  is_on_ = true;
}

void OperatorTrace::write(const std::filesystem::path& path) {
  is_on_ = false;
  const std::unique_ptr<profiler::ProfilerResult> result = profiler::disableProfiler();
  result->save(path.string());
  if (::access(path.c_str(), R_OK) != 0)
    throw Error(ExitCode::kCannotCreate, "--trace-operators: " + path.string() + " could not be written");
}

}  // namespace tessera::app
