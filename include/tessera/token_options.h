#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// | format   | path                                      | recognised by                                        |
/// |----------|-------------------------------------------|------------------------------------------------------|
/// | text     | a file, or a directory of files           | a directory; or a file that is nothing else          |
/// | llmc     | `x.bin` of llm.c                          | its magic number                                     |
/// | megatron | `x.idx`, `x.bin`, or the prefix `x`       | the magic of `x.idx` beside it                       |
///
/// Text is read as bytes, one token each, whatever its encoding.
enum class TokenFormat { kAuto, kText, kLlmc, kMegatron };

struct DatasetOptions {
  TokenFormat format = TokenFormat::kAuto;
  /// For a directory of text: take files with these extensions, such as ".txt"; empty: all files.
  std::vector<std::string> extensions;
};

/// What becomes of the samples that do not fill the last step of an epoch.
enum class Tail {
  kDrop,  ///< left out; another epoch's shuffle leaves out others
  kPad,  ///< the step is filled with the first samples of the epoch, a second time; TokenBatches leaves those out, or gives them no weight
};

/// How the samples of a dataset are dealt out.
struct SamplerOptions {
  std::int64_t num_samples = 0;   ///< TokenBatches fills it in
  std::int64_t batch = 1;         ///< samples of a microbatch of one rank
  std::int64_t accumulation = 1;  ///< microbatches a step
  int rank = 0;
  int world_size = 1;
  std::uint64_t seed = 0;
  bool shuffle = true;  ///< false: in the order of the dataset
  Tail tail = Tail::kDrop;

  std::int64_t global_batch() const { return batch * accumulation * world_size; }
};

/// Where a sampler stands: what a checkpoint keeps. It says nothing of ranks, so any number of them can go on from it.
struct SamplerCursor {
  std::int64_t epoch = 0;
  std::int64_t consumed = 0;  ///< samples of this epoch that all ranks together have taken
  std::int64_t num_samples = 0;
  std::uint64_t seed = 0;
  bool shuffle = true;
  friend bool operator==(const SamplerCursor&, const SamplerCursor&) = default;
};

}  // namespace tessera
