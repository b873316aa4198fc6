#include "offload/host_tier.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "offload/files/sector.h"
#include "runtime/base/bytes.h"
#include "runtime/base/status.h"

namespace tessera {

namespace {

constexpr std::size_t kCacheLine = 64;

std::size_t whole_lines(std::size_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

}  // namespace

std::size_t HostTier::all_bytes(const HostTierOptions& options) {
  if (options.sizes.empty()) return static_cast<std::size_t>(options.records) * options.record_bytes;
  std::size_t bytes = 0;
  for (const std::size_t size : options.sizes) bytes += whole_lines(size);
  return bytes;
}

std::size_t HostTier::memory_bytes(const HostTierOptions& options) {
  const auto records = static_cast<std::size_t>(options.records);
  const std::size_t own = options.memory.empty() ? AlignedMemory::occupied_bytes(all_bytes(options)) : 0;
  return own + AlignedMemory::occupied_bytes(records) +
         Table<std::uint64_t>::occupied_bytes(options.sizes.empty() ? 0 : records);
}

absl::StatusOr<std::unique_ptr<HostTier>> HostTier::create(const HostTierOptions& options) {
  std::size_t wanted = 0;
  if (options.records < 1 || options.record_bytes < 1 ||
      __builtin_mul_overflow(static_cast<std::size_t>(options.records), options.record_bytes, &wanted))
    return make_error(ExitCode::kInternal,
                      fmt::format("{}: {} records of {} bytes: want at least 1 of 1, and a product that "
                                  "fits into 64 bits",
                                  options.who, options.records, options.record_bytes));
  if (!options.sizes.empty() && options.sizes.size() != static_cast<std::size_t>(options.records))
    return make_error(ExitCode::kInternal,
                      fmt::format("{}: {} sizes of {} records", options.who, options.sizes.size(), options.records));
  for (const std::size_t size : options.sizes) {
    if (size < 1 || size > options.record_bytes)
      return make_error(ExitCode::kInternal,
                        fmt::format("{}: a record of {} bytes, want 1 to {}", options.who, size, options.record_bytes));
  }
  wanted = all_bytes(options);
  if (!options.memory.empty() &&
      (options.memory.size() < wanted || reinterpret_cast<std::uintptr_t>(options.memory.data()) % 64 != 0))
    return make_error(ExitCode::kInternal,
                      fmt::format("{}: memory for records: want {} bytes at a multiple of 64, got {}", options.who,
                                  wanted, options.memory.size()));
  std::unique_ptr<HostTier> tier(new HostTier(options));
  TESSERA_ASSIGN_OR_RETURN(tier->held_, AlignedMemory::make(static_cast<std::size_t>(options.records), options.who));
  if (!options.sizes.empty()) {
    TESSERA_ASSIGN_OR_RETURN(tier->begins_, Table<std::uint64_t>::make(options.sizes.size(), options.who));
    std::uint64_t begin = 0;
    for (std::size_t i = 0; i < options.sizes.size(); ++i) {
      tier->begins_[i] = begin;
      begin += whole_lines(options.sizes[i]);
    }
  }
  if (options.memory.empty()) {
    TESSERA_ASSIGN_OR_RETURN(tier->memory_, AlignedMemory::make(wanted, options.who, options.give));
    tier->records_ = tier->memory_.span();
  } else {
    tier->records_ = options.memory;
    std::memset(options.memory.data(), 0, wanted);
  }
  return tier;
}

absl::Status HostTier::fail(std::string what) {
  failure_ = make_error(ExitCode::kInternal, fmt::format("{}: {}", options_.who, what));
  return failure_;
}

absl::StatusOr<std::span<std::byte>> HostTier::get(std::int64_t record) {
  TESSERA_RETURN_IF_ERROR(failure_);
  if (record < 0 || record >= options_.records)
    return fail(fmt::format("get of record {}, want 0 to {}", record, options_.records - 1));
  held_.data()[record] = std::byte{1};
  ++counters_.gets;
  ++counters_.hits;
  return memory_of(record);
}

std::span<std::byte> HostTier::memory_of(std::int64_t record) const {
  const auto index = static_cast<std::size_t>(record);
  if (options_.sizes.empty()) return records_.subspan(index * options_.record_bytes, options_.record_bytes);
  return records_.subspan(begins_[index], options_.sizes[index]);
}

absl::Status HostTier::put(std::int64_t record) {
  TESSERA_RETURN_IF_ERROR(failure_);
  if (record < 0 || record >= options_.records || held_.data()[record] == std::byte{0})
    return fail(fmt::format("put or release of record {}, which is not held", record));
  held_.data()[record] = std::byte{0};
  return absl::OkStatus();
}

absl::Status HostTier::start_copy(std::int64_t record, std::span<std::byte> memory, std::uint64_t) {
  TESSERA_RETURN_IF_ERROR(failure_);
  const bool is_known = record >= 0 && record < options_.records;
  const std::span<const std::byte> from = is_known ? memory_of(record) : std::span<std::byte>();
  if (!is_known || memory.size() != whole_sectors(from.size()) || held_.data()[record] != std::byte{0})
    return fail(fmt::format("copy of record {} to {} bytes, want one of 0 to {} that is not held, and {} bytes", record,
                            memory.size(), options_.records - 1, whole_sectors(from.size())));
  ++counters_.gets;
  ++counters_.hits;
  std::memcpy(memory.data(), from.data(), from.size());
  std::ranges::fill(memory.subspan(from.size()), std::byte{0});
  return absl::OkStatus();
}

std::size_t HostTier::allocated_bytes() const { return memory_.bytes() + held_.bytes() + begins_.bytes(); }

std::string HostTier::describe() const {
  return fmt::format("{} records of {} in {}memory", options_.records,
                     format_bytes(static_cast<std::int64_t>(options_.record_bytes)),
                     options_.give == nullptr ? "" : "pinned ");
}

}  // namespace tessera
