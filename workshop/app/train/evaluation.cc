#include "workshop/app/train/evaluation.h"

#include <algorithm>
#include <chrono>
#include <ranges>
#include <utility>

#include "engine/loop/token_stream.h"
#include "runtime/border/throw.h"

namespace tessera::app {
namespace {

absl::StatusOr<TokenBatches> batches_of(const std::shared_ptr<const TokenDataset>& dataset,
                                        const EvaluationOptions& options) {
  SamplerOptions sampling;
  sampling.batch = options.batch;
  sampling.rank = options.rank;
  sampling.world_size = options.world_size;
  sampling.shuffle = false;
  sampling.tail = Tail::kPad;  // with this, each sample counts once on any number of ranks
  return TokenStream::batches_of(dataset, options.seq_len, options.vocab_size, sampling);
}

/// Switches dropout off while this object exists, and on again at its end, even after an exception.
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
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<const TokenDataset> dataset,
                           open_tokens(options.data, reading, options.tokenizer));
  const absl::StatusOr<TokenBatches> batches = batches_of(dataset, options);
  if (!batches.ok())
    return make_error(exit_code_of(batches.status()),
                      "--eval-data " + options.data + ": " + message_of(batches.status()));
  const std::int64_t whole = batches->steps_per_epoch();
  return Evaluation(std::move(dataset), options,
                    options.most_batches > 0 ? std::min(whole, options.most_batches) : whole);
}

EvaluationResult Evaluation::run(models::LanguageModel& model, Engine& engine) const {
  const auto start = std::chrono::steady_clock::now();
  TokenBatches batches = value_or_throw(batches_of(dataset_, options_));
  const EvaluationMode mode(model);
  const auto found = engine.evaluate(std::views::iota(std::int64_t{0}, batches_), [&](std::int64_t) {
    const TokenBatch batch = batches.next(engine.device());
    const double tokens = batch.weight > 0 ? static_cast<double>(batch.input.numel()) : 0.0;
    return WeightedLoss{model.forward(batch.input, batch.target), tokens};
  });
  EvaluationResult result;
  result.loss = found.loss;
  result.tokens = static_cast<std::int64_t>(found.weight);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace tessera::app
