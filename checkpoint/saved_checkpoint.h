#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/shard_header.h"
#include "checkpoint/shard_reader.h"

namespace tessera {

/// The values of `what` for pieces that are not states of an optimizer.
inline constexpr char kMaster[] = "master";        ///< F32: the master of a parameter that trains, or has keeps_master
inline constexpr char kValue[] = "value";          ///< a parameter that is frozen, in its own type
inline constexpr char kBuffer[] = "buffer";        ///< a buffer that the module has
inline constexpr char kItem[] = "item";            ///< a tensor that the program added
inline constexpr char kGenerator[] = "generator";  ///< U8: LibTorch's default CPU generator; its name is the rank
/// U8: the generator of a rank's GPU, with the rank as its name. It exists only if the rank trained on a GPU.
inline constexpr char kGpuGenerator[] = "gpu_generator";
/// F32, for trainable parameters: the factor with which PowerSGD begins the next step.
inline constexpr char kFactors[] = "factors";
/// F32, for parameters that train, or for parts of them: residuals (Manifest::residuals). The three kinds are residuals
/// of contributions to sums over the shard axis, residuals of contributions to sums over the replicate axis, and
/// residuals of the sums that a rank made. The rank follows the word, as in "residual.rank3".
inline constexpr char kResidual[] = "residual", kReplicaResidual[] = "replica_residual",
                      kSumResidual[] = "sum_residual";
/// F32: the momentum of a rank's own gradients (TopKConfig::momentum), or the rank's share of the common momentum
/// (OneBitConfig::momentum). The rank follows the word, as in "gradient_momentum.rank3".
inline constexpr char kGradientMomentum[] = "gradient_momentum";
inline constexpr const char* kKeptOfRanks[] = {kResidual, kReplicaResidual, kSumResidual, kGradientMomentum};
/// F32, for parameters that train: the momentum of outer steps, if the run made any ("sync" diloco).
inline constexpr char kOuterMomentum[] = "outer_momentum";
std::string of_rank(const std::string& what, std::int64_t rank);  ///< returns a word with the rank, such as
                                                                  ///< "residual.rank3"
inline constexpr char kScales[] = ".scales";                      ///< end of the name of a state's scales, behind the
                                                                  ///< state's name
std::string buffer_of_rank(std::int64_t rank);                    ///< returns a word such as "buffer.rank3"
/// Number of elements of an "8bit" state that share a scale, counted from the parameter's first element.
inline constexpr std::int64_t kScaledElements = 256;
/// Returns whether a state may have this name: in a checkpoint it must not be mistaken for one of the words above,
/// "ema", or ".scales".
bool is_name_of_state(std::string_view name);
/// Returns safetensors' word for the type of a state's numbers: "F32", "BF16" or "U8".
std::string dtype_of_state(const SavedState& state);

/// A committed checkpoint, opened for reading. `open` checks the manifest, the sizes of all files and their headers:
/// every tensor must exist, once and whole. The data is checked when it is read. Only one thread at a time may use it.
/// Each rank that loads opens its own SavedCheckpoint.
class SavedCheckpoint {
 public:
  /// A piece, and the file in which it lies.
  struct Place {
    std::size_t file = 0;
    Piece piece;
  };

  /// Opens the checkpoint in `folder`. `who` is the prefix of messages: "rank 0". Errors: 66 if there is no checkpoint
  /// at `folder`; 65 if it is damaged (the message has the file, the position in the file, the expected value and the
  /// actual value); 74 if a read fails; 77 without permission; 71 without free descriptors or memory.
  static absl::StatusOr<std::unique_ptr<SavedCheckpoint>> open(const std::string& folder, const std::string& who);

  const std::string& folder() const { return folder_; }
  const Manifest& manifest() const { return manifest_; }
  /// Returns the hash of the manifest's text: the same for all ranks that read the same checkpoint.
  std::uint64_t hash() const { return hash_; }

  /// Returns all pieces of a tensor, by offset. It is empty if the tensor has no elements, or does not exist.
  std::span<const Place> pieces(const std::string& what, const std::string& name) const;
  /// Reads elements of a tensor from `first` on, as many as fit into `bytes`. Whole chunks are not copied. REQUIRES:
  /// the tensor has these elements.
  absl::Status read(const std::string& what, const std::string& name, std::int64_t first, std::span<std::byte> bytes);
  /// Returns a view of `bytes` bytes, without a copy if they lie in one chunk. The view is valid until the next call
  /// that reads.
  absl::StatusOr<std::span<const std::byte>> view(const std::string& what, const std::string& name, std::int64_t first,
                                                  std::size_t bytes);

  /// Returns the number of chunks in all files.
  std::int64_t chunks() const;
  /// Reads and checks chunk `number`, counted over all files. Reading chunks in the order of their numbers is fastest.
  absl::Status verify(std::int64_t number);

 private:
  struct Chunk {
    std::size_t file = 0;
    std::int64_t index = 0;
    std::vector<std::byte> bytes;
  };

  SavedCheckpoint(std::string folder, std::string who) : folder_(std::move(folder)), who_(std::move(who)) {}
  absl::Status read_manifest();
  absl::Status read_headers();
  absl::Status check_tensors();
  absl::Status check_kept_gradients();
  absl::Status check_parts(const std::string& what, const std::string& name, std::int64_t numel);
  absl::Status check_tensor(const std::string& what, const std::string& name, const std::string& dtype,
                            std::int64_t numel);
  /// A run of bytes that lie in one chunk.
  struct Part {
    std::size_t file = 0;
    std::int64_t chunk = 0;
    std::size_t begin = 0, size = 0;  ///< range of bytes of the chunk
  };
  template <class Visit>
  absl::Status for_each_part(const std::string& what, const std::string& name, std::int64_t first, std::size_t bytes,
                             const Visit& visit);
  absl::StatusOr<std::span<const std::byte>> bytes_of(const Part& part);
  absl::StatusOr<std::span<const std::byte>> chunk_of(std::size_t file, std::int64_t index);
  absl::Status read_chunk(std::size_t file, std::int64_t index, std::span<std::byte> bytes);
  ShardReader& reader_of(std::size_t file);
  std::string describe(std::size_t file, std::int64_t begin, std::int64_t end) const;

  const std::string folder_, who_;
  Manifest manifest_;
  std::uint64_t hash_ = 0;
  std::map<std::string, std::vector<Place>> tensors_;  ///< key: "what|name"
  /// key: "what|name"; whether the tensor was checked, used by check_tensors
  std::map<std::string, bool> checked_;
  std::list<std::pair<std::size_t, ShardReader>> readers_;  ///< readers of the files that were used last, the latest
                                                            ///< first
  std::list<Chunk> chunks_;                                 ///< chunks that were used last, the latest first
  /// memory of the bytes that the last `view` returned, if they came from several chunks
  std::vector<std::byte> joined_;
};

}  // namespace tessera
