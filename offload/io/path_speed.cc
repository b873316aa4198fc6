#include "offload/io/path_speed.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>

#include "offload/files/aligned_memory.h"
#include "offload/files/block_file.h"
#include "offload/io/io_ring.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr double kEqual = 0.85, kSteps = 8;

/// Returns the seconds that reading or writing all records of a file takes.
absl::StatusOr<double> move_all(IoRing& ring, const BlockFile& file, std::span<std::byte> memory, IoKind kind,
                                const PathSpeedOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  for (int record = 0; record < options.records; ++record) {
    const std::size_t begin = static_cast<std::size_t>(record) * options.record_bytes;
    TESSERA_RETURN_IF_ERROR(ring.submit({.kind = kind,
                                         .file = &file,
                                         .offset = static_cast<std::int64_t>(begin),
                                         .memory = memory.data() + begin,
                                         .bytes = options.record_bytes,
                                         .who = options.who,
                                         .tag = static_cast<std::uint64_t>(record)}));
  }
  TESSERA_RETURN_IF_ERROR(ring.start());
  TESSERA_RETURN_IF_ERROR(ring.drain());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

absl::StatusOr<double> seconds_of(const std::string& directory, std::span<std::byte> memory,
                                  const PathSpeedOptions& options) {
  TESSERA_ASSIGN_OR_RETURN(
      const std::unique_ptr<BlockFile> file,
      BlockFile::create(
          {.directory = directory, .bytes = static_cast<std::int64_t>(memory.size()), .who = options.who}));
  TESSERA_ASSIGN_OR_RETURN(const std::unique_ptr<IoRing> ring, IoRing::make({}));
  TESSERA_ASSIGN_OR_RETURN(const double written, move_all(*ring, *file, memory, IoKind::kWrite, options));
  TESSERA_ASSIGN_OR_RETURN(const double read, move_all(*ring, *file, memory, IoKind::kRead, options));
  return written + read;
}

}  // namespace

absl::StatusOr<std::vector<double>> path_weights(std::span<const std::string> directories,
                                                 const PathSpeedOptions& options) {
  std::vector<double> weights(directories.size(), 1.0);
  if (directories.size() < 2) return weights;
  TESSERA_ASSIGN_OR_RETURN(
      const AlignedMemory memory,
      AlignedMemory::make(options.record_bytes * static_cast<std::size_t>(options.records), options.who));
  std::vector<double> seconds;
  for (const std::string& directory : directories) {
    TESSERA_ASSIGN_OR_RETURN(seconds.emplace_back(), seconds_of(directory, memory.span(), options));
  }
  const double least = *std::ranges::min_element(seconds);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const double share = least / seconds[i];
    if (share < kEqual) weights[i] = std::max(1.0, std::round(share * kSteps)) / kSteps;
  }
  return weights;
}

}  // namespace tessera
