#include "app/evaluation.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "engine/token_stream.h"
#include "runtime/border/throw.h"
#include "runtime/comm/gather_strings.h"

namespace tessera::app {
namespace {

absl::StatusOr<TokenBatches> batches_of(const std::shared_ptr<const TokenDataset>& dataset,
                                        const EvaluationOptions& options) {
  SamplerOptions sampling;
  sampling.batch = options.batch;
  sampling.rank = options.rank;
  sampling.world_size = options.world_size;
  sampling.shuffle = false;
  return TokenStream::batches_of(dataset, options.seq_len, options.vocab_size, sampling);
}

/// The mean over ranks, added up in rank order: every rank gets the same bits.
double mean_over_ranks(double own, Collectives& world) {
  const std::string bytes(reinterpret_cast<const char*>(&own), sizeof own);
  double sum = 0.0;
  const auto all = value_or_throw(gather_strings(world, "evaluation", bytes));
  for (const std::string& each : all) {
    double value = 0.0;
    std::memcpy(&value, each.data(), sizeof value);
    sum += value;
  }
  return sum / static_cast<double>(all.size());
}

/// Dropout off; on again at the end, an exception's too.
class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& module) : module_(module) { module_.eval(); }
  ~EvaluationMode() { module_.train(); }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  torch::nn::Module& module_;
};

}  // namespace

absl::StatusOr<Evaluation> Evaluation::open(const EvaluationOptions& options) {
  DatasetOptions reading;
  TESSERA_ASSIGN_OR_RETURN(reading.format, parse_token_format(options.data_format));
  reading.extensions = options.extensions;
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<const TokenDataset> dataset, open_dataset(options.data, reading));
  const absl::StatusOr<TokenBatches> batches = batches_of(dataset, options);
  if (!batches.ok())
    return make_error(exit_code_of(batches.status()),
                      "--eval-data " + options.data + ": " + message_of(batches.status()));
  const std::int64_t whole = batches->steps_per_epoch();
  return Evaluation(std::move(dataset), options,
                    options.most_batches > 0 ? std::min(whole, options.most_batches) : whole);
}

EvaluationResult Evaluation::run(models::LanguageModel& model, const Engine& engine, Collectives& world) const {
  const auto start = std::chrono::steady_clock::now();
  TokenBatches batches = value_or_throw(batches_of(dataset_, options_));
  const at::NoGradGuard no_grad;
  const EvaluationMode mode(model);
  double sum = 0.0;
  for (std::int64_t i = 0; i < batches_; ++i) {
    const TokenBatch batch = batches.next(engine.device());
    sum += model.forward(batch.input, batch.target).item<double>();
  }
  engine.check();
  EvaluationResult result;
  result.loss = mean_over_ranks(sum / static_cast<double>(batches_), world);
  result.tokens = batches_ * options_.batch * options_.seq_len * options_.world_size;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace tessera::app
