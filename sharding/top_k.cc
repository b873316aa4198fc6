#include "sharding/top_k.h"

#include <algorithm>
#include <array>
#include <limits>

#include "runtime/base/status.h"
#include "runtime/border/throw.h"
#include "runtime/comm/sum/pairwise_sum.h"
#include "runtime/comm/sum/top_k.h"

namespace tessera {

TopK::TopK(std::int64_t numel, std::int64_t count, float* kept, float* work)
    : count_(static_cast<std::size_t>(count)), kept_(kept, static_cast<std::size_t>(numel)), own_(work) {
  if (numel > std::numeric_limits<std::uint32_t>::max()) {
    throw Error(ExitCode::kConfig,
                "/compression/top_k: a unit has " + std::to_string(numel) +
                    " elements, and indices are of 32 bits. hint: name smaller modules in \"units\"");
  }
}

absl::Status TopK::sum(Collectives& group, std::string_view label, float* data, std::size_t numel) {
  pairwise_sum(std::array<const void*, 2>{kept_.data(), data}, DType::kF32, kept_.data(), numel);
  auto* const indices = reinterpret_cast<std::uint32_t*>(own_);
  float* const values = own_ + count_;
  select_largest(kept_.data(), numel, count_, indices);
  for (std::size_t i = 0; i < count_; ++i) values[i] = std::exchange(kept_[indices[i]], 0.0f);
  float* const all = own_ + 2 * count_;
  TESSERA_RETURN_IF_ERROR(group.all_gather(label, own_, all, 2 * count_ * sizeof(float)).wait());
  std::fill_n(data, numel, 0.0f);
  for (int q = 0; q < group.size(); ++q) {
    const float* const of_rank = all + static_cast<std::size_t>(q) * 2 * count_;
    const auto* const places = reinterpret_cast<const std::uint32_t*>(of_rank);
    for (std::size_t i = 0; i < count_; ++i) data[places[i]] += of_rank[count_ + i];
  }
  return absl::OkStatus();
}

}  // namespace tessera
