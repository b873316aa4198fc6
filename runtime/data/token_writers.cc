#include "runtime/data/token_writers.h"

#include <fmt/format.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "runtime/base/errno_hint.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

/// A file that is written from front to back under "<path>.partial". It gets its name when `finish` has found that all
/// of it was written. An older file of this name therefore keeps its content under its other names (hard links).
class Output {
 public:
  explicit Output(const std::filesystem::path& path) : path_(path), partial_(path) {
    partial_ += ".partial";
    std::error_code error;
    std::filesystem::remove(partial_, error);
    stream_.open(partial_, std::ios::binary | std::ios::trunc);
    created_ = stream_.is_open();
  }
  ~Output() {
    std::error_code error;
    if (created_ && !is_finished_) std::filesystem::remove(partial_, error);
  }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  template <typename T>
  void put(T value) {
    stream_.write(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void put_text(std::string_view text) { stream_.write(text.data(), static_cast<std::streamsize>(text.size())); }
  void put_tokens(std::span<const std::int64_t> tokens, TokenType type) {
    with_token_type(type, [&](auto zero) {
      for (const std::int64_t token : tokens) put(static_cast<decltype(zero)>(token));
      return 0;
    });
  }

  absl::Status finish() {
    stream_.close();
    if (!stream_)
      return failed(created_ ? ExitCode::kIo : ExitCode::kCannotCreate, created_ ? "write" : "create", errno);
    std::error_code error;
    std::filesystem::rename(partial_, path_, error);
    if (error) return failed(ExitCode::kCannotCreate, "create", error.value());
    is_finished_ = true;
    return absl::OkStatus();
  }

 private:
  absl::Status failed(ExitCode code, const char* what, int error) const {
    return make_error(code, fmt::format("{}: cannot {}: {}", path_.string(), what, reason_of_writing(error)));
  }

  std::filesystem::path path_, partial_;
  std::ofstream stream_;
  bool created_ = false, is_finished_ = false;
};

absl::Status check_fit(const std::filesystem::path& path, std::span<const std::int64_t> tokens, TokenType type) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (!fits(type, tokens[i]))
      return make_error(ExitCode::kCorruptData,
                        fmt::format("{}: token {} is {}, which is no {}. [T0585] hint: write them as a wider type",
                                    path.string(), i, tokens[i], name_of(type)));
  }
  if (tokens.size() > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max()))
    return make_error(ExitCode::kCorruptData,
                      fmt::format("{}: {} tokens, but the format counts to 2^31 - 1. [T0586] hint: write several files",
                                  path.string(), tokens.size()));
  return absl::OkStatus();
}

std::optional<std::uint8_t> megatron_code(TokenType type) {
  switch (type) {
    case TokenType::kU8:
      return 1;
    case TokenType::kI8:
      return 2;
    case TokenType::kI16:
      return 3;
    case TokenType::kI32:
      return 4;
    case TokenType::kI64:
      return 5;
    case TokenType::kU16:
      return 8;
    case TokenType::kU32:
      break;
  }
  return std::nullopt;
}

absl::Status write_index(const std::filesystem::path& path, std::span<const std::vector<std::int64_t>> documents,
                         TokenType type, std::uint8_t code) {
  Output idx(path);
  idx.put_text({"MMIDIDX\0\0", 9});
  idx.put(std::uint64_t{1});
  idx.put(code);
  idx.put(std::uint64_t{documents.size()});
  idx.put(std::uint64_t{documents.size() + 1});
  for (const auto& document : documents) idx.put(static_cast<std::int32_t>(document.size()));
  std::int64_t offset = 0;
  for (const auto& document : documents) {
    idx.put(offset);
    offset += static_cast<std::int64_t>(document.size()) * size_of(type);
  }
  for (std::size_t i = 0; i <= documents.size(); ++i) idx.put(static_cast<std::int64_t>(i));
  return idx.finish();
}

}  // namespace

absl::Status write_megatron(const std::filesystem::path& prefix, std::span<const std::vector<std::int64_t>> documents,
                            TokenType type) {
  const auto code = megatron_code(type);
  if (!code) {
    return make_error(ExitCode::kUsage, fmt::format("{}: Megatron files hold no {}. [T0587] hint: write u16 or i32",
                                                    prefix.string(), name_of(type)));
  }
  for (const auto& document : documents) TESSERA_RETURN_IF_ERROR(check_fit(prefix, document, type));
  Output bin(std::filesystem::path(prefix) += ".bin");
  for (const auto& document : documents) bin.put_tokens(document, type);
  TESSERA_RETURN_IF_ERROR(bin.finish());
  return write_index(std::filesystem::path(prefix) += ".idx", documents, type, *code);
}

}  // namespace tessera
