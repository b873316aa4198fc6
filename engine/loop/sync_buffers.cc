#include "tessera/sync_buffers.h"

#include "tessera/collectives.h"

namespace tessera {

void sync_buffers(torch::nn::Module& module, const Mesh& mesh, BufferSync how) {
  for (const auto& item : module.named_buffers()) {
    const at::Tensor& buffer = item.value();
    if (!buffer.defined()) continue;
    if (how == BufferSync::kMean && buffer.is_floating_point()) {
      all_reduce(mesh, buffer, Reduce::kMean);
    } else {
      broadcast(mesh, buffer);
    }
  }
}

}  // namespace tessera
