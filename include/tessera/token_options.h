#pragma once

// See docs/glossary.md: dealt.

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// The format of a data set. kAuto recognises the format:
/// | format   | path                                      | recognised by                                        |
/// |----------|-------------------------------------------|------------------------------------------------------|
/// | text     | a file, or a directory of files           | a directory, or a file of no other format            |
/// | llmc     | `x.bin` of llm.c                          | its magic number                                     |
/// | megatron | `x.idx`, `x.bin`, or the prefix `x`       | the magic number of `x.idx`                          |
///
/// Text is read as bytes, one token each, whatever its encoding.
enum class TokenFormat { kAuto, kText, kLlmc, kMegatron };

/// The options with which a data set is opened.
struct DatasetOptions {
  TokenFormat format = TokenFormat::kAuto;  ///< the format
  /// Extensions of the files to take from a directory of text, such as ".txt"; empty: all files.
  std::vector<std::string> extensions;
};

/// The treatment of samples that do not fill the last step of an epoch.
enum class Tail {
  kDrop,  ///< they are left out; the next epoch's shuffle leaves out other samples
  /// the epoch's first samples are used again to fill the step; TokenBatches omits these samples or gives them weight 0
  kPad,
};

/// The options with which the samples of a data set are dealt to the ranks.
struct SamplerOptions {
  std::int64_t num_samples = 0;   ///< number of samples in an epoch; TokenBatches sets it
  std::int64_t batch = 1;         ///< samples in one rank's microbatch
  std::int64_t accumulation = 1;  ///< one rank's microbatches in a step
  int rank = 0;                   ///< index of this rank
  int world_size = 1;             ///< number of ranks
  std::uint64_t seed = 0;         ///< seed of the shuffle; the same on all ranks
  bool shuffle = true;            ///< false: samples come in the order of the data set
  /// True: a rank's microbatches of a step are neighbours. False: the microbatches that the ranks take at the same time
  /// are neighbours. Strategy::reproducible with gradient_sync "last_microbatch" needs true.
  bool runs = false;
  Tail tail = Tail::kDrop;  ///< what happens to the last samples of an epoch
  /// Number of microbatches in a step over all ranks, at least one per rank ("deal.microbatches"); 0: accumulation *
  /// world_size. If the number is above 0, a rank's microbatches of a step are neighbours.
  std::int64_t microbatches = 0;

  /// Returns the number of microbatches in one step over all ranks.
  std::int64_t of_step() const { return microbatches > 0 ? microbatches : accumulation * world_size; }
  /// Returns the number of samples in one step over all ranks.
  std::int64_t global_batch() const { return batch * of_step(); }
};

/// The neighbouring microbatches [begin, end), among those that all ranks together compute in a step
/// (Engine::microbatches).
struct MicrobatchRun {
  std::int64_t begin = 0, end = 0;  ///< numbers of microbatches, counted from 0
  friend bool operator==(const MicrobatchRun&, const MicrobatchRun&) = default;
};

/// The position of a sampler in the data, which a checkpoint keeps. It does not depend on the number of ranks, so any
/// number of ranks can continue from it.
struct SamplerCursor {
  std::int64_t epoch = 0;     ///< the current epoch, counted from 0
  std::int64_t consumed = 0;  ///< samples of this epoch that all ranks together have taken
  /// the values with which the sampler was made; a sampler that continues from this cursor must have the same values
  std::int64_t num_samples = 0;
  std::uint64_t seed = 0;  ///< seed of the order
  bool shuffle = true;     ///< whether the order is random
  friend bool operator==(const SamplerCursor&, const SamplerCursor&) = default;
};

}  // namespace tessera
