#include "optim/norm_launch.h"

#include <algorithm>

namespace tessera {
namespace {

/// Calls `visit(values, numel, level)` for each node of each buffer, in order.
template <class Visit>
void for_each_node(std::span<const NormBuffer> buffers, const Visit& visit) {
  for (const NormBuffer& buffer : buffers) {
    for (const NormRun& run : buffer.runs) {
      std::uint64_t begin = 0;  // offset in the run, in elements
      for_each_norm_node(run, [&](std::uint32_t level, std::uint64_t) {
        const std::uint64_t numel = std::min(kNormBlock << level, run.numel - begin);
        visit(buffer.values + run.begin + begin, numel, level);
        begin += numel;
      });
    }
  }
}

constexpr std::uint64_t kTileNumel = kNormTile * kNormBlock;

std::uint64_t tiles_of(std::uint64_t numel) { return (numel + kTileNumel - 1) / kTileNumel; }

/// Puts nodes into tiles, in order.
class Tiles {
 public:
  explicit Tiles(NormLaunch& launch) : launch_(launch) {}

  void add(const float* values, std::uint64_t numel, double* sum) {
    const auto leaves = static_cast<std::uint32_t>(norm_blocks_of(numel));
    if (leaves_ + leaves > kNormTile) close();
    launch_.nodes.push_back({values, sum, static_cast<std::uint32_t>(numel), leaves_});
    leaves_ += leaves;
  }
  void close() {
    if (leaves_ == 0) return;
    launch_.first_node.push_back(static_cast<std::uint32_t>(launch_.nodes.size()));
    leaves_ = 0;
  }

 private:
  NormLaunch& launch_;
  std::uint32_t leaves_ = 0;
};

}  // namespace

std::size_t norm_scratch_count(std::span<const NormBuffer> buffers) {
  std::size_t count = 0;
  for_each_node(buffers, [&](const float*, std::uint64_t numel, std::uint32_t level) {
    if (level > kNormTileLevel) count += tiles_of(numel);
  });
  return count;
}

NormLaunch norm_launch(std::span<const NormBuffer> buffers, double* sums, double* scratch) {
  NormLaunch launch;
  Tiles tiles(launch);
  for_each_node(buffers, [&](const float* values, std::uint64_t numel, std::uint32_t level) {
    double* const sum = sums++;
    if (level <= kNormTileLevel) return tiles.add(values, numel, sum);
    launch.spans.push_back({scratch, sum, tiles_of(numel)});
    for (std::uint64_t begin = 0; begin < numel; begin += kTileNumel) {
      tiles.add(values + begin, std::min(kTileNumel, numel - begin), scratch++);
    }
  });
  tiles.close();
  return launch;
}

}  // namespace tessera
