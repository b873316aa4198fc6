#include "sharding/reduce/pack/pending_copies.h"

#include <ATen/ops/_foreach_copy.h>

#include <algorithm>

#include "sharding/unrecorded.h"

namespace tessera {
namespace {

constexpr std::size_t kManyCopies = 256;                   // number of copies that LibTorch makes with a few launches
constexpr std::size_t kManyBytes = std::size_t{32} << 20;  // bytes of gradients that may wait until they are copied

}  // namespace

void PendingCopies::add(const at::Tensor& place, const at::Tensor& gradient) {
  const at::ScalarType dtype = gradient.scalar_type();
  auto list = std::find_if(lists_.begin(), lists_.end(), [&](const Alike& alike) { return alike.dtype == dtype; });
  if (list == lists_.end()) list = lists_.insert(list, Alike{dtype, {}, {}});
  list->places.push_back(place);
  list->gradients.push_back(gradient);
  ++count_;
  bytes_ += gradient.nbytes();
}

void PendingCopies::flush() {
  if (empty()) return;
  const Unrecorded unrecorded;
  for (const Alike& list : lists_) {
    if (!list.gradients.empty()) at::_foreach_copy_(list.places, list.gradients);
  }
  drop();
}

void PendingCopies::flush_if_many() {
  if (count_ >= kManyCopies || bytes_ >= kManyBytes) flush();
}

void PendingCopies::drop() {
  for (Alike& list : lists_) {
    list.places.clear();
    list.gradients.clear();
  }
  count_ = bytes_ = 0;
}

}  // namespace tessera
