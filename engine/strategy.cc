#include "tessera/strategy.h"

#include "runtime/border/throw.h"
#include "runtime/config/strategy_file.h"

namespace tessera {

Strategy Strategy::from_file(const std::filesystem::path& path) { return value_or_throw(read_strategy(path)); }

Strategy Strategy::from_json(const std::string& text, const std::string& name) {
  return value_or_throw(parse_strategy(text, name));
}

}  // namespace tessera
