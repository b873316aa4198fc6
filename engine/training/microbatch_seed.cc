// This file seeds random numbers under "reproducible": a microbatch gets the same numbers on any rank. LibTorch's
// generators of the CPU, and of the GPU that trains, are set from the run's seed, the step, and the number of the
// microbatch. They are set when the backward or the step before the microbatch returns, and when training begins or
// continues.

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

#include "engine/checkpoint/generators.h"
#include "engine/training/training.h"
#include "runtime/base/noise.h"
#include "runtime/border/expect.h"
#include "runtime/border/throw.h"
#include "sharding/layout/plan/microbatch_order.h"

namespace tessera {
namespace {

at::Generator cpu_generator() { return at::globalContext().defaultGenerator(at::kCPU); }

void set_seed(at::Generator generator, std::uint64_t seed) {
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
}

/// Returns the seed folded to 32 bits, which LibTorch's generator of the CPU (a Mersenne Twister) takes. A seed of 32
/// bits does not change.
std::uint32_t folded(std::uint64_t seed) { return static_cast<std::uint32_t>(seed ^ (seed >> 32)); }

}  // namespace

std::int64_t Training::microbatch() const {
  if (claims && claims->next()) return *claims->next();
  const std::int64_t round = step_is_due() ? 0 : window.microbatch;
  if (dealer) return dealer->order().index(job.mesh.rank(), round);
  return microbatch_order(job.strategy, job.mesh.world_size()).index(job.mesh.rank(), round);
}

MicrobatchRun Training::run_of_step() const {
  const MicrobatchOrder even = microbatch_order(job.strategy, job.mesh.world_size());
  const bool is_run = even.has_runs || even.each == 1 || even.ranks == 1;
  expect(is_run,
         "Engine::microbatches: ranks take turns in the microbatches of a step here, so a rank's are no neighbours. "
         "[T0905] hint: ask microbatch() before each, or set gradient_sync to \"last_microbatch\" with \"deal\" by "
         "speed or \"reproducible\"");
  const TreeBlock run = (dealer ? dealer->order() : even).run_of(job.mesh.rank());
  return {run.begin, run.end};
}

void Training::agree_on_seed() {
  if (!job.strategy.reproducible) return;
  take_seed();
  throw_if_error(job.axes.control->broadcast("seed", &window.seed, sizeof window.seed, 0).wait());
  seed_microbatch();
}

void Training::take_seed() {
  if (!job.strategy.reproducible) return;
  at::Generator generator = cpu_generator();
  const std::lock_guard lock(generator.mutex());
  window.seed = folded(generator.current_seed());
}

void Training::take_seed(const at::Tensor& state) {
  if (!job.strategy.reproducible) return;
  at::Generator generator = at::detail::createCPUGenerator();
  generator.set_state(state);
  window.seed = folded(generator.current_seed());
}

void Training::seed_microbatch() const {
  if (!job.strategy.reproducible || step_is_due()) return;
  const auto step = static_cast<std::uint64_t>(times.attempts) + 1, index = static_cast<std::uint64_t>(microbatch());
  const std::uint64_t seed = mix_bits(mix_bits(mix_bits(window.seed) + step) + index);
  set_seed(cpu_generator(), seed);
  const c10::Device device = job.accelerator.device.device;
  if (!device.is_cpu()) set_seed(at::globalContext().defaultGenerator(device), seed);
}

at::Tensor Training::generator_to_keep() const {
  const c10::Device cpu(c10::kCPU);
  if (!job.strategy.reproducible) return state_of_generator(cpu);
  return at::detail::createCPUGenerator(window.seed).get_state();
}

}  // namespace tessera
