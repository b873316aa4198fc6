// A forward of a recorded norm fills a change (RecordedNorm) in place of the module's buffers. The change of each
// microbatch that counts is kept until the step ends. Then each rank writes its changes into one message, one
// all-gather brings the messages of all ranks, and every rank applies all changes to the buffers in the order of the
// microbatches.

#include "engine/training/microbatch_statistics.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "runtime/border/expect.h"
#include "runtime/border/throw.h"
#include "tessera/error.h"
#include "tessera/span.h"

namespace tessera {
namespace {

/// How many numbers precede a norm's channels in a message: two, NormChange::keep and NormChange::forwards.
constexpr std::size_t kNormHead = 2;

/// Returns the module's own buffer of this name, or an undefined tensor if there is none.
at::Tensor buffer_of(const torch::nn::Module& module, const char* name) {
  const auto buffers = module.named_buffers(/*recurse=*/false);
  const at::Tensor* const found = buffers.find(name);
  return found ? *found : at::Tensor();
}

bool keeps_statistics(const torch::nn::Module& module) { return buffer_of(module, "running_mean").defined(); }

std::size_t numel_of_norm(const at::Tensor& mean) { return kNormHead + 2 * static_cast<std::size_t>(mean.numel()); }

/// Calls `visit(name, module, is_cumulative)` for each batch norm with running statistics, once for each.
template <class Visit>
void for_each_norm(const torch::nn::Module& module, const Visit& visit) {
  std::vector<const torch::nn::Module*> seen;
  for (const auto& part : module.named_modules()) {
    const torch::nn::Module* const norm = part.value().get();
    const std::optional<bool> is_cumulative = batch_norm_is_cumulative(*norm);
    if (!is_cumulative || !keeps_statistics(*norm) || std::ranges::find(seen, norm) != seen.end()) continue;
    seen.push_back(norm);
    visit(part.key(), *norm, *is_cumulative);
  }
}

/// Copies the values of two tensors of one shape to fp64 numbers on the CPU, one after the other.
void copy_values(const at::Tensor& mean, const at::Tensor& variance, double* to) {
  for (const at::Tensor& values : {mean, variance}) {
    const at::Tensor wide = values.detach().to(at::kCPU, at::kDouble).contiguous();
    std::memcpy(to, wide.const_data_ptr(), wide.nbytes());
    to += wide.numel();
  }
}

template <class... Text>
[[noreturn]] void refuse_module(const Text&... text) {
  throw Error(ExitCode::kConfig, c10::str("/reproducible: module ", text...));
}

}  // namespace

void expect_running_statistics(const Strategy& strategy, const torch::nn::Module& module) {
  if (!strategy.reproducible) return;
  const bool keeps = strategy.broadcast_buffers == BufferBroadcast::kMicrobatchOrder;
  for (const auto& part : module.named_modules()) {
    if (!part.value()->is_training()) continue;
    if (is_norm_of_ranks(*part.value()))
      refuse_module(
          part.key(),
          " is a SyncBatchNorm, which normalises over the microbatches that ranks compute at one time, so what it "
          "computes depends on the number of ranks. [T1155] hint: take BatchNorm, with \"broadcast_buffers\": "
          "\"microbatch_order\"");
    if (!keeps_statistics(*part.value())) continue;
    if (!keeps)
      refuse_module(
          part.key(),
          " keeps running statistics, which each rank moves by the microbatches that it has, one after the other. "
          "[T0813] hint: set \"broadcast_buffers\": \"microbatch_order\", which moves those of a BatchNorm in the "
          "order of microbatches; or make it with track_running_stats(false), or take a LayerNorm or GroupNorm; in "
          "C++ eval() before the Engine is made will do, too");
    if (!batch_norm_is_cumulative(*part.value()))
      refuse_module(
          part.key(), ", a ", part.value()->name(),
          ", keeps running statistics, and broadcast_buffers microbatch_order knows those of a BatchNorm alone. "
          "[T1156] hint: make it with track_running_stats(false), or take a BatchNorm");
  }
}

std::int64_t MicrobatchStatistics::numel_of(const torch::nn::Module& module, const Strategy& strategy) {
  std::size_t numel = 0;
  if (strategy.broadcast_buffers != BufferBroadcast::kMicrobatchOrder) return 0;
  for_each_norm(module, [&](const std::string&, const torch::nn::Module& norm, bool) {
    numel += numel_of_norm(buffer_of(norm, "running_mean"));
  });
  return static_cast<std::int64_t>(numel);
}

MicrobatchStatistics::MicrobatchStatistics(const torch::nn::Module& module, const MicrobatchOrder& order,
                                           std::shared_ptr<Collectives> group)
    : group_(std::move(group)), changes_(static_cast<std::size_t>(order.most_rounds())) {
  for_each_norm(module, [&](const std::string& name, const torch::nn::Module& norm, bool is_cumulative) {
    record(norm, name, is_cumulative);
  });
  own_.resize(changes_.size() * row_);
  if (group_->size() > 1) all_.resize(own_.size() * static_cast<std::size_t>(group_->size()));
  drop_step();
  follow();
}

void MicrobatchStatistics::record(const torch::nn::Module& module, const std::string& name, bool is_cumulative) {
  auto norm = std::make_shared<RecordedNorm>();
  norm->name = name;
  norm->mean = buffer_of(module, "running_mean");
  norm->variance = buffer_of(module, "running_var");
  norm->batches = buffer_of(module, "num_batches_tracked");
  norm->is_cumulative = is_cumulative && norm->batches.defined();
  record_norm(norm);
  row_ += numel_of_norm(norm->mean);
  norms_.push_back({&module, std::move(norm), {}, 0});
}

void MicrobatchStatistics::follow() {
  const at::NoGradGuard no_grad;
  for (Kept& kept : norms_) {
    if (kept.norm->mean.is_cpu()) kept.known_mean = kept.norm->mean.detach().clone();
  }
}

void MicrobatchStatistics::begin_backward() {
  for (Kept& kept : norms_) kept.norm->is_in_backward = true;
}

void MicrobatchStatistics::end_backward() {
  for (Kept& kept : norms_) kept.norm->is_in_backward = false;
}

/// Throws if microbatches write the running mean without a recorded forward.
void MicrobatchStatistics::look_for_writes(Kept& kept) const {
  const at::Tensor &known = kept.known_mean, &mean = kept.norm->mean;
  const bool is_unseen = kept.norm->change.forwards == 0 && known.defined() && mean.is_contiguous() &&
                         std::memcmp(known.const_data_ptr(), mean.const_data_ptr(), known.nbytes()) != 0;
  kept.unseen = is_unseen ? kept.unseen + 1 : 0;
  if (!is_unseen) return;
  expect(kept.unseen == 1,
         "broadcast_buffers microbatch_order: each microbatch writes the running statistics of module ",
         kept.norm->name,
         ", and not by the operator aten::batch_norm, so nobody knows its part of them. [T1157] hint: leave "
         "torch.compile out for this module, and write the statistics between steps alone");
  kept.known_mean.copy_(mean);
}

void MicrobatchStatistics::end_microbatch(std::int64_t round) {
  const at::NoGradGuard no_grad;
  std::vector<NormChange>& changes = changes_[static_cast<std::size_t>(round)];
  for (std::size_t i = 0; i < norms_.size(); ++i) {
    look_for_writes(norms_[i]);
    changes[i] = std::exchange(norms_[i].norm->change, {});
  }
}

void MicrobatchStatistics::drop_microbatch() {
  for (Kept& kept : norms_) kept.norm->change = {};
}

void MicrobatchStatistics::drop_step() {
  const at::NoGradGuard no_grad;
  for (std::vector<NormChange>& changes : changes_) changes.assign(norms_.size(), {});
  for (Kept& kept : norms_) {
    // A program may call zero_grad between a forward and its backward, and that microbatch counts.
    if (kept.norm->change.forwards > 0) continue;
    const at::Tensor before = std::exchange(kept.norm->batches_before, {});
    if (before.defined()) kept.norm->batches.copy_(before);
  }
}

void MicrobatchStatistics::expect_same_buffers() const {
  for (const auto& [module, norm, known, unseen] : norms_) {
    const bool is_same = buffer_of(*module, "running_mean").is_same(norm->mean) &&
                         buffer_of(*module, "running_var").is_same(norm->variance);
    expect(is_same, "broadcast_buffers microbatch_order: module ", norm->name,
           " has got other tensors as running statistics since the Engine was made. [T1158] hint: copy values into "
           "those that it had (in Python load_state_dict without assign), or make another Engine");
  }
}

void MicrobatchStatistics::write_rows() {
  double* to = own_.data();
  for (const std::vector<NormChange>& changes : changes_) {
    for (std::size_t i = 0; i < norms_.size(); ++i) {
      const NormChange& change = changes[i];
      to[0] = change.keep;
      to[1] = static_cast<double>(change.forwards);
      if (change.forwards > 0) copy_values(change.mean, change.variance, to + kNormHead);
      to += numel_of_norm(norms_[i].norm->mean);
    }
  }
}

const std::vector<double>& MicrobatchStatistics::exchange() {
  if (group_->size() == 1) return own_;
  const Span span("running statistics", {}, &seconds_);
  const std::size_t bytes = own_.size() * sizeof(double);
  throw_if_error(group_->all_gather("running statistics", own_.data(), all_.data(), bytes).wait());
  return all_;
}

void MicrobatchStatistics::apply(const MicrobatchOrder& order) {
  const at::NoGradGuard no_grad;
  expect_same_buffers();
  write_rows();
  const std::vector<double>& all = exchange();
  std::vector<const double*> changes;  // [microbatch]: the changes of one norm
  for (std::int64_t index = 0; index < order.all(); ++index) {
    const auto round = static_cast<std::size_t>(order.round_of(index));
    const auto place = static_cast<std::size_t>(order.rank_of(index)) * changes_.size() + round;
    changes.push_back(all.data() + place * row_);
  }
  for (Kept& kept : norms_) {
    apply_to(*kept.norm, changes);
    for (const double*& change : changes) change += numel_of_norm(kept.norm->mean);
  }
  drop_microbatch();
  drop_step();
  follow();
}

/// Applies the changes of all microbatches to a norm, in the order of the microbatches.
void MicrobatchStatistics::apply_to(RecordedNorm& norm, const std::vector<const double*>& changes) const {
  const std::int64_t channels = norm.mean.numel();
  std::vector<double> values(2 * static_cast<std::size_t>(channels));
  copy_values(norm.mean, norm.variance, values.data());
  const at::Tensor before = std::exchange(norm.batches_before, {});
  const at::Tensor& counted = before.defined() ? before : norm.batches;
  double batches = counted.defined() ? counted.item<double>() : 0.0;
  for (const double* change : changes) {
    const double forwards = change[1];
    if (forwards == 0) continue;
    batches += forwards;
    const double share = norm.is_cumulative ? forwards / batches : 1.0;
    const double keep = norm.is_cumulative ? 1.0 - share : change[0];
    const double* const added = change + kNormHead;
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = keep * values[i] + share * added[i];
  }
  const at::Tensor all = at::from_blob(values.data(), {2, channels}, at::kDouble);
  norm.mean.copy_(all[0].view(norm.mean.sizes()));
  norm.variance.copy_(all[1].view(norm.variance.sizes()));
  if (norm.batches.defined()) norm.batches.fill_(static_cast<std::int64_t>(batches));
}

}  // namespace tessera
