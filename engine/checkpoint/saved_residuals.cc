#include "engine/checkpoint/saved_residuals.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "runtime/base/status.h"

namespace tessera {
namespace {

using Residual = KeptGradients::Residual;

/// The part of a residual that belongs to one parameter.
struct Part {
  std::string word, name;  ///< `what` and `name` of its Piece: the word for the kind of residual, and the parameter
  Extent elements;         ///< the elements of the parameter that the residual covers
  std::span<float> values;
};

const char* word_of(KeptGradients::What what) {
  switch (what) {
    case KeptGradients::What::kContributions:
      return kResidual;
    case KeptGradients::What::kReplicaContributions:
      return kReplicaResidual;
    case KeptGradients::What::kSums:
      return kSumResidual;
    case KeptGradients::What::kMomentum:
      return kGradientMomentum;
  }
  return kResidual;
}

std::vector<Part> parts_of(const Residual& residual, int rank) {
  const FlatGroup& group = *residual.group;
  const std::string word = of_rank(word_of(residual.what), rank);
  std::vector<Part> parts;
  for (std::size_t i = 0; i < group.layout.size(); ++i) {
    const Extent place = group.layout.extent(i), run = intersect(place, residual.run);
    if (run.numel <= 0) continue;
    float* const values = residual.values + (run.offset - residual.run.offset);
    parts.push_back({word,
                     group.parameters[i].name,
                     {run.offset - place.offset, run.numel},
                     {values, static_cast<std::size_t>(run.numel)}});
  }
  return parts;
}

}  // namespace

void add_residuals(const KeptGradients& kept, int rank, StateWriter& writer) {
  for (const Residual& residual : kept.residuals) {
    for (const Part& part : parts_of(residual, rank))
      writer.add(part.word, part.name, part.elements.offset, part.values);
  }
  if (rank != 0) return;
  for (const KeptGradients::Factors& factors : kept.factors)
    writer.add(kFactors, factors.group->parameters[factors.parameter].name, 0, factors.values);
}

bool ResidualReader::has_own() const {
  const Manifest& manifest = checkpoint_.manifest();
  if (!manifest.residuals || manifest.ranks != ranks_ || *manifest.residuals != wanted_) return false;
  std::int64_t wanted = 0, there = 0;
  for (const Residual& residual : kept_.residuals) {
    for (const Part& part : parts_of(residual, rank_)) {
      wanted += part.elements.numel;
      for (const SavedCheckpoint::Place& place : checkpoint_.pieces(part.word, part.name))
        there += std::max<std::int64_t>(0, intersect({place.piece.offset, place.piece.numel}, part.elements).numel);
    }
  }
  return there == wanted && !has_more();
}

/// Returns whether the checkpoint has sums or momentum of this rank that this run does not keep, because another
/// compression method kept them.
bool ResidualReader::has_more() const {
  using What = KeptGradients::What;
  for (const What what : {What::kSums, What::kMomentum}) {
    const auto is_it = [&](const Residual& residual) { return residual.what == what; };
    if (std::ranges::any_of(kept_.residuals, is_it)) continue;
    for (const SavedParameter& parameter : checkpoint_.manifest().parameters) {
      if (!checkpoint_.pieces(of_rank(word_of(what), rank_), parameter.name).empty()) return true;
    }
  }
  return false;
}

absl::Status ResidualReader::read(bool own) {
  for (const Residual& residual : kept_.residuals)
    TESSERA_RETURN_IF_ERROR(own ? read_own(residual) : read_mean(residual));
  for (const KeptGradients::Factors& factors : kept_.factors) {
    const std::string& name = factors.group->parameters[factors.parameter].name;
    const auto places = checkpoint_.pieces(kFactors, name);
    const bool fits = !places.empty() && places.back().piece.offset + places.back().piece.numel ==
                                             static_cast<std::int64_t>(factors.values.size());
    if (fits) TESSERA_RETURN_IF_ERROR(checkpoint_.read(kFactors, name, 0, std::as_writable_bytes(factors.values)));
  }
  return absl::OkStatus();
}

absl::Status ResidualReader::read_own(const Residual& residual) {
  for (const Part& part : parts_of(residual, rank_))
    TESSERA_RETURN_IF_ERROR(
        checkpoint_.read(part.word, part.name, part.elements.offset, std::as_writable_bytes(part.values)));
  return absl::OkStatus();
}

/// Gives this rank its share of the mean of all saved residuals. A gradient is a mean over ranks and microbatches. For
/// each element, this function adds the saved residuals of all ranks that have a residual for that element. Momentum is
/// added apart from other residuals. A residual of momentum counts as a gradient of 1 / (1 - momentum) times its size.
absl::Status ResidualReader::read_mean(const Residual& residual) {
  const Manifest& manifest = checkpoint_.manifest();
  const double before = static_cast<double>(manifest.ranks * manifest.residuals->microbatches);
  const bool is_momentum = residual.what == KeptGradients::What::kMomentum;
  const auto holders = static_cast<double>(is_momentum ? ranks_ : kept_.holders);
  const double unit = is_momentum ? 1 : (1 - wanted_.momentum) / (1 - manifest.residuals->momentum);
  const auto share = static_cast<float>(unit * static_cast<double>(ranks_ * wanted_.microbatches) / before / holders);
  for (const Part& part : parts_of(residual, rank_)) {
    for (std::int64_t rank = 0; rank < manifest.ranks; ++rank) {
      for (const char* const what : kKeptOfRanks) {
        if ((std::string_view(what) == kGradientMomentum) == is_momentum)
          TESSERA_RETURN_IF_ERROR(add(of_rank(what, rank), part.name, part.elements, part.values.data()));
      }
    }
    for (float& value : part.values) value *= share;
  }
  return absl::OkStatus();
}

/// Adds the checkpoint's values `what` of the parameter `name` to `sums`, which are the sums of `elements`.
absl::Status ResidualReader::add(const std::string& what, const std::string& name, Extent elements, float* sums) {
  constexpr std::int64_t kPortion = std::int64_t{1} << 16;
  for (const SavedCheckpoint::Place& place : checkpoint_.pieces(what, name)) {
    const Extent there = intersect({place.piece.offset, place.piece.numel}, elements);
    for (std::int64_t done = 0; done < there.numel; done += kPortion) {
      const std::int64_t first = there.offset + done, count = std::min(kPortion, there.numel - done);
      TESSERA_ASSIGN_OR_RETURN(const std::span<const std::byte> bytes,
                               checkpoint_.view(what, name, first, static_cast<std::size_t>(count) * sizeof(float)));
      for (std::int64_t i = 0; i < count; ++i) {
        float value = 0;
        std::memcpy(&value, bytes.data() + static_cast<std::size_t>(i) * sizeof value, sizeof value);
        sums[first - elements.offset + i] += value;
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace tessera
