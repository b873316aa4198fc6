// Trains a module that torch.jit has scripted: a classifier of points that examples/python/script_classifier.py writes.
// There is no torch::nn::Module; the script's forward is called unchanged, and its layers are sharded by their class.
#include <ATen/Functions.h>
#include <tessera/module_view.h>
#include <tessera/tessera.h>
#include <torch/csrc/jit/serialization/import.h>

#include <iostream>

int main(int argc, char** argv) {
  if (argc != 3) return 64;  // command line: script_module classifier.pt weights.pt
  return tessera::run([&] {
    auto strategy = tessera::Strategy::from_json(
        R"({"strategy": "FULL_SHARD", "units": {"classes": ["Linear"]}, "optimizer": {"lr": 1e-2}})");
    tessera::Mesh mesh = tessera::init(strategy);
    torch::jit::Module script = torch::jit::load(argv[1]);
    tessera::Engine engine(tessera::ModuleView::of(script), strategy, mesh);
    at::manual_seed(tessera::seed_for_rank(1, mesh.rank()));  // each rank has points of its own
    for (int step = 1; step <= 300; ++step) {
      const at::Tensor points = at::rand({64, 2}) * 4 - 2;
      const at::Tensor is_inside = points.square().sum(1).lt(1.5).to(at::kLong);
      const at::Tensor scores = script.forward({points}).toTensor();
      engine.backward(at::cross_entropy_loss(scores, is_inside));
      engine.step();
      if (step % 50 != 0) continue;
      const at::Tensor right = scores.argmax(1).eq(is_inside).to(at::kFloat).mean();
      tessera::all_reduce(mesh, right, tessera::Reduce::kMean);
      if (mesh.is_main()) std::cout << "step " << step << "  right " << right.item<float>() << std::endl;
    }
    tessera::save_weights(engine, argv[2]);  // under the script's names, which its load_state_dict takes
  });
}
