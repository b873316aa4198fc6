// Fuzzes manifest.json of a checkpoint: a manifest that was read can be written, and reading it again gives the same.

#include "checkpoint/manifest.h"

#include "checkpoint/files/hash.h"
#include "checkpoint/manifest_line.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = fuzz::text_of(data, size);
  static_cast<void>(read_manifest("fuzz", text));
  // The text gets a first line with its hash, which no mutation could guess.
  const auto manifest =
      read_manifest("fuzz", manifest_line(Manifest::kVersion, checkpoint_hash(text)) + std::string(text));
  if (!manifest.ok()) return 0;
  const std::string written = write_manifest(*manifest);
  const auto again = read_manifest("fuzz", written);
  fuzz::expect(again.ok() && write_manifest(*again) == written, "a manifest that was read can be written");
  return 0;
}
