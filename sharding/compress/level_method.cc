#include "sharding/compress/level_method.h"

#include <algorithm>

#include "runtime/base/message_words.h"
#include "runtime/base/status.h"

namespace tessera {

LevelMethod::LevelMethod(std::int64_t numel, LevelForm form, DrawStream draws, float* work)
    : form_(form),
      words_(static_cast<std::size_t>(level_words(form.levels, numel))),
      draws_(draws),
      own_(reinterpret_cast<std::uint32_t*>(work)) {}

absl::Status LevelMethod::sum(Collectives& group, std::string_view label, float* data, std::size_t numel) {
  encode_levels(form_, data, numel, draws_.next(), own_);
  std::uint32_t* const all = own_ + words_;
  TESSERA_RETURN_IF_ERROR(group.all_gather(label, own_, all, words_ * sizeof(std::uint32_t)).wait());
  std::fill_n(data, numel, 0.0f);
  for (int q = 0; q < group.size(); ++q) add_levels(form_, all + q * words_, numel, data);
  return absl::OkStatus();
}

}  // namespace tessera
