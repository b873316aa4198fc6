#include "runtime/comm/gather_strings.h"

#include <algorithm>
#include <cstdint>

#include "runtime/base/status.h"

namespace tessera {

absl::StatusOr<std::vector<std::string>> gather_strings(Collectives& group, std::string_view label,
                                                        std::string_view own) {
  const auto ranks = static_cast<std::size_t>(group.size());
  const std::uint64_t length = own.size();
  std::vector<std::uint64_t> lengths(ranks);
  TESSERA_RETURN_IF_ERROR(group.all_gather(label, &length, lengths.data(), sizeof length).wait());
  const std::size_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::string padded(own), all(ranks * longest, '\0');
  padded.resize(longest);
  TESSERA_RETURN_IF_ERROR(group.all_gather(label, padded.data(), all.data(), longest).wait());
  std::vector<std::string> strings;
  for (std::size_t rank = 0; rank < ranks; ++rank) strings.push_back(all.substr(rank * longest, lengths[rank]));
  return strings;
}

absl::StatusOr<std::string> broadcast_string(Collectives& group, std::string_view label, std::string_view own,
                                             int root) {
  std::uint64_t length = own.size();
  TESSERA_RETURN_IF_ERROR(group.broadcast(label, &length, sizeof length, root).wait());
  std::string text(own);
  text.resize(length);
  TESSERA_RETURN_IF_ERROR(group.broadcast(label, text.data(), length, root).wait());
  return text;
}

}  // namespace tessera
