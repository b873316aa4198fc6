// tessera_model_docs DIRECTORY
//
// Writes DIRECTORY/models.md from the fields of model files.

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "runtime/base/status.h"
#include "workshop/models/model_docs.h"

int main(int argc, char** argv) {
  using tessera::ExitCode;
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s DIRECTORY\n", argv[0]);
    return static_cast<int>(ExitCode::kUsage);
  }
  const std::filesystem::path path = std::filesystem::path(argv[1]) / "models.md";
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << tessera::models::model_reference();
  file.close();
  if (!file.fail()) return 0;
  std::fprintf(stderr, "tessera_model_docs: cannot write %s\n", path.c_str());
  return static_cast<int>(ExitCode::kCannotCreate);
}
