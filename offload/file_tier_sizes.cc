#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "offload/file_tier.h"
#include "offload/files/sector.h"
#include "runtime/base/status.h"

// This file computes the space that a FileTier will need, on disk and in memory, before it is created.

namespace tessera {
namespace {

constexpr std::size_t kMostPaths = 64;

absl::Status bad_options(const FileTierOptions& options, const std::string& what) {
  return make_error(ExitCode::kInternal, fmt::format("{}: {}", options.who, what));
}

absl::Status check_options(const FileTierOptions& options) {
  if (options.records < 1 || options.records > std::numeric_limits<std::int32_t>::max())
    return bad_options(options, fmt::format("{} records, want 1 to 2^31 - 1", options.records));
  std::int64_t all_bytes = 0;
  if (options.record_bytes < 1 || options.record_bytes > (std::size_t{1} << 40) ||
      __builtin_mul_overflow(options.records, static_cast<std::int64_t>(whole_sectors(options.record_bytes)),
                             &all_bytes))
    return bad_options(options, fmt::format("{} records of {} bytes: want at least 1 byte, and at most 2^63 - 1 in all",
                                            options.records, options.record_bytes));
  if (!options.sizes.empty() && options.sizes.size() != static_cast<std::size_t>(options.records))
    return bad_options(options, fmt::format("{} sizes of {} records", options.sizes.size(), options.records));
  for (const std::size_t size : options.sizes) {
    if (size < 1 || size > options.record_bytes)
      return bad_options(options, fmt::format("a record of {} bytes, want 1 to {}", size, options.record_bytes));
  }
  if (options.most_held < 1 || options.read_ahead < 0 || options.write_behind < 0)
    return bad_options(options, fmt::format("most_held {}, read_ahead {}, write_behind {}: want at least 1, 0, 0",
                                            options.most_held, options.read_ahead, options.write_behind));
  if (options.most_held > (1 << 20) || options.read_ahead > IoRing::kMostInFlight ||
      options.write_behind > IoRing::kMostInFlight)
    return bad_options(options, fmt::format("most_held {}, read_ahead {}, write_behind {}: want at most 2^20, {}, {}",
                                            options.most_held, options.read_ahead, options.write_behind,
                                            IoRing::kMostInFlight, IoRing::kMostInFlight));
  if (options.resident_first < 0 || options.resident_first > options.records)
    return bad_options(options,
                       fmt::format("resident_first is {}, want 0 to {}", options.resident_first, options.records));
  if (options.paths.size() > kMostPaths)
    return bad_options(options, fmt::format("{} directories, want at most {}", options.paths.size(), kMostPaths));
  for (const StripePath& path : options.paths) {
    if (!std::isfinite(path.weight) || path.weight <= 0)
      return bad_options(
          options, fmt::format("the weight of directory {} is {}, want a number above 0", path.directory, path.weight));
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<double> FileTier::weights_of(const FileTierOptions& options) {
  std::vector<double> weights;
  for (const StripePath& path : options.paths) weights.push_back(path.weight);
  return weights;
}

absl::StatusOr<FileTier::Sizes> FileTier::sizes_of(const FileTierOptions& options) {
  TESSERA_RETURN_IF_ERROR(check_options(options));
  Sizes sizes;
  sizes.stride_bytes = whole_sectors(options.record_bytes);
  sizes.resident = static_cast<std::int64_t>(
      std::min<std::size_t>(options.resident_bytes / options.record_bytes, as_size(options.records)));
  sizes.on_disk = options.records - sizes.resident;
  sizes.file_records.assign(options.paths.size(), 0);
  sizes.file_bytes = sizes.file_records;
  if (sizes.on_disk == 0) return sizes;
  if (options.paths.empty()) return bad_options(options, "no directory for records on disk, want at least one");
  sizes.slots = std::min(as_size(sizes.on_disk),
                         as_size(options.most_held) + as_size(options.read_ahead) + as_size(options.write_behind));
  std::vector<StripePlace> places(as_size(sizes.on_disk));
  place_in_stripes(weights_of(options), places);
  const EvenSpread resident = spread_of(options, sizes.resident);
  for (std::int64_t record = 0; record < options.records; ++record) {
    if (resident.has(record)) continue;
    const auto file = as_size(places[as_size(resident.index(record))].file);
    ++sizes.file_records[file];
    sizes.file_bytes[file] += static_cast<std::int64_t>(whole_sectors(size_of(options, record)));
  }
  for (std::int64_t& bytes : sizes.file_bytes) bytes *= options.durable.empty() ? 1 : 2;
  return sizes;
}

std::size_t FileTier::memory_of(const FileTierOptions& options, const Sizes& sizes) {
  const std::size_t on_disk = as_size(sizes.on_disk), resident = as_size(sizes.resident);
  return AlignedMemory::occupied_bytes(resident * options.record_bytes) +
         Table<std::uint8_t>::occupied_bytes(resident) +
         AlignedMemory::occupied_bytes(sizes.slots * sizes.stride_bytes) + Table<Slot>::occupied_bytes(sizes.slots) +
         Table<std::int32_t>::occupied_bytes(on_disk) + Table<StripePlace>::occupied_bytes(on_disk) +
         Table<std::int64_t>::occupied_bytes(on_disk) + Table<std::uint8_t>::occupied_bytes(on_disk) +
         (has_checksums(options) ? Table<std::uint64_t>::occupied_bytes(on_disk) : 0) +
         (options.durable.empty() ? 0 : TwoPlaces::occupied_bytes(on_disk));
}

absl::StatusOr<std::size_t> FileTier::memory_bytes(const FileTierOptions& options) {
  TESSERA_ASSIGN_OR_RETURN(const Sizes sizes, sizes_of(options));
  return memory_of(options, sizes);
}

absl::StatusOr<std::vector<std::int64_t>> FileTier::file_bytes(const FileTierOptions& options) {
  TESSERA_ASSIGN_OR_RETURN(const Sizes sizes, sizes_of(options));
  return sizes.file_bytes;
}

std::size_t FileTier::allocated_bytes() const {
  return resident_memory_.bytes() + resident_held_.bytes() + slot_memory_.bytes() + slots_.bytes() +
         disk_.slot_of.bytes() + disk_.places.bytes() + disk_.offsets.bytes() + disk_.written.bytes() +
         disk_.checksums.bytes() + disk_.two_places.bytes();
}

}  // namespace tessera
