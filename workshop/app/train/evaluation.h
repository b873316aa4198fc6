#pragma once

#include <absl/status/statusor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/data/token_dataset.h"
#include "tessera/engine.h"
#include "tessera/token_batches.h"
#include "workshop/app/text/text_tokenizer.h"
#include "workshop/models/language_model.h"

namespace tessera::app {

/// The data that `--eval-data` names, and the numbers by which they are cut into batches.
struct EvaluationOptions {
  std::string data, data_format = "auto";
  std::vector<std::string> extensions;
  std::shared_ptr<const Tokenizer> tokenizer;  ///< tokenizer of text; null: bytes
  std::int64_t batch = 1;                      ///< samples that a rank takes at once
  std::int64_t most_batches = 0;               ///< how many batches a rank may have; 0: as many as all ranks can fill
  std::int64_t seq_len = 0, vocab_size = 0;
  int rank = 0, world_size = 1;
};

/// The outcome of one evaluation.
struct EvaluationResult {
  double loss = 0.0;        ///< mean over all tokens of all ranks: the same on every rank
  std::int64_t tokens = 0;  ///< sum over all ranks
  double seconds = 0.0;
};

/// The loss on held-out data. It is always computed over the same samples in the same order, each of them once (with
/// `most_batches`: only the first samples). The loss is therefore the same on any number of ranks. All ranks have the
/// same number of batches.
class Evaluation {
 public:
  /// Opens the data. Errors: 65 if they have no sample; those of open_dataset.
  static absl::StatusOr<Evaluation> open(const EvaluationOptions& options);

  /// The call is collective, and comes between two steps: every rank makes it after the same step. Dropout is off
  /// during the call; neither the parameters nor the generator change.
  EvaluationResult run(models::LanguageModel& model, Engine& engine) const;

  std::int64_t batches() const { return batches_; }  ///< number of batches of a rank in an evaluation
  const TokenDataset& dataset() const { return *dataset_; }

 private:
  Evaluation(std::shared_ptr<const TokenDataset> dataset, const EvaluationOptions& options, std::int64_t batches)
      : dataset_(std::move(dataset)), options_(options), batches_(batches) {}

  std::shared_ptr<const TokenDataset> dataset_;
  EvaluationOptions options_;
  std::int64_t batches_;
};

}  // namespace tessera::app
