// tessera_import_docs DIRECTORY
//
// Writes DIRECTORY/import-config.md from the tables of app/import.

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "app/import/import_docs.h"
#include "runtime/base/status.h"

int main(int argc, char** argv) {
  using tessera::ExitCode;
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s DIRECTORY\n", argv[0]);
    return static_cast<int>(ExitCode::kUsage);
  }
  const std::filesystem::path path = std::filesystem::path(argv[1]) / "import-config.md";
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << tessera::app::import_reference();
  file.close();
  if (!file.fail()) return 0;
  std::fprintf(stderr, "tessera_import_docs: cannot write %s\n", path.c_str());
  return static_cast<int>(ExitCode::kCannotCreate);
}
