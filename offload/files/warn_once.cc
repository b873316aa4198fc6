#include "offload/files/warn_once.h"

#include <mutex>
#include <set>

#include "runtime/base/log.h"

namespace tessera {

void warn_once(const std::string& key, const std::string& message) {
  static std::mutex mutex;
  static std::set<std::string>* const seen = new std::set<std::string>;  // never destroyed: destructors may warn
  {
    std::lock_guard lock(mutex);
    if (!seen->insert(key).second) return;
  }
  log_warning(message);
}

}  // namespace tessera
