#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "runtime/base/wire/wire_block.h"
#include "runtime/comm/collectives.h"
#include "tessera/dtype.h"

namespace tessera {

// Lossy codecs of WireForm, whose messages wire_block.h describes. A run of kCodecBlock elements whose largest
// magnitude is below the smallest normal number times 127 becomes zeros. A run with an infinity or a NaN becomes NaNs.

/// Returns the number of bytes of one rank's `numel` elements on the wire. If `form` is not lossy, these are the bytes
/// of `dtype`. The number of bytes that packing (lossless.h) saves is not known in advance.
std::size_t wire_bytes(WireForm form, DType dtype, std::size_t numel);

/// Writes `input[0, numel)` of `dtype` (fp32, bf16, fp16) to `wire`, which is encoded_bytes long and aligned to 4.
///
/// `residual` [numel], unless null, holds earlier rounding errors. They are added to the input first, and are then
/// replaced by the new errors. Runs that are not finite leave `residual` as it was.
void encode(WireForm form, const void* input, DType dtype, std::size_t numel, std::byte* wire,
            float* residual = nullptr);

/// Reverses `encode`, into `dtype` (fp32, bf16, fp16). Values are rounded to nearest, ties to even, unless the dtype is
/// fp32.
void decode(WireForm form, const std::byte* wire, DType dtype, void* output, std::size_t numel);

/// Sums the encoded values of `wires`, in the pairwise tree (pairwise_sum.h). `visitor` (which may be null) sees the
/// sums as elements `offset...` of the output. REQUIRES: offset is a multiple of SumVisitor::kAlignment.
void sum_encoded(WireForm form, std::span<const std::byte* const> wires, float* output, std::size_t numel,
                 SumVisitor* visitor, std::size_t offset);

/// The form in which the elements of a call are sent: unchanged, packed by the transport, or rounded. A transport's
/// pipelines use this class to write, read and add up pieces, so they contain no code of a codec.
class WireCoding {
 public:
  /// The input of a call if it was encoded before (ReduceOptions::encoded); otherwise null.
  struct Encoded {
    const std::byte* messages = nullptr;  ///< a message for each part of the input
    std::size_t part_numel = 0;           ///< number of elements of each part
  };

  /// `feedback` is ReduceOptions::feedback, of the whole input of the call, or null.
  WireCoding(WireForm form, DType dtype, float* feedback = nullptr) : WireCoding(form, dtype, feedback, {}) {}
  WireCoding(WireForm form, DType dtype, float* feedback, const Encoded& encoded)
      : form_(form), dtype_(dtype), feedback_(feedback), encoded_(encoded) {}

  /// Returns whether elements are encoded before they are sent. Otherwise they can be sent from where they lie.
  bool rounds() const { return is_lossy(form_); }
  /// Returns the dtype of the elements that the transport packs (lossless.h), or nothing if it packs none.
  std::optional<DType> packs() const { return form_ == WireForm::kLossless ? std::optional(dtype_) : std::nullopt; }
  std::size_t bytes(std::size_t numel) const { return wire_bytes(form_, dtype_, numel); }
  /// Writes `input[begin, begin + numel)` to `wire`, in the form in which it is sent. REQUIRES: if the input was
  /// encoded before, the elements lie in one part of it, and begin at a multiple of kCodecBlock in that part.
  void write(const void* input, std::size_t begin, std::size_t numel, std::byte* wire) const;
  /// Reverses `write`. REQUIRES: rounds().
  void read(const std::byte* wire, void* output, std::size_t numel) const {
    decode(form_, wire, dtype_, output, numel);
  }
  /// Adds up the values of all `wires`, element by element and in the order of the pairwise tree, and writes the sums
  /// to `output`. `visitor` and `offset` are those of sum_encoded.
  void sum(std::span<const std::byte* const> wires, float* output, std::size_t numel, SumVisitor* visitor,
           std::size_t offset) const;

 private:
  void copy_encoded(std::size_t begin, std::size_t numel, std::byte* wire) const;

  WireForm form_;
  DType dtype_;
  float* feedback_;
  Encoded encoded_;
};

}  // namespace tessera
