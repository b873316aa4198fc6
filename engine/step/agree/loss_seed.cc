#include "engine/step/agree/loss_seed.h"

#include <ATen/ops/full.h>
#include <c10/util/BFloat16.h>

#include "sharding/unrecorded.h"

namespace tessera {
namespace {

bool is_exact_in(at::ScalarType dtype, double weight) {
  if (dtype == at::kHalf) return false;
  return dtype != at::kBFloat16 || static_cast<double>(c10::BFloat16(static_cast<float>(weight))) == weight;
}

}  // namespace

void weigh(LossSeed& start, double weight) {
  if (weight == 1.0) return;
  const Unrecorded unrecorded;
  if (is_exact_in(start.seed.scalar_type(), weight)) {
    start.seed.mul_(weight);
  } else if (start.factor.defined()) {
    start.factor = start.factor.mul(weight);
  } else {
    start.factor = at::full({}, weight, at::TensorOptions(at::kFloat).device(start.seed.device()));
  }
}

}  // namespace tessera
