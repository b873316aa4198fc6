// Fuzzes the header of a checkpoint's shard, followed by any number of bytes of data.

#include "checkpoint/shard_header.h"

#include "tests/fuzz/fuzz.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const std::int64_t data_bytes = data[0] | data[1] << 8;
  const auto header = read_header("fuzz", fuzz::text_of(data + 2, size - 2), data_bytes);
  if (!header.ok()) return 0;
  fuzz::expect(header->data_bytes() == data_bytes, "pieces fill the data");
  std::int64_t end = 0;
  for (const Piece& piece : header->pieces) {
    fuzz::expect(piece.begin == end && piece.end() >= piece.begin, "pieces lie one behind the other");
    end = piece.end();
  }
  return 0;
}
