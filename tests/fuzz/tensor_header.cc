// Fuzzes the header of another program's safetensors file.

#include "checkpoint/tensor_header.h"

#include "tests/fuzz/fuzz.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const std::int64_t data_bytes = data[0] | data[1] << 8;
  const auto header = read_tensor_header("fuzz", fuzz::text_of(data + 2, size - 2), data_bytes);
  if (!header.ok()) return 0;
  std::int64_t end = 0;
  for (const FileTensor& tensor : header->tensors) {
    fuzz::expect(tensor.begin == end && tensor.bytes >= 0, "tensors lie one behind the other");
    end += tensor.bytes;
  }
  fuzz::expect(end == data_bytes, "tensors fill the data");
  return 0;
}
