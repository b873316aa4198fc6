#include <ATen/Context.h>
#include <tessera/tessera.h>

#include <iostream>

#include "workshop/models/gpt.h"

int main(int argc, char** argv) {
  if (argc != 3) return 64;  // train_gpt strategy.json text
  return tessera::run([&] {  // an exception ends all ranks, with its text
    auto strategy = tessera::Strategy::from_file(argv[1]);
    tessera::Mesh mesh = tessera::init(strategy);  // torchrun, srun, mpirun, `tessera launch`, or one rank
    at::manual_seed(1);
    tessera::models::GPTConfig config{.vocab_size = 256, .seq_len = 64, .layers = 4, .width = 128, .heads = 4};
    auto model = tessera::deferred_init([&] { return tessera::models::GPT(config); });  // no memory yet
    tessera::Engine engine(model, strategy, mesh);
    tessera::TokenBatches batches(argv[2], 64, 256,
                                  {.batch = 8,
                                   .accumulation = strategy.gradient_accumulation,
                                   .rank = mesh.rank(),
                                   .world_size = mesh.world_size()});
    for (int step = 1; step <= 100; ++step) {
      while (!engine.step_is_due()) {  // gradient_accumulation microbatches
        auto batch = batches.next(engine.device());
        auto loss = model->forward(batch.input, batch.target);  // the model's own forward, unchanged
        engine.backward(loss, {.weight = batch.weight});        // the loss is not divided by gradient_accumulation
      }
      tessera::StepResult result = engine.step();
      result.wait();  // on a GPU, `step` does not wait for the device
      if (mesh.rank() == 0) std::cout << "step " << step << "  loss " << result.loss << std::endl;
    }
  });
}
