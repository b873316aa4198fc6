#include "tessera/sync_buffers.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "engine/loop/same_call.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "tessera/collectives.h"

namespace tessera {
namespace {

/// The largest number of bytes of buffers that are sent as one tensor; a larger buffer is sent alone.
constexpr std::size_t kBytesTogether = std::size_t{4} << 20;

std::vector<at::Tensor> defined_buffers(const torch::nn::Module& module) {
  std::vector<at::Tensor> buffers;
  for (const at::Tensor& buffer : module.buffers()) {
    if (buffer.defined() && buffer.numel() > 0) buffers.push_back(buffer);
  }
  return buffers;
}

void expect_same_buffers(const std::vector<at::Tensor>& buffers, const Mesh& mesh) {
  std::string words;
  for (const at::Tensor& buffer : buffers) words += c10::str(" ", buffer.scalar_type(), buffer.sizes());
  // expect_same_call cuts long texts, so the text may name only some of the buffers; the digest covers all buffers.
  expect_same_call(
      *value_or_throw(groups_of(mesh).user_group()),
      c10::str("sync_buffers of ", buffers.size(), " buffers, digest ", std::hash<std::string>{}(words), ":", words));
}

/// Cuts the list into runs of neighbours with one dtype and device, of at most kBytesTogether (or of one larger
/// buffer). Each run is sent as one tensor.
std::vector<std::vector<at::Tensor>> cut_into_loads(const std::vector<at::Tensor>& buffers) {
  std::vector<std::vector<at::Tensor>> loads;
  std::size_t bytes = 0;
  for (const at::Tensor& buffer : buffers) {
    const bool fits = !loads.empty() && loads.back()[0].scalar_type() == buffer.scalar_type() &&
                      loads.back()[0].device() == buffer.device() && bytes + buffer.nbytes() <= kBytesTogether;
    if (!fits) loads.emplace_back(), bytes = 0;
    loads.back().push_back(buffer);
    bytes += buffer.nbytes();
  }
  return loads;
}

at::Tensor load_of(const std::vector<at::Tensor>& buffers) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& buffer : buffers) flat.push_back(buffer.reshape({-1}));
  return at::cat(flat);
}

void unload(const at::Tensor& load, const std::vector<at::Tensor>& buffers) {
  std::int64_t at = 0;
  for (const at::Tensor& buffer : buffers) {
    buffer.copy_(load.narrow(0, at, buffer.numel()).view(buffer.sizes()));
    at += buffer.numel();
  }
}

}  // namespace

void sync_buffers(torch::nn::Module& module, const Mesh& mesh, BufferSync how) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> buffers = defined_buffers(module);
  expect_same_buffers(buffers, mesh);
  // Counters, which are integers, lie between statistics. Sorting by dtype separates them, so that the statistics form
  // long runs.
  std::stable_sort(buffers.begin(), buffers.end(),
                   [](const at::Tensor& a, const at::Tensor& b) { return a.scalar_type() < b.scalar_type(); });
  for (const std::vector<at::Tensor>& together : cut_into_loads(buffers)) {
    const at::Tensor load = load_of(together);
    const bool averages = how == BufferSync::kMean && load.is_floating_point();
    averages ? all_reduce(mesh, load, Reduce::kMean) : broadcast(mesh, load);
    unload(load, together);
  }
}

}  // namespace tessera
