#include "runtime/data/token_dataset.h"

#include <fmt/format.h>

#include <cstring>
#include <string>
#include <system_error>

#include "runtime/base/status.h"
#include "runtime/data/mapped_file.h"
#include "runtime/data/token_type.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::int32_t kLlmcMagics[] = {20240520, 20240801};
constexpr std::string_view kMegatronMagic{"MMIDIDX\0\0", 9};

/// Kinds of files that are surely not text, with a hint for each.
struct Foreign {
  std::string_view start;
  const char* what;
};
constexpr Foreign kForeign[] = {
    {{"PK\x03\x04", 4}, "a zip archive (perhaps a .pt, .npz or .docx file)"},
    {{"\x1f\x8b", 2}, "gzip data"},
    {{"\x28\xb5\x2f\xfd", 4}, "zstd data"},
    {{"BZh", 3}, "bzip2 data"},
    {{"\xfd"
      "7zXZ",
      5},
     "xz data"},
    {{"PAR1", 4}, "a Parquet file"},
    {{"ARROW1", 6}, "an Arrow file"},
    {{"\x93NUMPY", 6}, "a NumPy array"},
    {{"\x80\x02", 2}, "a Python pickle"},
    {{"\x80\x03", 2}, "a Python pickle"},
    {{"\x80\x04", 2}, "a Python pickle"},
    {{"\x80\x05", 2}, "a Python pickle"},
};

bool starts_with(const MappedFile& file, std::string_view start) {
  return file.size() >= start.size() && std::memcmp(file.bytes().data(), start.data(), start.size()) == 0;
}

bool is_llmc(const MappedFile& file) {
  if (file.size() < sizeof(std::int32_t)) return false;
  const auto magic = load<std::int32_t>(file.bytes().data());
  return magic == kLlmcMagics[0] || magic == kLlmcMagics[1];
}

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

/// Returns the prefix `x` for the paths `x.idx`, `x.bin` or `x`.
fs::path megatron_prefix(const fs::path& path) {
  const auto extension = path.extension();
  return extension == ".idx" || extension == ".bin" ? fs::path(path).replace_extension() : path;
}

/// Returns the path `prefix.idx`. `prefix` itself may contain dots.
fs::path index_of(const fs::path& prefix) { return fs::path(prefix) += ".idx"; }

absl::StatusOr<TokenFormat> detect_file(const fs::path& path) {
  TESSERA_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path));
  if (path.extension() == ".idx" || starts_with(file, kMegatronMagic)) return TokenFormat::kMegatron;
  if (path.extension() == ".bin" && is_there(index_of(megatron_prefix(path)))) return TokenFormat::kMegatron;
  if (is_llmc(file)) return TokenFormat::kLlmc;
  for (const Foreign& foreign : kForeign) {
    if (!starts_with(file, foreign.start)) continue;
    return make_error(ExitCode::kCorruptData,
                      fmt::format("{}: at byte 0: want tokens or text, got {}. [T0582] hint: convert it to text, to "
                                  "llm.c's .bin or to Megatron's .idx/.bin, or force the format `text`",
                                  path.string(), foreign.what));
  }
  if (path.extension() == ".bin")
    return make_error(
        ExitCode::kCorruptData,
        fmt::format("{}: at byte 0: want llm.c's magic number {} or {}, or an .idx file beside it, got {}. "
                    "[T0583] hint: name the format if you know it",
                    path.string(), kLlmcMagics[0], kLlmcMagics[1],
                    file.size() < 4 ? fmt::format("{} bytes in all", file.size())
                                    : fmt::format("{}", load<std::int32_t>(file.bytes().data()))));
  return TokenFormat::kText;
}

absl::StatusOr<TokenFormat> detect(const fs::path& path) {
  std::error_code error;
  const auto status = fs::status(path, error);
  if (fs::is_directory(status)) return TokenFormat::kText;
  if (!fs::exists(status) && is_there(index_of(path))) return TokenFormat::kMegatron;
  return detect_file(path);
}

}  // namespace

absl::StatusOr<TokenFormat> parse_token_format(std::string_view name) {
  if (name == "auto") return TokenFormat::kAuto;
  if (name == "text") return TokenFormat::kText;
  if (name == "llmc") return TokenFormat::kLlmc;
  if (name == "megatron") return TokenFormat::kMegatron;
  return make_error(ExitCode::kUsage,
                    fmt::format("unknown token format \"{}\". [T0584] hint: it is auto, text, llmc or megatron", name));
}

absl::StatusOr<std::unique_ptr<TokenDataset>> open_dataset(const fs::path& path, const DatasetOptions& options) {
  TokenFormat format = options.format;
  if (format == TokenFormat::kAuto) {
    TESSERA_ASSIGN_OR_RETURN(format, detect(path));
  }
  switch (format) {
    case TokenFormat::kLlmc:
      return open_llmc(path);
    case TokenFormat::kMegatron:
      return open_megatron(megatron_prefix(path));
    case TokenFormat::kText:
    case TokenFormat::kAuto:
      break;
  }
  return open_text(path, options.extensions);
}

absl::Status check_window(std::int64_t begin, std::size_t n, std::int64_t num_tokens, std::string_view file) {
  const bool inside = begin >= 0 && begin <= num_tokens && n <= static_cast<std::uint64_t>(num_tokens - begin);
  if (inside) return absl::OkStatus();
  return make_error(ExitCode::kInternal, fmt::format("{}: window of {} tokens at {} is outside of its {} tokens", file,
                                                     n, begin, num_tokens));
}

}  // namespace tessera
