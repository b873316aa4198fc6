#include "runtime/torch/storage_access.h"

namespace tessera {
namespace {

/// StorageImpl has no function that allows access again, so its two flags are set here. The language allows naming a
/// private member in an explicit instantiation ([temp.spec.general]/6). If another version of
/// LibTorch has other names for the flags, this file does not compile.
template <bool c10::StorageImpl::*kThrows, bool c10::StorageImpl::*kChecks>
struct Flags {
  friend void set_flags(c10::StorageImpl& storage, bool refused) {
    storage.*kThrows = refused;
    storage.*kChecks = refused;
  }
};
void set_flags(c10::StorageImpl& storage, bool refused);
template struct Flags<&c10::StorageImpl::throw_on_immutable_data_ptr_, &c10::StorageImpl::has_mutable_data_ptr_check_>;

}  // namespace

void set_refusal(c10::StorageImpl& storage, const std::string& text) {
  storage.get_extra_meta().custom_data_ptr_error_msg_ = text;
}

void refuse_access(c10::StorageImpl& storage, bool refused) { set_flags(storage, refused); }

}  // namespace tessera
