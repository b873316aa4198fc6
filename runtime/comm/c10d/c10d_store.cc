#include "runtime/comm/c10d/c10d_store.h"

#include <absl/strings/str_split.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "runtime/base/status.h"
#include "runtime/comm/c10d/strangers.h"

namespace tessera {

/// Runs a request. The store answered before, so a failure means that the process that serves the store is lost.
template <typename Result, typename Body>
Result C10dStore::guarded(const char* what, const std::string& key, Body body) const {
  try {
    return body();
  } catch (const std::exception& error) {
    return make_error(ExitCode::kPeerLost,
                      std::string("store: cannot ") + what + " '" + key + "': " + server_ +
                          " is gone, which serves the store (" + text_of_c10_exception(error) +
                          "). [T0429] hint: what it printed last, or its launcher, says why it ended");
  }
}

std::string text_of_c10_exception(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  std::string text = c10_error ? c10_error->what_without_backtrace() : error.what();
  if (const auto trace = text.find("\nException raised from"); trace != std::string::npos) text.resize(trace);
  return text;
}

absl::Status C10dStore::set(const std::string& key, const std::string& value) {
  return guarded<absl::Status>("set", key, [&] {
    store_->set(key, std::vector<std::uint8_t>(value.begin(), value.end()));
    return absl::OkStatus();
  });
}

absl::StatusOr<bool> C10dStore::has(const std::string& key) {
  return guarded<absl::StatusOr<bool>>("look for", key, [&] { return store_->check({key}); });
}

absl::StatusOr<std::string> C10dStore::get(const std::string& key, std::chrono::milliseconds timeout) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  for (auto pause = std::chrono::microseconds(200);; pause = std::min(2 * pause, std::chrono::microseconds(10'000))) {
    TESSERA_ASSIGN_OR_RETURN(const bool present, has(key));
    if (present) break;
    if (std::chrono::steady_clock::now() >= end)
      return make_error(ExitCode::kPeerLost, "store: no rank set '" + key + "' within " +
                                                 std::to_string(timeout.count()) +
                                                 " ms. [T0430] hint: look in the ranks' logs for one that stands "
                                                 "still; where one computes that long, raise comm.init_timeout_s");
    std::this_thread::sleep_for(pause);
  }
  return guarded<absl::StatusOr<std::string>>("get", key, [&] {
    const std::vector<std::uint8_t> value = store_->get(key);
    return std::string(value.begin(), value.end());
  });
}

absl::StatusOr<std::int64_t> C10dStore::add(const std::string& key, std::int64_t amount) {
  return guarded<absl::StatusOr<std::int64_t>>("add to", key, [&] { return store_->add(key, amount); });
}

// A store with c10d's extended interface appends to a value in one request. The list is then one value with a line for
// each text.
absl::Status C10dStore::append(const std::string& list, const std::string& text) {
  if (!store_->hasExtendedApi()) return KeyValueStore::append(list, text);
  return guarded<absl::Status>("append to", list, [&] {
    std::vector<std::uint8_t> line(text.begin(), text.end());
    line.push_back('\n');
    store_->append(list, line);
    return absl::OkStatus();
  });
}

absl::StatusOr<std::vector<std::string>> C10dStore::listed(const std::string& list) {
  if (!store_->hasExtendedApi()) return KeyValueStore::listed(list);
  TESSERA_ASSIGN_OR_RETURN(const bool is_there, has(list));
  if (!is_there) return std::vector<std::string>();
  return guarded<absl::StatusOr<std::vector<std::string>>>("get", list, [&] {
    const std::vector<std::uint8_t> value = store_->get(list);
    const std::string lines(value.begin(), value.end());
    std::vector<std::string> texts = absl::StrSplit(lines, '\n', absl::SkipEmpty());
    return texts;
  });
}

absl::StatusOr<std::vector<std::string>> C10dStore::get_all(const std::vector<std::string>& keys) {
  if (keys.empty() || !store_->hasExtendedApi()) return KeyValueStore::get_all(keys);
  return guarded<absl::StatusOr<std::vector<std::string>>>("get", keys.front(), [&] {
    std::vector<std::string> values;
    for (const std::vector<std::uint8_t>& value : store_->multiGet(keys))
      values.emplace_back(value.begin(), value.end());
    return values;
  });
}

/// Returns the port of a TCPStore, with prefixes or without; 0 for another kind of store.
static int port_of_store(const c10::intrusive_ptr<c10d::Store>& store) {
  if (auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store.get()))
    return port_of_store(prefixed->getUnderlyingStore());
  auto* const tcp = dynamic_cast<c10d::TCPStore*>(store.get());
  return tcp ? tcp->getPort() : 0;
}

std::shared_ptr<KeyValueStore> C10dStore::connected_anew() {
  try {
    const auto made = std::make_shared<C10dStore>(store_->clone(), server_);
    keep_from_idling(port_of_store(store_));
    return made;
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace tessera
