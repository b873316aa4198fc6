#pragma once

#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/base/message_words.h"
#include "runtime/base/wire/sign_messages.h"
#include "runtime/base/wire/wire_block.h"
#include "tessera/dtype.h"
#include "workshop/bench/pass_timing.h"

namespace tessera {

/// Numbers of a normal distribution, and memory to encode and decode them.
class CodecRun {
 public:
  explicit CodecRun(std::size_t numel);

  /// Encodes and decodes on this thread. Returns the number of encoded bytes.
  std::size_t there_and_back(WireForm form);
  double plain_bytes() const { return static_cast<double>(values_.size() * sizeof(float)); }

 private:
  std::vector<float> values_, read_;
  std::vector<std::uint32_t> wire_;
};

/// The time for which a codec (compression.gradients, sums, gathers) uses this processor, and the bytes that it saves
/// on the wire.
struct CodecSpeed {
  WireForm form = WireForm::kPlain;
  double share = 1;             ///< fraction of the bytes of fp32
  double seconds_per_byte = 0;  ///< seconds in which one thread encodes and decodes a byte of fp32
};

/// Measures every codec except kPlain. The results are medians of a few rounds over 16 MiB. Measuring all of them takes
/// a few tenths of a second.
std::vector<CodecSpeed> measure_codecs();

/// A pass of a codec of the wire over fp32 values: they are encoded, perhaps with error feedback, or decoded. Signs are
/// votes without error feedback, and have scales with it (runtime/comm/sum/sign_codec.h).
struct CodecPass {
  const char* name;
  WireForm form;  ///< kPlain: signs
  bool encodes;
  bool has_residual = false;

  bool has_signs() const { return form == WireForm::kPlain; }
  /// Returns the number of bytes of a message of `numel` values.
  std::size_t message_bytes(std::size_t numel) const {
    if (!has_signs()) return encoded_bytes(form, numel);
    return 4 * (has_residual ? scaled_sign_words(numel) : vote_words(numel));
  }
  /// Returns the number of bytes that the pass reads and writes.
  std::size_t bytes(std::size_t numel) const { return (has_residual ? 12 : 4) * numel + message_bytes(numel); }
  /// Returns the message of signs of `numel` values. `kept`: the residuals, or null.
  SignMessages signs(std::size_t numel, float* kept) const {
    const auto kind = has_residual ? SignMessages::Kind::kScaled : SignMessages::Kind::kVotes;
    return {kind, numel, 1, numel, message_bytes(numel) / 4, 0, kept};
  }
};
inline constexpr CodecPass kCodecPasses[] = {{"int8_encode", WireForm::kInt8, true},
                                             {"int8_encode_feedback", WireForm::kInt8, true, true},
                                             {"int8_decode", WireForm::kInt8, false},
                                             {"int4_encode", WireForm::kInt4, true},
                                             {"int4_encode_feedback", WireForm::kInt4, true, true},
                                             {"int4_decode", WireForm::kInt4, false},
                                             {"votes_encode", WireForm::kPlain, true},
                                             {"signs_encode_feedback", WireForm::kPlain, true, true}};

/// Times all passes over `numel` values on one thread, `rounds` times after one round of warm-up. The limit is a copy
/// of as many bytes, half of them read and half of them written.
std::vector<PassTiming> bench_codecs(std::size_t numel, int rounds);

/// Makes the measurements of bench_codecs on the current GPU. Messages and residuals lie in the GPU's memory here.
/// Times are those of CUDA events. Errors: 69 without a GPU, or in a build without kernels; those of CUDA.
absl::StatusOr<std::vector<PassTiming>> bench_device_codecs(std::size_t numel, int rounds);

}  // namespace tessera
