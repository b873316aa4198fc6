#include "offload/files/warn_once.h"

#include <set>

#include "runtime/base/log.h"
#include "runtime/base/mutex.h"

namespace tessera {

void warn_once(const std::string& key, const std::string& message) {
  static Mutex mutex;
  // The set is never destroyed, since destructors of static objects may warn.
  static std::set<std::string>* const seen ABSL_PT_GUARDED_BY(mutex) = new std::set<std::string>;
  {
    const MutexLock lock(mutex);
    if (!seen->insert(key).second) return;
  }
  log_warning(message);
}

}  // namespace tessera
