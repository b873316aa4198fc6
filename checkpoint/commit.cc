#include "checkpoint/commit.h"

#include <fmt/format.h>

#include "checkpoint/files/hash.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr std::string_view kMagic = "TESSCMT1";
constexpr std::size_t kWord = 8;

void append_word(std::string& bytes, std::uint64_t word) {
  for (std::size_t i = 0; i < kWord; ++i) bytes += static_cast<char>(word >> (8 * i) & 0xff);
}

void append_text(std::string& bytes, std::string_view text) {
  append_word(bytes, text.size());
  bytes += text;
}

/// Reads fields one after another from bytes that may be damaged. If a field needs more bytes than are left, `is_whole`
/// becomes false. This field and all later fields are then read as zeros and empty texts.
class PieceReader {
 public:
  explicit PieceReader(std::string_view bytes) : left_(bytes) {}

  std::string_view take(std::uint64_t count) {
    if (count > left_.size()) is_whole_ = false;
    if (!is_whole_) return {};
    const std::string_view piece = left_.substr(0, static_cast<std::size_t>(count));
    left_.remove_prefix(static_cast<std::size_t>(count));
    return piece;
  }
  std::uint64_t word() {
    std::uint64_t value = 0;
    std::size_t i = 0;
    for (const char byte : take(kWord)) value |= std::uint64_t{static_cast<unsigned char>(byte)} << (8 * i++);
    return value;
  }
  std::string text() { return std::string(take(word())); }
  bool is_whole() const { return is_whole_; }
  bool is_at_end() const { return left_.empty(); }

 private:
  std::string_view left_;
  bool is_whole_ = true;
};

void take_parts(PieceReader& reader, CommitParts& parts) {
  for (std::uint64_t count = reader.word(); count > 0 && reader.is_whole(); --count) {
    std::string name = reader.text();
    parts[std::move(name)] = reader.text();
  }
}

absl::Status no_commit(const std::string& file, const std::string& what) {
  return make_error(
      ExitCode::kCorruptData,
      file + ": " + what + ". [T0067] hint: where no other commit is whole, remove the folder to begin anew");
}

}  // namespace

std::string write_parts(const CommitParts& parts) {
  std::string bytes;
  append_word(bytes, parts.size());
  for (const auto& [name, part] : parts) {
    append_text(bytes, name);
    append_text(bytes, part);
  }
  return bytes;
}

bool read_parts(std::string_view bytes, CommitParts& parts) {
  PieceReader reader(bytes);
  take_parts(reader, parts);
  return reader.is_whole() && reader.is_at_end();
}

std::string write_commit(const Commit& commit) {
  std::string bytes(kMagic);
  append_word(bytes, static_cast<std::uint64_t>(commit.generation));
  append_word(bytes, commit.run);
  append_word(bytes, static_cast<std::uint64_t>(commit.step));
  append_word(bytes, commit.layout);
  bytes += write_parts(commit.parts);
  append_word(bytes, checkpoint_hash(bytes));
  return bytes;
}

absl::StatusOr<Commit> read_commit(const std::string& file, std::string_view bytes) {
  if (bytes.size() < kMagic.size() + kWord || !bytes.starts_with(kMagic))
    return no_commit(file, "no commit of a durable run: it does not begin with " + std::string(kMagic));
  const std::string_view body = bytes.substr(0, bytes.size() - kWord);
  const std::uint64_t want = PieceReader(bytes.substr(body.size())).word(), got = checkpoint_hash(body);
  if (got != want)
    return no_commit(file, fmt::format("{} bytes with the hash {}, and {} was written: the file is damaged",
                                       body.size(), hash_text(got), hash_text(want)));
  PieceReader reader(body.substr(kMagic.size()));
  Commit commit;
  commit.generation = static_cast<std::int64_t>(reader.word());
  commit.run = reader.word();
  commit.step = static_cast<std::int64_t>(reader.word());
  commit.layout = reader.word();
  take_parts(reader, commit.parts);
  if (!reader.is_whole() || !reader.is_at_end() || commit.generation < 1 || commit.step < 0)
    return no_commit(file, "its hash is right, but its lengths or numbers are none that a commit has");
  return commit;
}

}  // namespace tessera
