#include <ATen/Context.h>

#include <cstdio>
#include <memory>
#include <string>

#include "app/commands.h"
#include "app/text_sample.h"
#include "app/threads.h"
#include "models/language_model.h"
#include "runtime/border/throw.h"
#include "tessera/deferred_init.h"
#include "tessera/recompute.h"
#include "tessera/run.h"
#include "tessera/weights.h"

namespace tessera::app {

int run_sample(const SampleCommand& command) {
  return run([&] {
    if (command.sample.tokens < 1) throw Error(ExitCode::kUsage, "sample: --tokens must be 1 or more");
    if (command.sample.temperature < 0 || command.sample.top_k < 0)
      throw Error(ExitCode::kUsage, "sample: --temperature and --top-k cannot be negative");
    set_threads_of_rank(1);
    const models::ModelConfig config = value_or_throw(models::read_model_config(command.model));
    const models::CheckpointFn recompute = [](const auto& segment, const at::Tensor& x) {
      return checkpoint(segment, x);
    };
    const auto model = value_or_throw(models::make_language_model(config, recompute));
    throw_if_error(check_byte_level(*model));
    load_weights(*model, command.weights);
    std::printf("%s\n", continue_text(*model, command.sample).c_str());
  });
}

}  // namespace tessera::app
