#include "engine/step/agree/step_agreement.h"

#include <c10/util/StringUtil.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "engine/step/agree/gather_order.h"
#include "engine/step/agree/update_options.h"
#include "runtime/base/seeded_fault.h"
#include "runtime/border/throw.h"
#include "runtime/config/strategy_names.h"
#include "tessera/span.h"

namespace tessera {
namespace {

/// Returns the name of a rate or option, for messages. `place`: index in the list of all rates, followed by all
/// options.
std::string words_of(const OptimizerConfig& optimizer, std::size_t place) {
  const std::size_t rates = 1 + optimizer.groups.size();
  if (place >= rates)
    return "set_option: ranks have different options: " + UpdateOptions::words_of(optimizer, place - rates);
  return "set_lr: ranks have different learning rates: that" +
         (place == 0 ? " of everybody" : " of " + name_of_group(optimizer, place - 1));
}

std::string words_of(double number) { return std::isnan(number) ? "not set by hand" : c10::str(number); }

bool is_same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

}  // namespace

std::uint64_t digest_of_numbers(std::span<const double> rates, std::span<const double> options) {
  return XXH3_64bits_withSeed(options.data(), options.size_bytes(), XXH3_64bits(rates.data(), rates.size_bytes()));
}

void write_numbers(const LocalStep& local, const StepMessages& layout, std::byte* message) {
  const StepMessageHeader header{.loss = local.loss,
                                 .weight = local.weight,
                                 .tokens = local.tokens,
                                 .samples = local.samples,
                                 .finite = 1,
                                 .gathers = digest_of_gathers(local.gathered),
                                 .numbers = digest_of_numbers(local.rates, local.options),
                                 .busy_seconds = local.busy_seconds};
  std::memcpy(message, &header, sizeof header);
  if (layout.own_offset > 0) std::memcpy(message + layout.own_offset, &local.own, sizeof local.own);
}

std::byte* write_flags(const FlatGroup& group, const Reducer& reducer, std::byte* flag) {
  for (std::size_t i = 0; i < group.parameters.size(); ++i) *flag++ = std::byte{reducer.used(group, i)};
  return flag;
}

std::vector<int> owners_of_parts(const AxisPlacement& placement, const MeshAxes& axes) {
  std::vector<int> ranks;
  const int replicas = placement.replicate ? axes.replicate_size : 1;
  const int shards = placement.shard ? axes.shard_size : 1;
  const auto add = [&](int r, int s) {
    const int replicate = placement.replicate ? r : axes.replicate_index;
    const int shard = placement.shard ? s : axes.shard_index;
    ranks.push_back(replicate * axes.shard_size + shard);
  };
  if (placement.replicate_first) {
    for (int r = 0; r < replicas; ++r)
      for (int s = 0; s < shards; ++s) add(r, s);
  } else {
    for (int s = 0; s < shards; ++s)
      for (int r = 0; r < replicas; ++r) add(r, s);
  }
  return ranks;
}

StepAgreement::StepAgreement(const StepContext& context, GradientNorm& norm)
    : units_(context.units),
      axes_(context.axes),
      reducer_(context.reducer),
      norm_(norm),
      optimizer_(context.strategy.optimizer),
      ranks_with_parts_(owners_of_parts(context.plan.placement().gradients, axes_)),
      totals_(norm_totals(units_, ranks_with_parts_.size())),
      order_(microbatch_order(context.strategy, axes_.world->size())),
      first_rank_(context.first_rank) {
  std::size_t flags = 0;
  for_each_trainable(units_, [&](const FlatGroup& group) { flags += group.parameters.size(); });
  const std::int64_t losses = context.strategy.reproducible ? order_.most_rounds() : 0;
  layout_.lay_out(flags, static_cast<std::size_t>(losses), context.strategy.noise_scale.every > 0, totals_.most_sums());
  message_.resize(layout_.bytes);
  messages_.resize(message_.size() * static_cast<std::size_t>(axes_.world->size()));
  layout_.of_all = messages_.data();
  for (const int rank : ranks_with_parts_) sums_.push_back(part_of_message<double>(layout_, rank, layout_.sums_offset));
  agreed_.used.resize(flags);
  agreed_.squares.resize(totals_.tensors());
  agreed_.busy_seconds.resize(static_cast<std::size_t>(axes_.world->size()));
}

const AgreedStep& StepAgreement::agree(const LocalStep& local, std::span<const MicrobatchLoss> losses) {
  write_message(local, losses);
  exchange();
  static_cast<AgreedSums&>(agreed_) = {};
  agreed_.finite = true;
  agreed_.own = {};
  const int ranks = axes_.world->size();
  const int heard = seeded_fault(SeededFault::kLastRankUnheard) ? std::max(1, ranks - 1) : ranks;
  read_messages(heard);
  if (!losses.empty()) {
    const auto of = [&](int rank) { return part_of_message<MicrobatchLoss>(layout_, rank, layout_.losses_offset); };
    const MicrobatchLoss sum = sum_of_losses(order_, of, 0, order_.all());
    agreed_.loss = sum.loss / static_cast<double>(order_.all());
    agreed_.weight = sum.weight;
  }
  check_gathers(local.gathered);
  check_numbers(local);
  agreed_.sum_of_squares = totals_.add_up(sums_, agreed_.squares);
  return agreed_;
}

void StepAgreement::write_message(const LocalStep& local, std::span<const MicrobatchLoss> losses) {
  write_numbers(local, layout_, message_.data());
  if (!losses.empty()) std::memcpy(message_.data() + layout_.losses_offset, losses.data(), losses.size_bytes());
  std::int64_t finite = 1;
  std::byte* flag = message_.data() + sizeof(StepMessageHeader);
  std::byte* place = message_.data() + layout_.sums_offset;
  for_each_trainable(units_, [&](const FlatGroup& group) {
    flag = write_flags(group, reducer_, flag);
    const NormSums& norm = norm_.sums_of(group);
    if (!norm.finite()) finite = 0;
    const auto sums = std::as_bytes(norm.sums());
    // A rank may hold no part of a group: then there is nothing to copy, and no address to copy from.
    if (!sums.empty()) std::memcpy(place, sums.data(), sums.size());
    place += sums.size();
  });
  std::memcpy(message_.data() + offsetof(StepMessageHeader, finite), &finite, sizeof finite);
}

void StepAgreement::exchange() {
  const Span span("agree", {}, &exchange_seconds_);
  throw_if_error(axes_.world->all_gather("step", message_.data(), messages_.data(), message_.size()).wait());
}

void StepAgreement::read_messages(int heard) {
  for (int rank = 0; rank < heard; ++rank) {
    add_message(layout_, rank, axes_.world->size(), agreed_, agreed_.own);
    const StepMessageHeader& header = header_of_message(layout_, rank);
    agreed_.busy_seconds[static_cast<std::size_t>(rank)] = header.busy_seconds;
    agreed_.finite = agreed_.finite && header.finite != 0;
  }
  for (std::size_t i = 0; i < agreed_.used.size(); ++i) agreed_.used[i] = is_used_by_any(layout_, heard, i) ? 1 : 0;
}

/// Compares the ranks inside each shard group, since they gather together. Another group may have gathered in another
/// order.
void StepAgreement::check_gathers(std::span<const int> own) const {
  const auto gathers_of = [&](int rank) { return header_of_message(layout_, rank).gathers; };
  for (int rank = 0; rank < axes_.world->size(); ++rank) {
    if (gathers_of(rank) != gathers_of(rank - rank % axes_.shard_size)) throw_first_difference(own, axes_, units_);
  }
}

/// If two ranks differ, every rank differs from some other rank. So all ranks make the second exchange.
void StepAgreement::check_numbers(const LocalStep& own) const {
  const int ranks = axes_.world->size();
  const std::uint64_t digest = digest_of_numbers(own.rates, own.options);
  int other = 0;
  while (other < ranks && header_of_message(layout_, other).numbers == digest) ++other;
  if (other == ranks) return;
  std::vector<double> mine(own.rates.begin(), own.rates.end());
  mine.insert(mine.end(), own.options.begin(), own.options.end());
  std::vector<double> all(mine.size() * static_cast<std::size_t>(ranks));
  throw_if_error(axes_.world->all_gather("set_option", mine.data(), all.data(), mine.size() * sizeof(double)).wait());
  const double* const theirs = all.data() + mine.size() * static_cast<std::size_t>(other);
  std::size_t place = 0;
  while (place + 1 < mine.size() && is_same(mine[place], theirs[place])) ++place;
  throw Error(ExitCode::kUsage,
              c10::str(words_of(optimizer_, place), " is ", words_of(mine[place]), " on rank ",
                       first_rank_ + axes_.world->rank(), ", and ", words_of(theirs[place]), " on rank ",
                       first_rank_ + other, ". [T0294] hint: all ranks call set_lr and set_option alike"));
}

}  // namespace tessera
