// Fuzzes the model file, and config.json of Hugging Face.

#include "workshop/models/model_config.h"

#include "tests/fuzz/fuzz.h"
#include "workshop/models/hf_config.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(fuzz::text_of(data, size));
  static_cast<void>(models::parse_hf_config(text));
  const auto config = models::parse_model_config(text);
  if (!config.ok()) return 0;
  const std::string printed = models::to_json(*config);
  const auto again = models::parse_model_config(printed);
  fuzz::expect(again.ok() && models::to_json(*again) == printed, "a model that was read can be printed");
  return 0;
}
