// tessera_strategy_docs DIRECTORY
//
// Writes DIRECTORY/strategy.md and DIRECTORY/strategy.schema.json from the table of keys.

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "runtime/base/status.h"
#include "runtime/config/strategy_docs.h"

namespace {

bool write_file(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (file.fail()) std::fprintf(stderr, "tessera_strategy_docs: cannot write %s\n", path.c_str());
  return !file.fail();
}

}  // namespace

int main(int argc, char** argv) {
  using tessera::ExitCode;
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s DIRECTORY\n", argv[0]);
    return static_cast<int>(ExitCode::kUsage);
  }
  const std::filesystem::path directory = argv[1];
  const bool written = write_file(directory / "strategy.md", tessera::strategy_reference()) &&
                       write_file(directory / "strategy.schema.json", tessera::strategy_schema());
  return static_cast<int>(written ? ExitCode::kOk : ExitCode::kCannotCreate);
}
