// Tests that sync_buffers makes buffers equal on all ranks.

#include "tessera/sync_buffers.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/batchnorm.h>

#include "tessera/error.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace {

TEST(SyncBuffers, BuffersBecomeRankZerosOrTheMean) {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
      for (const BufferSync how : {BufferSync::kFromRankZero, BufferSync::kMean}) {
        torch::nn::BatchNorm1d norm(3);
        norm->running_mean.fill_(mesh.rank() + 1.0);
        norm->num_batches_tracked.fill_(mesh.rank() + 5);
        sync_buffers(norm, mesh, how);
        const double wanted = how == BufferSync::kMean ? (ranks + 1) / 2.0 : 1.0;
        EXPECT_TRUE(at::equal(norm->running_mean, at::full({3}, wanted)));
        EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 5);
      }
      torch::nn::BatchNorm1d none(torch::nn::BatchNormOptions(3).track_running_stats(false));
      sync_buffers(none, mesh);
    });
  }
}

TEST(SyncBuffers, DifferingShapesAreAnErrorOnAllRanks) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    torch::nn::BatchNorm1d norm(3 + mesh.rank());
    EXPECT_THROW(sync_buffers(norm, mesh), Error);
  });
}

}  // namespace
}  // namespace tessera::testing
