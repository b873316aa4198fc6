#include "optim/noise_scale.h"

namespace tessera {

bool NoiseScale::add(const Step& step) { return add_noise(smoothing_, step, state_); }

}  // namespace tessera
