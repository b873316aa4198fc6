// Fuzzes files of tokens, which are mapped into memory: every token of an accepted file can be read.

#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <span>
#include <vector>

#include "runtime/data/token_dataset.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;

namespace {

/// This process's own folder.
const std::filesystem::path& folder() {
  static const std::filesystem::path path = [] {
    std::string name = (std::filesystem::temp_directory_path() / "tessera-fuzz-XXXXXX").string();
    fuzz::expect(::mkdtemp(name.data()) != nullptr, "a folder can be made");
    std::atexit([] { std::filesystem::remove_all(folder()); });
    return std::filesystem::path(name);
  }();
  return path;
}

void write(const char* name, std::string_view bytes) { std::ofstream(folder() / name, std::ios::binary) << bytes; }

void read_all(const absl::StatusOr<std::unique_ptr<TokenDataset>>& dataset) {
  if (!dataset.ok()) return;
  const std::int64_t tokens = (*dataset)->num_tokens();
  fuzz::expect(tokens > 0, "a dataset has tokens");
  std::vector<std::int64_t> out(static_cast<std::size_t>(std::min<std::int64_t>(tokens, 1000)));
  for (std::int64_t begin = 0; begin < tokens; begin += static_cast<std::int64_t>(out.size())) {
    const auto count =
        static_cast<std::size_t>(std::min<std::int64_t>(tokens - begin, static_cast<std::int64_t>(out.size())));
    fuzz::expect((*dataset)->copy(begin, std::span(out).first(count)).ok(), "tokens can be read");
  }
  fuzz::expect(!(*dataset)->copy(tokens, std::span(out).first(1)).ok(), "what is behind the tokens is refused");
  static_cast<void>((*dataset)->location_of(tokens - 1));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 3) return 0;
  const std::string_view bytes = fuzz::text_of(data + 3, size - 3);
  if (data[0] == 0) {
    write("x.bin", bytes);
    read_all(open_llmc(folder() / "x.bin"));
  } else {
    const std::size_t index = std::min<std::size_t>(bytes.size(), data[1] | data[2] << 8);
    write("x.idx", bytes.substr(0, index));
    write("x.bin", bytes.substr(index));
    read_all(open_megatron(folder() / "x"));
  }
  return 0;
}
