// Configurations of other programs: a strategy that comes of them is accepted, and there is one unless a key is refused.

#include "app/import/translate.h"
#include "runtime/config/strategy_file.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(fuzz::text_of(data, size));
  for (const char* format : {"", "deepspeed", "accelerate", "fsdp"}) {
    const auto config = app::translate_config(text, "config", format);
    if (!config.ok()) continue;
    fuzz::expect(config->refused.size() == config->count(app::Fate::kRefused), "refused keys are named");
    if (config->strategy.empty()) {
      fuzz::expect(!config->refused.empty(), "without a refused key there is a strategy");
      continue;
    }
    fuzz::expect(parse_strategy(config->strategy).ok(), "the strategy is accepted");
  }
  return 0;
}
