#include "runtime/engine/step_agreement.h"

#include <cmath>
#include <cstring>

#include "optim/grad_norm.h"
#include "tessera/error.h"

namespace tessera {
namespace {

struct Header {
  double loss = 0.0;
  std::int64_t tokens = 0, samples = 0;
  std::int64_t finite = 1;
};

NormTree tree_of(const FlatGroup& group) { return NormTree(NormTree::blocks_of(group.layout.numel())); }

/// Where things lie in one rank's message: header, flags, then each group's nodes.
struct MessageLayout {
  std::size_t flags = 0;         ///< how many
  std::size_t nodes_offset = 0;
  std::size_t nodes = 0;         ///< how many, over all groups
  std::size_t bytes = 0;

  explicit MessageLayout(const std::vector<std::unique_ptr<Unit>>& units) {
    for_each_trainable(units, [&](const FlatGroup& group) {
      flags += group.parameters.size();
      nodes += tree_of(group).max_nodes();
    });
    nodes_offset = (sizeof(Header) + flags + 7) / 8 * 8;
    bytes = nodes_offset + nodes * sizeof(NormNode);
  }
};

std::vector<std::byte> write_message(const MessageLayout& layout, const LocalStep& local,
                                     const std::vector<std::unique_ptr<Unit>>& units, const Reducer& reducer) {
  std::vector<std::byte> message(layout.bytes);
  Header header{local.loss, local.tokens, local.samples, 1};
  std::byte* flag = message.data() + sizeof(Header);
  std::byte* nodes = message.data() + layout.nodes_offset;
  std::vector<NormNode> found;
  for_each_trainable(units, [&](const FlatGroup& group) {
    for (std::size_t i = 0; i < group.parameters.size(); ++i) *flag++ = std::byte{reducer.used(group, i)};
    const NormTree tree = tree_of(group);
    const Extent part = group.gradient_part;
    bool finite = true;
    found.clear();
    tree.partial({group.gradient, static_cast<std::size_t>(part.numel)},
                 static_cast<std::uint64_t>(part.offset) / NormTree::kBlockNumel, found, finite);
    if (!finite) header.finite = 0;
    found.resize(tree.max_nodes());  // the rest are absent nodes
    std::memcpy(nodes, found.data(), found.size() * sizeof(NormNode));
    nodes += found.size() * sizeof(NormNode);
  });
  std::memcpy(message.data(), &header, sizeof header);
  return message;
}

/// The ranks whose gradient parts make up the whole, each part once.
std::vector<int> ranks_with_parts(const MemoryPlan& plan, const MeshAxes& axes) {
  const AxisPlacement placement = plan.input().placement.gradients;
  std::vector<int> ranks;
  const int replicas = placement.replicate ? axes.replicate_size : 1;
  const int shards = placement.shard ? axes.shard_size : 1;
  for (int r = 0; r < replicas; ++r) {
    for (int s = 0; s < shards; ++s) {
      const int replicate = placement.replicate ? r : axes.replicate_index;
      const int shard = placement.shard ? s : axes.shard_index;
      ranks.push_back(replicate * axes.shard_size + shard);
    }
  }
  return ranks;
}

}  // namespace

AgreedStep agree_on_step(const LocalStep& local, const std::vector<std::unique_ptr<Unit>>& units,
                         const Reducer& reducer, const MemoryPlan& plan, const MeshAxes& axes) {
  const MessageLayout layout(units);
  const std::vector<std::byte> mine = write_message(layout, local, units, reducer);
  const int world_size = axes.world->size();
  std::vector<std::byte> all(layout.bytes * world_size);
  throw_if_error(axes.world->all_gather("step", mine.data(), all.data(), layout.bytes).wait());

  AgreedStep agreed;
  agreed.used.assign(layout.flags, 0);
  for (int rank = 0; rank < world_size; ++rank) {
    const std::byte* message = all.data() + rank * layout.bytes;
    Header header;
    std::memcpy(&header, message, sizeof header);
    agreed.loss += header.loss / world_size;
    agreed.tokens += header.tokens;
    agreed.samples += header.samples;
    agreed.finite = agreed.finite && header.finite != 0;
    for (std::size_t i = 0; i < layout.flags; ++i) agreed.used[i] |= static_cast<char>(message[sizeof(Header) + i]);
  }
  for (char used : agreed.used) agreed.all_used = agreed.all_used && used;

  std::size_t offset = layout.nodes_offset;
  const std::vector<int> ranks = ranks_with_parts(plan, axes);
  std::vector<NormNode> nodes;
  for_each_trainable(units, [&](const FlatGroup& group) {
    const NormTree tree = tree_of(group);
    const std::size_t count = tree.max_nodes();
    nodes.resize(count * ranks.size());
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      std::memcpy(&nodes[i * count], all.data() + ranks[i] * layout.bytes + offset, count * sizeof(NormNode));
    }
    agreed.sum_of_squares += value_or_throw(tree.combine(nodes));
    offset += count * sizeof(NormNode);
  });
  return agreed;
}

}  // namespace tessera
