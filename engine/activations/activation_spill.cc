#include "engine/activations/activation_spill.h"

#include <string>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/border/throw.h"

namespace tessera {

std::unique_ptr<Spill> activation_spill(const OffloadConfig& offload, int rank) {
  SpillOptions options;
  options.who = "rank " + std::to_string(rank) + " activations";
  options.directories = offload.paths;
  options.piece_bytes = static_cast<std::size_t>(offload.record_bytes);
  options.queue_depth = static_cast<int>(offload.queue_depth.value_or(kQueueDepth));
  options.verify = offload.verify;
  options.io.any_thread = true;  // any thread may destroy a graph and so call the spill, whose transfers go on
  std::unique_ptr<Spill> spill = value_or_throw(Spill::create(std::move(options)));
  log_info("rank " + std::to_string(rank) + ": activations over " + spill->describe());
  return spill;
}

ActivationCounts with_disk(ActivationCounts counts, const TierCounters& disk) {
  counts.disk_bytes_read = disk.bytes_read;
  counts.disk_bytes_written = disk.bytes_written;
  counts.disk_wait_seconds = disk.wait_seconds;
  return counts;
}

}  // namespace tessera
