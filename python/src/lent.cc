#include "python/src/lent.h"

#include <ATen/ops/from_blob.h>

namespace tessera::python {

Lent::~Lent() {
  for (const Loan& loan : loans_) {
    const c10::Storage& storage = loan.lent.storage();
    if (loan.lent.use_count() == 1 && storage.use_count() == 1) continue;  // the program has not kept this tensor
    storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
        "this tensor was lent to " + to_ + " for one call, which is over. [T0866] hint: keep a copy of it: .clone()");
  }
}

at::Tensor Lent::over(const at::Tensor& own) {
  at::Tensor lent = at::for_blob(own.data_ptr(), own.sizes())
                        .strides(own.strides())
                        .options(own.options())
                        .target_device(own.device())
                        .make_tensor();
  loans_.push_back({own, lent});
  return lent;
}

at::Tensor Lent::back(const at::Tensor& result) const {
  for (const Loan& loan : loans_) {
    if (result.is_same(loan.lent)) return loan.own;
    if (result.has_storage() && result.storage().is_alias_of(loan.lent.storage())) return result.clone();
  }
  return result;
}

std::vector<at::Tensor> Lent::back(const std::vector<at::Tensor>& results) const {
  std::vector<at::Tensor> all;
  for (const at::Tensor& result : results) all.push_back(back(result));
  return all;
}

}  // namespace tessera::python
