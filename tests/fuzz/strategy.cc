// Fuzzes the strategy file: an accepted file is printed as a file that is accepted too and has the same meaning.

#include "runtime/config/strategy_file.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto strategy = parse_strategy(std::string(fuzz::text_of(data, size)));
  if (!strategy.ok()) return 0;
  const std::string printed = strategy->to_json();
  const auto again = parse_strategy(printed);
  fuzz::expect(again.ok() && again->to_json() == printed, "a strategy that was read can be printed");
  return 0;
}
