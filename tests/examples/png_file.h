#pragma once

#include <cstddef>
#include <string>

namespace tessera::testing {

/// Returns a PNG file of `height` rows of equal length. A pixel is three bytes: red, green, blue. The file is not
/// packed, and its check sums are 0, since stb_image does not read them.
inline std::string png_of(const std::string& pixels, std::size_t height) {
  const std::size_t row = pixels.size() / height, packed = height * (row + 1);
  const auto big_endian = [](std::size_t value) {
    std::string bytes;
    for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>((value >> shift) & 0xff);
    return bytes;
  };
  const auto chunk = [&](const std::string& name, const std::string& data) {
    return big_endian(data.size()) + name + data + big_endian(0);
  };
  std::string rows;
  for (std::size_t y = 0; y < height; ++y) rows += '\0' + pixels.substr(y * row, row);  // 0: rows are not filtered
  std::string stored = "\x78\x01\x01";  // the headers of zlib and of a single block that is not packed
  for (const std::size_t size : {packed, packed ^ 0xffff}) {
    stored += static_cast<char>(size & 0xff);
    stored += static_cast<char>((size >> 8) & 0xff);
  }
  const std::string form{8, 2, 0, 0, 0};  // 8 bits a channel, colours, and no interlacing
  return "\x89PNG\r\n\x1a\n" + chunk("IHDR", big_endian(row / 3) + big_endian(height) + form) +
         chunk("IDAT", stored + rows + big_endian(0)) + chunk("IEND", "");
}

}  // namespace tessera::testing
