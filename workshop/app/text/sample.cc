#include <ATen/Context.h>

#include <cstdio>
#include <filesystem>
#include <string>
#include <system_error>

#include "runtime/border/throw.h"
#include "tessera/deferred_init.h"
#include "tessera/recompute.h"
#include "tessera/run.h"
#include "tessera/weights.h"
#include "workshop/app/commands.h"
#include "workshop/app/hugging_face.h"
#include "workshop/app/text/text_sample.h"
#include "workshop/app/text/text_tokenizer.h"
#include "workshop/app/threads.h"
#include "workshop/models/language_model.h"

namespace tessera::app {
namespace {

/// Returns whether the path is a folder. If the check itself fails, the result is false; opening the path then gives
/// the error.
bool is_folder(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_directory(path, error);
}

}  // namespace

int run_sample(const SampleCommand& command) {
  return run([&] {
    if (command.sample.tokens < 1)
      throw Error(ExitCode::kUsage,
                  "sample: --tokens must be 1 or more. [T0036] hint: it is how many tokens to add to the prompt");
    if (command.sample.temperature < 0 || command.sample.top_k < 0)
      throw Error(ExitCode::kUsage,
                  "sample: --temperature and --top-k cannot be negative. [T0037] hint: --temperature 0 takes "
                  "the likeliest token, and --top-k 0 draws from all of them");
    if (command.weights.path.empty() && !is_folder(command.model))
      throw Error(ExitCode::kUsage,
                  "sample: --weights is required where --model is no folder of Hugging Face. [T0038] hint: name what "
                  "tessera train --save-weights wrote");
    set_threads_of_rank(1);
    const models::ModelConfig config = value_or_throw(models::read_model_config(command.model));
    const models::CheckpointFn recompute = [](const auto& segment, const at::Tensor& x) {
      return checkpoint(segment, x);
    };
    const auto model = value_or_throw(models::make_language_model(config, recompute));
    const ChosenTokenizer tokenizer = value_or_throw(choose_tokenizer(command.tokenizer, {command.model}));
    throw_if_error(tokenizer.get() ? check_vocabulary(*tokenizer.get(), model->vocab_size())
                                   : check_byte_level(*model));
    const std::string weights = command.weights.path.empty() ? command.model : command.weights.path;
    const bool is_hf = is_folder(weights) || weights.ends_with(".safetensors");
    if (is_hf && !(command.weights.part.empty() && command.weights.without.empty()))
      throw Error(ExitCode::kUsage,
                  "sample: --weights-part and --weights-without are for files of PyTorch's save. [T0039] hint: leave "
                  "them out: names in safetensors are Hugging Face's");
    if (is_hf)
      import_hf(*model, weights, config);
    else
      load_weights(*model, weights, {.part = command.weights.part, .without = command.weights.without});
    std::printf("%s\n", continue_text(*model, command.sample, tokenizer.get()).c_str());
  });
}

}  // namespace tessera::app
