// Fuzzes tokenizer.json: a tokenizer that was accepted turns the text of its own file into known tokens.

#include "workshop/tokenizer/tokenizer.h"

#include <vector>

#include "tests/fuzz/fuzz.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = fuzz::text_of(data, size);
  const auto tokenizer = Tokenizer::parse(text);
  if (!tokenizer.ok()) return 0;
  std::vector<Tokenizer::Id> ids;
  if (!tokenizer->encode(text.substr(0, 256), /*add_special=*/true, ids).ok()) return 0;
  for (const Tokenizer::Id id : ids) fuzz::expect(id < tokenizer->vocab_size(), "tokens are less than vocab_size");
  static_cast<void>(tokenizer->decode(std::vector<std::int64_t>(ids.begin(), ids.end())));
  return 0;
}
