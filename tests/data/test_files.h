#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "runtime/data/token_dataset.h"
#include "tests/support/test_folder.h"

namespace tessera {

/// Puts little-endian bytes together by hand, so that files have the documented formats, independently of our own
/// writers.
class Bytes {
 public:
  template <typename T>
  Bytes& put(T value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Bytes& text(const char* data, std::size_t n) {
    text_.append(data, n);
    return *this;
  }
  template <typename T>
  Bytes& all(const std::vector<T>& values) {
    for (const T value : values) put(value);
    return *this;
  }
  operator const std::string&() const { return text_; }
  const std::string& str() const { return text_; }

 private:
  std::string text_;
};

inline std::string llmc_header(std::int32_t magic, std::int32_t version, std::int32_t tokens) {
  Bytes bytes;
  bytes.put(magic).put(version).put(tokens);
  for (int i = 3; i < 256; ++i) bytes.put(std::int32_t{0});
  return bytes;
}

/// Returns a file of llm.c: of GPT-2's tokens with uint16, of Llama 3's with uint32.
template <typename Token>
std::string llmc_file(const std::vector<Token>& tokens) {
  const bool is_gpt2 = sizeof(Token) == 2;
  return llmc_header(is_gpt2 ? 20240520 : 20240801, is_gpt2 ? 1 : 7, static_cast<std::int32_t>(tokens.size())) +
         Bytes().all(tokens).str();
}

inline std::string megatron_index(std::uint8_t code, const std::vector<std::int32_t>& lengths,
                                  const std::vector<std::int64_t>& pointers,
                                  const std::vector<std::int64_t>& documents) {
  Bytes bytes;
  bytes.text("MMIDIDX\0\0", 9).put(std::uint64_t{1}).put(code);
  bytes.put(std::uint64_t{lengths.size()}).put(std::uint64_t{documents.size()});
  return bytes.all(lengths).all(pointers).all(documents);
}

inline std::vector<std::int64_t> tokens_of(const TokenDataset& dataset, std::int64_t begin, std::int64_t n) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(n));
  const auto status = dataset.copy(begin, tokens);
  EXPECT_TRUE(status.ok()) << status;
  return tokens;
}

inline std::vector<std::int64_t> all_tokens(const TokenDataset& dataset) {
  return tokens_of(dataset, 0, dataset.num_tokens());
}

}  // namespace tessera
