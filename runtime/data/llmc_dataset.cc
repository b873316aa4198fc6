// Token files of llm.c: a header of 256 int32 (1024 bytes), then the tokens up to the end of the file.

#include <fmt/format.h>

#include <utility>

#include "runtime/base/status.h"
#include "runtime/data/mapped_file.h"
#include "runtime/data/token_dataset.h"
#include "runtime/data/token_type.h"

namespace tessera {
namespace {

constexpr std::int64_t kHeaderBytes = 256 * 4;

struct Variant {
  std::int32_t magic;
  std::int32_t version;
  TokenType type;
  std::int64_t vocab_size;
};
constexpr Variant kVariants[] = {{20240520, 1, TokenType::kU16, 50257}, {20240801, 7, TokenType::kU32, 128256}};

class LlmcDataset : public TokenDataset {
 public:
  LlmcDataset(MappedFile file, const Variant& variant, std::int64_t num_tokens)
      : file_(std::move(file)), variant_(variant), num_tokens_(num_tokens) {}

  std::int64_t num_tokens() const override { return num_tokens_; }
  std::int64_t vocab_size_hint() const override { return variant_.vocab_size; }

  absl::Status copy(std::int64_t begin, std::span<std::int64_t> out) const override {
    TESSERA_RETURN_IF_ERROR(check_window(begin, out.size(), num_tokens_, file_.path().native()));
    widen(variant_.type, file_.bytes().data() + offset_of(begin), out);
    return absl::OkStatus();
  }

  std::string location_of(std::int64_t position) const override {
    return fmt::format("{} at byte {}", file_.path().string(), offset_of(position));
  }

  std::string describe() const override {
    return fmt::format("{}: llm.c version {}, {} tokens of {}", file_.path().string(), variant_.version, num_tokens_,
                       name_of(variant_.type));
  }

 private:
  std::int64_t offset_of(std::int64_t position) const { return kHeaderBytes + position * size_of(variant_.type); }

  MappedFile file_;
  Variant variant_;
  std::int64_t num_tokens_;
};

absl::Status corrupt(const MappedFile& file, std::int64_t offset, const std::string& what) {
  return make_error(ExitCode::kCorruptData,
                    fmt::format("{}: at byte {}: {}. [T0571] hint: write it again with llm.c's data scripts",
                                file.path().string(), offset, what));
}

absl::StatusOr<Variant> variant_of(const MappedFile& file) {
  const auto magic = load<std::int32_t>(file.bytes().data());
  const auto version = load<std::int32_t>(file.bytes().data() + 4);
  for (const Variant& variant : kVariants) {
    if (variant.magic != magic) continue;
    if (variant.version == version) return variant;
    return corrupt(file, 4,
                   fmt::format("want version {} after magic number {}, got {}", variant.version, magic, version));
  }
  return corrupt(
      file, 0,
      fmt::format("want llm.c's magic number {} or {}, got {}", kVariants[0].magic, kVariants[1].magic, magic));
}

}  // namespace

absl::StatusOr<std::unique_ptr<TokenDataset>> open_llmc(const std::filesystem::path& path) {
  TESSERA_ASSIGN_OR_RETURN(MappedFile file, MappedFile::open(path));
  const auto file_bytes = static_cast<std::int64_t>(file.size());
  if (file_bytes < kHeaderBytes)
    return corrupt(file, file_bytes, fmt::format("the file ends inside of its header of {} bytes", kHeaderBytes));
  TESSERA_ASSIGN_OR_RETURN(const Variant variant, variant_of(file));
  const std::int64_t tokens = load<std::int32_t>(file.bytes().data() + 8);
  if (tokens <= 0) return corrupt(file, 8, fmt::format("want the number of tokens, at least 1, got {}", tokens));
  // This is at most 2^31 * 4, which does not overflow.
  const std::int64_t wanted = kHeaderBytes + tokens * size_of(variant.type);
  if (file_bytes != wanted)
    return corrupt(file, 8,
                   fmt::format("{} tokens of {} want a file of {} bytes, got {}", tokens, name_of(variant.type), wanted,
                               file_bytes));
  return std::make_unique<LlmcDataset>(std::move(file), variant, tokens);
}

}  // namespace tessera
