#include "workshop/bench/disk_speed.h"

#include <sys/resource.h>

#include <array>
#include <chrono>
#include <memory>

#include "offload/files/aligned_memory.h"
#include "offload/files/block_file.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

std::int64_t cpu_nanoseconds() {
  rusage use{};
  getrusage(RUSAGE_SELF, &use);
  const auto of = [](const timeval& time) { return (time.tv_sec * 1000000LL + time.tv_usec) * 1000; };
  return of(use.ru_utime) + of(use.ru_stime);
}

/// Makes passes over a file with `in_flight` pieces of memory, each with one request at a time.
class Mover {
 public:
  Mover(IoRing& ring, const BlockFile& file, std::span<std::byte> memory, const DiskSpeedOptions& options)
      : ring_(ring), file_(file), memory_(memory), options_(options) {
    records_ = file.bytes() / static_cast<std::int64_t>(options.record_bytes);
  }

  absl::Status one_way(IoKind kind) {
    for (std::int64_t i = 0; i < records_; ++i) {
      TESSERA_RETURN_IF_ERROR(ring_.wait(slot_of(i)));
      TESSERA_RETURN_IF_ERROR(begin(kind, i));
    }
    return ring_.drain();
  }

  /// Reads records and writes them back: half of the pieces are read while the other half is written.
  absl::Status both_ways() {
    const std::int64_t ahead = options_.in_flight > 1 ? options_.in_flight / 2 : 0;
    for (std::int64_t i = 0; i < records_ + ahead; ++i) {
      if (i < records_) {
        TESSERA_RETURN_IF_ERROR(ring_.wait(slot_of(i)));
        TESSERA_RETURN_IF_ERROR(begin(IoKind::kRead, i));
      }
      if (const std::int64_t back = i - ahead; back >= 0) {
        TESSERA_RETURN_IF_ERROR(ring_.wait(slot_of(back)));
        TESSERA_RETURN_IF_ERROR(begin(IoKind::kWrite, back));
      }
    }
    return ring_.drain();
  }

 private:
  std::uint64_t slot_of(std::int64_t record) const { return static_cast<std::uint64_t>(record % options_.in_flight); }

  absl::Status begin(IoKind kind, std::int64_t record) {
    const auto bytes = options_.record_bytes;
    TESSERA_RETURN_IF_ERROR(ring_.submit({.kind = kind,
                                          .file = &file_,
                                          .offset = record * static_cast<std::int64_t>(bytes),
                                          .memory = memory_.data() + slot_of(record) * bytes,
                                          .bytes = bytes,
                                          .who = "disk speed",
                                          .tag = slot_of(record)}));
    return ring_.start();
  }

  IoRing& ring_;
  const BlockFile& file_;
  const std::span<std::byte> memory_;
  const DiskSpeedOptions options_;
  std::int64_t records_ = 0;
};

template <class Pass>
absl::Status time(DiskPasses& passes, bool counts, const Pass& pass) {
  using Clock = std::chrono::steady_clock;
  const std::int64_t cpu = cpu_nanoseconds();
  const auto start = Clock::now();
  TESSERA_RETURN_IF_ERROR(pass());
  if (!counts) return absl::OkStatus();
  passes.time.ns.push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count());
  passes.cpu.ns.push_back(cpu_nanoseconds() - cpu);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<DiskSpeed> measure_disk(const DiskSpeedOptions& options) {
  const auto record = static_cast<std::int64_t>(options.record_bytes);
  DiskSpeed speed;
  speed.bytes = (options.bytes + record - 1) / record * record;
  TESSERA_ASSIGN_OR_RETURN(
      const std::unique_ptr<BlockFile> file,
      BlockFile::create({.directory = options.directory, .bytes = speed.bytes, .who = "disk speed"}));
  TESSERA_ASSIGN_OR_RETURN(
      const AlignedMemory memory,
      AlignedMemory::make(options.record_bytes * static_cast<std::size_t>(options.in_flight), "disk speed"));
  TESSERA_ASSIGN_OR_RETURN(const std::unique_ptr<IoRing> ring, IoRing::make({.engine = options.engine}));
  const std::array<const BlockFile*, 1> files = {file.get()};
  const std::array<std::span<std::byte>, 1> pieces = {memory.span()};
  ring->register_resources(files, pieces);
  speed.file_mode = file->mode();
  speed.engine = ring->describe();
  Mover mover(*ring, *file, memory.span(), options);
  for (int round = -1; round < options.rounds; ++round) {  // the first round warms up
    const bool counts = round >= 0;
    TESSERA_RETURN_IF_ERROR(time(speed.write, counts, [&] { return mover.one_way(IoKind::kWrite); }));
    TESSERA_RETURN_IF_ERROR(time(speed.read, counts, [&] { return mover.one_way(IoKind::kRead); }));
    TESSERA_RETURN_IF_ERROR(time(speed.mixed, counts, [&] { return mover.both_ways(); }));
  }
  return speed;
}

}  // namespace tessera
