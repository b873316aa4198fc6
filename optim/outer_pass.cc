#include "optim/outer_pass.h"

namespace tessera {

void outer_pass(const OuterRun& run) {
  const OuterRun held = run;  // a copy, which a store to an element cannot change
  with_outer_work(run.work, [&held]<OuterWork kWork>() {
    for (std::size_t i = 0; i < held.numel; ++i) outer_element<kWork>(held, i);
  });
}

}  // namespace tessera
