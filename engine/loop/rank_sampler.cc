#include "tessera/rank_sampler.h"

#include <c10/util/StringUtil.h>
#include <torch/serialize/archive.h>

#include <algorithm>

#include "engine/expect.h"
#include "runtime/data/permutation.h"
#include "tessera/seed_for_rank.h"

namespace tessera {

std::uint64_t seed_for_rank(std::uint64_t seed, int rank) { return mix64(seed) + static_cast<std::uint64_t>(rank); }

RankSampler::RankSampler(std::size_t num_samples, const Mesh& mesh, const RankSamplerOptions& options)
    : num_samples_(num_samples),
      rank_(static_cast<std::size_t>(mesh.rank())),
      world_size_(static_cast<std::size_t>(mesh.world_size())),
      options_(options),
      epoch_(options.epoch) {
  expect_enough();
}

void RankSampler::expect_enough() const {
  const std::size_t wanted = options_.tail == Tail::kDrop ? world_size_ : 1;
  expect(num_samples_ >= wanted, "RankSampler wants ", wanted, " samples or more for ", world_size_, " ranks, got ",
         num_samples_);
}

std::size_t RankSampler::size() const {
  const std::size_t whole = num_samples_ / world_size_;
  return options_.tail == Tail::kPad && num_samples_ % world_size_ != 0 ? whole + 1 : whole;
}

void RankSampler::reset(std::optional<std::size_t> new_size) {
  if (new_size) {
    num_samples_ = *new_size;
    expect_enough();
  }
  if (has_begun_) ++epoch_;
  has_begun_ = true;
  taken_ = 0;
}

std::optional<std::vector<std::size_t>> RankSampler::next(std::size_t batch_size) {
  has_begun_ = true;
  const std::size_t count = std::min(batch_size, size() - taken_);
  if (count == 0) return std::nullopt;
  const Permutation order(num_samples_, options_.seed, static_cast<std::uint64_t>(epoch_));
  std::vector<std::size_t> samples(count);
  for (std::size_t& sample : samples) {
    const std::size_t position = (taken_++ * world_size_ + rank_) % num_samples_;
    sample = options_.shuffle ? static_cast<std::size_t>(order(position)) : position;
  }
  return samples;
}

void RankSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("samples", c10::IValue(static_cast<std::int64_t>(num_samples_)));
  archive.write("ranks", c10::IValue(static_cast<std::int64_t>(world_size_)));
  archive.write("epoch", c10::IValue(epoch_));
  archive.write("taken", c10::IValue(static_cast<std::int64_t>(taken_)));
}

void RankSampler::load(torch::serialize::InputArchive& archive) {
  const auto read = [&](const char* key) {
    c10::IValue value;
    archive.read(key, value);
    return value.toInt();
  };
  const std::int64_t samples = read("samples"), ranks = read("ranks");
  expect(samples == static_cast<std::int64_t>(num_samples_) && ranks == static_cast<std::int64_t>(world_size_),
         "RankSampler: the archive is of ", samples, " samples on ", ranks, " ranks, here are ", num_samples_, " on ",
         world_size_);
  epoch_ = read("epoch");
  taken_ = static_cast<std::size_t>(read("taken"));
  has_begun_ = true;
}

}  // namespace tessera
