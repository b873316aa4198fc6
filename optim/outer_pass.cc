#include "optim/outer_pass.h"

namespace tessera {

void outer_pass(const OuterRun& run) {
  const OuterRun held = run;  // a store to an element cannot alias this copy
  with_outer_work(run.work, [&held]<OuterWork kWork>() {
    for (std::size_t i = 0; i < held.numel; ++i) outer_element<kWork>(held, i);
  });
}

}  // namespace tessera
