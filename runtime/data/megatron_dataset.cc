// Megatron's indexed dataset: `prefix.idx` says where the sequences lie in `prefix.bin`.
//
//   byte 0    "MMIDIDX\0\0"
//   byte 9    uint64 version = 1
//   byte 17   uint8 type of the tokens (kTypes)
//   byte 18   uint64 S, number of sequences
//   byte 26   uint64 D, entries of the document index
//   byte 34   int32 [S] tokens of each sequence
//             int64 [S] byte offset of each sequence in prefix.bin
//             int64 [D] first sequence of each document, and the end of the last
//
// All numbers are little-endian and unaligned.

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/data/mapped_file.h"
#include "runtime/data/token_dataset.h"
#include "runtime/data/token_type.h"

namespace tessera {
namespace {

constexpr std::string_view kMagic{"MMIDIDX\0\0", 9};
constexpr std::int64_t kVersionAt = 9, kTypeAt = 17, kSequencesAt = 18, kDocumentsAt = 26, kIndexHeaderBytes = 34;
constexpr std::int64_t kMostTokens = std::int64_t{1} << 59;  // the number of bytes then fits 63 bits

/// Codes of the type byte. 6 and 7 are float64 and float32, and tokens are never of these types.
constexpr std::optional<TokenType> kTypes[] = {std::nullopt,    TokenType::kU8,  TokenType::kI8,
                                               TokenType::kI16, TokenType::kI32, TokenType::kI64,
                                               std::nullopt,    std::nullopt,    TokenType::kU16};

absl::Status corrupt_index(const MappedFile& file, std::int64_t offset, const std::string& what) {
  return make_error(
      ExitCode::kCorruptData,
      fmt::format("{}: at byte {}: {}. [T0572] hint: write both files again with Megatron's preprocess_data.py",
                  file.path().string(), offset, what));
}

/// The arrays of a checked index, read in place.
struct Index {
  const std::byte* first = nullptr;
  TokenType type = TokenType::kU16;
  std::int64_t sequences = 0;
  std::int64_t documents = 0;

  std::int64_t length_at(std::int64_t i) const { return kIndexHeaderBytes + 4 * i; }
  std::int64_t pointer_at(std::int64_t i) const { return kIndexHeaderBytes + 4 * sequences + 8 * i; }
  std::int64_t document_at(std::int64_t i) const { return kIndexHeaderBytes + 12 * sequences + 8 * i; }

  std::int64_t length(std::int64_t i) const { return load<std::int32_t>(first + length_at(i)); }
  std::int64_t pointer(std::int64_t i) const { return load<std::int64_t>(first + pointer_at(i)); }
  std::int64_t document(std::int64_t i) const { return load<std::int64_t>(first + document_at(i)); }
};

/// Reads header and size of the index file, but not the arrays yet.
absl::StatusOr<Index> read_header(const MappedFile& file) {
  const auto file_bytes = static_cast<std::int64_t>(file.size());
  if (file_bytes < kIndexHeaderBytes)
    return corrupt_index(file, file_bytes,
                         fmt::format("the file ends inside of its header of {} bytes", kIndexHeaderBytes));
  const std::byte* first = file.bytes().data();
  if (std::memcmp(first, kMagic.data(), kMagic.size()) != 0)
    return corrupt_index(file, 0, "want the magic text MMIDIDX and two zero bytes");
  if (const auto version = load<std::uint64_t>(first + kVersionAt); version != 1)
    return corrupt_index(file, kVersionAt, fmt::format("want version 1, got {}", version));
  const auto code = load<std::uint8_t>(first + kTypeAt);
  if (code >= std::size(kTypes) || !kTypes[code])
    return corrupt_index(file, kTypeAt,
                         fmt::format("want a type of whole numbers (1 to 5, or 8), got {}{}", code,
                                     code == 6 || code == 7 ? ", a floating-point type" : ""));
  const auto sequences = load<std::uint64_t>(first + kSequencesAt);
  const auto documents = load<std::uint64_t>(first + kDocumentsAt);
  // Numbers are compared with the file's size before anything is multiplied.
  const auto room = static_cast<std::uint64_t>(file_bytes - kIndexHeaderBytes);
  if (sequences > room / 12)
    return corrupt_index(
        file, kSequencesAt,
        fmt::format("{} sequences want 12 bytes each, but only {} follow the header", sequences, room));
  const std::uint64_t rest = room - sequences * 12;
  if (documents > rest / 8 || documents * 8 != rest)
    return corrupt_index(
        file, kDocumentsAt,
        fmt::format("{} sequences and {} document entries of 8 bytes want a file that {} {} bytes", sequences,
                    documents, documents > rest / 8 ? "is longer than" : "does not have", file_bytes));
  return Index{first, *kTypes[code], static_cast<std::int64_t>(sequences), static_cast<std::int64_t>(documents)};
}

absl::Status check_documents(const MappedFile& file, const Index& index) {
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < index.documents; ++i) {
    const std::int64_t document = index.document(i);
    if (document < last || document > index.sequences)
      return corrupt_index(file, index.document_at(i),
                           fmt::format("want a document start from {} to {}, got {}", last, index.sequences, document));
    last = document;
  }
  return absl::OkStatus();
}

/// The totals of all sequences.
struct Extent {
  std::int64_t tokens = 0;
  bool contiguous = true;  ///< whether sequences lie one after another from byte 0
};

absl::StatusOr<Extent> check_sequences(const MappedFile& file, const Index& index, std::int64_t bin_bytes) {
  const std::int64_t width = size_of(index.type);
  Extent extent;
  for (std::int64_t i = 0; i < index.sequences; ++i) {
    const std::int64_t length = index.length(i), pointer = index.pointer(i);
    if (length < 0) return corrupt_index(file, index.length_at(i), fmt::format("sequence {} has length {}", i, length));
    if (pointer < 0 || pointer > bin_bytes || length > (bin_bytes - pointer) / width)
      return corrupt_index(
          file, index.pointer_at(i),
          fmt::format("sequence {} of {} tokens of {} at byte {} lies outside of the .bin file of {} bytes", i, length,
                      name_of(index.type), pointer, bin_bytes));
    if (length > 0 && pointer != extent.tokens * width) extent.contiguous = false;
    if (length > kMostTokens - extent.tokens)  // sequences may overlap, so the .bin file's size is no bound
      return corrupt_index(file, index.length_at(i), fmt::format("more than {} tokens", kMostTokens));
    extent.tokens += length;
  }
  return extent;
}

class MegatronDataset : public TokenDataset {
 public:
  MegatronDataset(MappedFile idx, MappedFile bin, const Index& index, const Extent& extent)
      : idx_(std::move(idx)), bin_(std::move(bin)), index_(index), extent_(extent) {
    if (extent_.contiguous) return;
    starts_.reserve(static_cast<std::size_t>(index_.sequences) + 1);
    for (std::int64_t i = 0; i < index_.sequences; ++i) starts_.push_back(starts_.back() + index_.length(i));
  }

  std::int64_t num_tokens() const override { return extent_.tokens; }
  std::int64_t vocab_size_hint() const override { return index_.type == TokenType::kU8 ? 256 : 0; }

  absl::Status copy(std::int64_t begin, std::span<std::int64_t> out) const override {
    TESSERA_RETURN_IF_ERROR(check_window(begin, out.size(), extent_.tokens, bin_.path().native()));
    while (!out.empty()) {
      const Run run = run_at(begin);
      const auto n = std::min(out.size(), static_cast<std::size_t>(run.tokens));
      widen(index_.type, bin_.bytes().data() + run.offset, out.first(n));
      out = out.subspan(n);
      begin += static_cast<std::int64_t>(n);
    }
    return absl::OkStatus();
  }

  std::string location_of(std::int64_t position) const override {
    return fmt::format("{} at byte {}", bin_.path().string(), run_at(position).offset);
  }

  std::string describe() const override {
    return fmt::format("{}: Megatron, {} tokens of {} in {} sequences, {} documents", bin_.path().string(),
                       extent_.tokens, name_of(index_.type), index_.sequences,
                       std::max<std::int64_t>(0, index_.documents - 1));
  }

 private:
  /// Consecutive tokens of the .bin file, beginning at byte `offset`.
  struct Run {
    std::int64_t offset;
    std::int64_t tokens;
  };

  Run run_at(std::int64_t position) const {
    const std::int64_t width = size_of(index_.type);
    if (extent_.contiguous) return {position * width, extent_.tokens - position};
    const auto next = std::upper_bound(starts_.begin(), starts_.end(), position);
    const std::int64_t sequence = next - starts_.begin() - 1;
    return {index_.pointer(sequence) + (position - *(next - 1)) * width, *next - position};
  }

  MappedFile idx_, bin_;
  Index index_;
  Extent extent_;
  std::vector<std::int64_t> starts_{0};  ///< [sequences + 1]: first token of each sequence; only if not contiguous
};

}  // namespace

absl::StatusOr<std::unique_ptr<TokenDataset>> open_megatron(const std::filesystem::path& prefix) {
  TESSERA_ASSIGN_OR_RETURN(MappedFile idx, MappedFile::open(std::filesystem::path(prefix) += ".idx"));
  TESSERA_ASSIGN_OR_RETURN(MappedFile bin, MappedFile::open(std::filesystem::path(prefix) += ".bin"));
  const auto bin_bytes = static_cast<std::int64_t>(bin.size());
  TESSERA_ASSIGN_OR_RETURN(const Index index, read_header(idx));
  TESSERA_RETURN_IF_ERROR(check_documents(idx, index));
  TESSERA_ASSIGN_OR_RETURN(const Extent extent, check_sequences(idx, index, bin_bytes));
  if (extent.tokens == 0)
    return corrupt_index(idx, kSequencesAt, fmt::format("{} sequences without a single token", index.sequences));
  if (const std::int64_t wanted = extent.tokens * size_of(index.type); extent.contiguous && wanted != bin_bytes)
    return corrupt_index(
        bin, wanted,
        fmt::format("the index tells of {} bytes, the file has {}: they do not belong together", wanted, bin_bytes));
  return std::make_unique<MegatronDataset>(std::move(idx), std::move(bin), index, extent);
}

}  // namespace tessera
