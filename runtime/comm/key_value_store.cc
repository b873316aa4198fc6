#include "runtime/comm/key_value_store.h"

#include <map>

#include "runtime/base/mutex.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

std::string key_of_text(const std::string& list, std::int64_t number) { return list + "#" + std::to_string(number); }

class MemoryStore : public KeyValueStore {
 public:
  absl::Status set(const std::string& key, const std::string& value) override {
    const MutexLock lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> get(const std::string& key, std::chrono::milliseconds timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    const MutexLock lock(mutex_);
    while (values_.count(key) == 0 && changed_.wait_until(mutex_, deadline)) continue;
    if (values_.count(key) == 0)
      return make_error(ExitCode::kPeerLost, "store: no rank set '" + key + "' within " +
                                                 std::to_string(timeout.count()) +
                                                 " ms. [T0471] hint: a rank that has met the others stands still, or "
                                                 "computes for longer than comm.init_timeout_s");
    return values_[key];
  }

  absl::StatusOr<bool> has(const std::string& key) override {
    const MutexLock lock(mutex_);
    return values_.count(key) > 0;
  }

  // The counter is kept as text, so that `get` and `has` treat it like any other value.
  absl::StatusOr<std::int64_t> add(const std::string& key, std::int64_t amount) override {
    const MutexLock lock(mutex_);
    std::string& value = values_[key];
    const std::int64_t sum = (value.empty() ? 0 : std::stoll(value)) + amount;
    value = std::to_string(sum);
    changed_.notify_all();
    return sum;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

// The list's own key counts its texts, and each text has a key with its number.
absl::Status KeyValueStore::append(const std::string& list, const std::string& text) {
  TESSERA_ASSIGN_OR_RETURN(const std::int64_t number, add(list, 1));
  return set(key_of_text(list, number), text);
}

absl::StatusOr<std::vector<std::string>> KeyValueStore::listed(const std::string& list) {
  std::vector<std::string> texts;
  TESSERA_ASSIGN_OR_RETURN(const bool is_there, has(list));
  if (!is_there) return texts;
  TESSERA_ASSIGN_OR_RETURN(const std::int64_t count, add(list, 0));
  for (std::int64_t number = 1; number <= count; ++number) {
    TESSERA_ASSIGN_OR_RETURN(const bool is_set, has(key_of_text(list, number)));
    if (!is_set) continue;  // its writer has counted it, and sets it now
    TESSERA_ASSIGN_OR_RETURN(texts.emplace_back(), get(key_of_text(list, number), std::chrono::milliseconds(0)));
  }
  return texts;
}

absl::StatusOr<std::vector<std::string>> KeyValueStore::get_all(const std::vector<std::string>& keys) {
  std::vector<std::string> values;
  for (const std::string& key : keys) {
    TESSERA_ASSIGN_OR_RETURN(values.emplace_back(), get(key, std::chrono::milliseconds(0)));
  }
  return values;
}

std::shared_ptr<KeyValueStore> memory_store() { return std::make_shared<MemoryStore>(); }

}  // namespace tessera
