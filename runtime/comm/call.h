#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "tessera/dtype.h"

namespace tessera {

/// The calls that a group of ranks can make.
enum class Operation : std::uint32_t {
  kNone,
  kAllocate,
  kAllocateCommon,
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kAllToAll,
  kBarrier,
};
/// Returns the name as messages show it: "all_gather".
std::string_view name_of(Operation operation);

/// The description of a collective that a rank enters: the signature of the call. The signatures of all ranks of a
/// group must be equal. A signature is plain data of whole 64-bit words, because it travels through shared memory word
/// by word.
struct CallSignature {
  static constexpr std::size_t kLabelBytes = 64;

  std::uint64_t sequence = 0;  ///< number of the call among the calls of its group, from 1
  std::uint64_t count = 0;     ///< number of elements (reductions) or bytes (other calls) for each rank
  Operation operation = Operation::kNone;
  DType dtype = DType::kU8;
  bool common = false;  ///< the result goes into common memory
  std::uint8_t unused[2] = {};
  std::uint32_t root = 0;
  std::uint32_t unused_too = 0;
  std::array<char, kLabelBytes> label{};  ///< the text ends with 0

  std::string_view label_text() const { return label.data(); }
  /// Returns a text such as "reduce_scatter 'blocks.3' of 4096 bf16 (#412)".
  std::string describe() const;
};
static_assert(sizeof(CallSignature) == 96);

/// Makes a signature; `label` is cut to 63 bytes, and the caller sets `sequence`.
CallSignature make_signature(Operation operation, std::string_view label, DType dtype, std::uint64_t count,
                             std::uint32_t root = 0);

/// Returns the beginning of every message about a call: "blocks.3 reduce_scatter #412".
std::string where(const CallSignature& call);

/// Returns whether all fields are equal, labels included.
bool operator==(const CallSignature& a, const CallSignature& b);

/// Returns a digest of 64 bits: two signatures that differ have the same digest only once in 2^64 pairs.
std::uint64_t digest_of(const CallSignature& call);

}  // namespace tessera
