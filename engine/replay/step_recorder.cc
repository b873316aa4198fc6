#include "engine/replay/step_recorder.h"

#include <ATen/Parallel.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <span>
#include <utility>

#include "engine/replay/unit_hashes.h"
#include "runtime/base/log.h"
#include "runtime/border/throw.h"

namespace tessera {
namespace {

bool is_same(double a, double b) {
  return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b) || (std::isnan(a) && std::isnan(b));
}

/// Returns the number as it would be after writing and reading a record: JSON cannot express NaN and infinity, which
/// are read as NaN.
double as_read(double number) { return std::isfinite(number) ? number : std::nan(""); }

/// Returns the names of units of `made` that `wanted` lacks or has with another hash. If there are no such units, but
/// `wanted` has more units than `made`, the result is one remark.
std::vector<std::string> different_units(const StepRecord& made, const StepRecord& wanted) {
  std::vector<std::string> names;
  for (const auto& unit : made.units) {
    if (std::ranges::find(wanted.units, unit) == wanted.units.end()) names.push_back(unit.first);
  }
  if (names.empty() && made.units.size() != wanted.units.size()) names.emplace_back("(units are others)");
  return names;
}

std::string words_of(const NonfiniteResult& result) {
  if (result.op.empty()) return "no operator that LibTorch shows made it";
  std::string text = "the first result that is not finite is that of " + result.op + " (" + result.where + ")";
  if (!result.unit.empty()) text += (result.reads_parameters ? ", which reads unit " : ", after unit ") + result.unit;
  return text + (result.had_bad_input ? "; an input of it was not finite already" : "; its inputs are finite");
}

}  // namespace

std::unique_ptr<StepRecorder> StepRecorder::make(const Strategy& strategy,
                                                 const std::vector<std::unique_ptr<Unit>>& units, Collectives& world,
                                                 OwnersOfParts owners) {
  std::optional<ReplayRequest> replay = ReplayRequest::from_environment();
  if (strategy.record_hashes.every == 0 && !replay) return nullptr;
  return std::unique_ptr<StepRecorder>(new StepRecorder(strategy, units, world, std::move(owners), std::move(replay)));
}

StepRecorder::StepRecorder(const Strategy& strategy, const std::vector<std::unique_ptr<Unit>>& units,
                           Collectives& world, OwnersOfParts owners, std::optional<ReplayRequest> replay)
    : units_(units),
      world_(world),
      owners_(std::move(owners)),
      order_(microbatch_order(strategy, world.size())),
      every_(strategy.record_hashes.every),
      replay_(std::move(replay)),
      own_(2 * units.size()),
      all_(own_.size() * static_cast<std::size_t>(world.size())) {
  if (!replay_) {
    if (world.rank() == 0) file_.emplace(value_or_throw(StepRecordsFile::open(strategy.record_hashes.file)));
    return;
  }
  if (!replay_->hashes.empty()) recorded_ = value_or_throw(read_step_records(replay_->hashes, "TESSERA_REPLAY"));
  if (replay_->find == ReplayRequest::Find::kNonfinite) watch_.emplace();
}

bool StepRecorder::is_due(std::int64_t step) const { return replay_ ? step <= replay_->step : step % every_ == 0; }

void StepRecorder::end_backward(const at::Tensor& loss, std::int64_t round) {
  if (!watch_) return;
  std::optional<NonfiniteResult> result = watch_->end_backward(loss);
  if (result && !found_) found_ = Found{order_.index(world_.rank(), round), *std::move(result)};
}

void StepRecorder::pass_over_backward() {
  if (watch_) watch_->pass_over_backward();
}

void StepRecorder::begin_update(std::int64_t step) {
  const std::optional<Found> found = std::exchange(found_, std::nullopt);
  if (!is_due(step)) return;
  if (watch_) name_first(found, step);
  std::ranges::fill(own_, 0);
  add_gradient_hashes(units_, std::span(own_).first(units_.size()));
}

/// Several ranks may have found a bad microbatch. The rank with the first bad microbatch of the step throws an error;
/// the other ranks return.
void StepRecorder::name_first(const std::optional<Found>& found, std::int64_t step) {
  const std::int64_t own = found ? found->microbatch : order_.all();
  std::vector<std::int64_t> all(static_cast<std::size_t>(world_.size()));
  throw_if_error(world_.all_gather("microbatches that go wrong", &own, all.data(), sizeof own).wait());
  if (!found || own != std::ranges::min(all)) return;
  throw Error(ExitCode::kCorruptData,
              c10::str("replay: in step ", step, ", microbatch ", own, " (of 0 to ", order_.all() - 1,
                       ") is the first that goes wrong: ", words_of(found->result),
                       ". [T0889] hint: look at what this microbatch holds, and at what this operator is given"));
}

StepRecord StepRecorder::record_of(const StepResult& result) {
  const std::size_t count = units_.size();
  add_master_hashes(units_, std::span(own_).subspan(count));
  throw_if_error(world_.all_gather("hashes", own_.data(), all_.data(), own_.size() * sizeof own_[0]).wait());
  StepRecord record{.step = result.step,
                    .microbatches = order_.all(),
                    .threads = at::get_num_threads(),
                    .loss = result.loss,
                    .grad_norm = result.grad_norm,
                    .units = {}};
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t hash = 0;
    const auto of = [&](int rank) { return all_.data() + static_cast<std::size_t>(rank) * own_.size() + i; };
    for (const int rank : owners_.gradients) hash += of(rank)[0];
    for (const int rank : owners_.masters) hash += of(rank)[count];
    record.units.emplace_back(units_[i]->name, hash);
  }
  return record;
}

void StepRecorder::end_step(const StepResult& result) {
  if (!is_due(result.step)) return;
  const StepRecord record = record_of(result);
  if (replay_) return replay(record);
  if (!file_) return;
  const absl::Status status = file_->write(record);
  if (status.ok()) return;
  log_warning(message_of(status) + "; training goes on without hashes from here");
  file_.reset();
}

const StepRecord* StepRecorder::recorded(std::int64_t step) const {
  const auto found = std::ranges::lower_bound(recorded_, step, {}, &StepRecord::step);
  return found == recorded_.end() || found->step != step ? nullptr : &*found;
}

void StepRecorder::replay(const StepRecord& made) {
  const bool speaks = world_.rank() == 0, is_last = made.step == replay_->step;
  if (speaks) {
    std::fputs(to_line(made).c_str(), stdout);
    std::fflush(stdout);
  }
  const StepRecord* const wanted = recorded(made.step);
  const std::string step = c10::str("replay: step ", made.step);
  const auto say = [&](const std::string& text) {
    if (speaks) log_info(text);
  };
  if (is_last && watch_) say(step + " is the last one asked for, and no result that is not finite was found");
  const bool finds_divergence = replay_->find == ReplayRequest::Find::kDivergence;
  if (is_last && !wanted && finds_divergence && !has_compared_)
    throw Error(ExitCode::kUsage,
                step + " and those made before it are not in " + replay_->hashes +
                    ", so nothing was compared. [T1067] hint: ask for a step that the file has, or begin at "
                    "an earlier checkpoint, so that such a step is made again");
  if (is_last && !wanted && !replay_->hashes.empty())
    say(step + " is not in " + replay_->hashes + ", so nothing is compared");
  if (!wanted || (!is_last && !finds_divergence)) return;
  has_compared_ = true;
  const std::vector<std::string> different = different_units(made, *wanted);
  const bool same_numbers =
      is_same(as_read(made.loss), wanted->loss) && is_same(as_read(made.grad_norm), wanted->grad_norm);
  if (different.empty() && same_numbers)
    return say(c10::str(step, " has the recorded loss, norm and hashes of all ", made.units.size(), " units"));
  std::string other;
  if (made.microbatches != wanted->microbatches)
    other += c10::str("; it was recorded with ", wanted->microbatches, " microbatches, and this run makes ",
                      made.microbatches);
  if (made.threads != wanted->threads)
    other += c10::str("; it was recorded with ", wanted->threads, " threads a rank, and this run has ", made.threads);
  throw Error(
      ExitCode::kCorruptData,
      c10::str(
          step, " differs from ", replay_->hashes, ": ",
          different.empty() ? std::string("its units are equal, but loss or norm is not")
                            : c10::str(different.size(), " of ", made.units.size(), " units, of which ", different[0],
                                       " is the first"),
          other,
          ". [T0890] hint: the same data, model, threads (OMP_NUM_THREADS), processor and LibTorch give the same bits; "
          "where all are the same, a machine of one of the two runs is broken"));
}

}  // namespace tessera
