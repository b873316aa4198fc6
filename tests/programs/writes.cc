// Tests programs that write parameters, or move them to other memory.

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <cstring>

#include "runtime/comm/shared/run_ranks.h"
#include "tests/programs/models.h"

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Parameters, DtypeConversionIsNoticed) {
  expect_noticed([](Tiny& model) { model->to(at::kDouble); }, {{"was given other memory", "Module::to"}});
}

TEST(Parameters, ReplacedDataIsNoticed) {
  const Refusal wanted{{"blocks.1.up.weight", "was given other memory", "Gathered"}};
  const auto weight_of = [](Tiny& model) { return model->blocks->ptr<BlockImpl>(1)->up->weight; };
  expect_noticed([&](Tiny& model) { weight_of(model).set_data(at::ones({31, 12})); }, wanted);
  expect_noticed(
      [&](Tiny& model) {
        const at::NoGradGuard no_grad;
        weight_of(model).set_(at::ones({31, 12}));
      },
      wanted);
}

TEST(Parameters, ReplacedDataUnderAGuardIsTakenOver) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    train(scene, *trainer, model, 0, 2);
    trainer->write([&] {
      model->blocks->ptr<BlockImpl>(0)->up->weight.set_data(at::full({31, 12}, 0.03));
      model->blocks->ptr<BlockImpl>(2)->down->weight.set_(at::full({31, 12}, 0.02).t());
      model->head.set_data(model->head.detach().t().contiguous().t() * 0.5);
    });
    train(scene, *trainer, model, 2, 4);
    scene.note(*trainer, *model);
  });
}

/// Moves a storage to other memory. torch's share_memory_() does this, and so do programs that send a parameter to
/// another process.
void move_storage(const at::Tensor& tensor) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  const std::size_t bytes = storage->nbytes();
  c10::DataPtr memory = c10::GetAllocator(c10::kCPU)->allocate(bytes);
  const void* const before = storage->_mutable_data_ptr_no_checks().get();
  if (before) std::memcpy(memory.get(), before, bytes);
  storage->set_data_ptr_noswap(std::move(memory));
}

TEST(Parameters, MovedStorageIsNoticed) {
  expect_noticed([](Tiny& model) { move_storage(model->blocks->ptr<BlockImpl>(1)->up->weight); },
                 {{"was given other memory", "share_memory"}});
}

TEST(Parameters, MovedStorageUnderAGuardIsTakenOver) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    train(scene, *trainer, model, 0, 2);
    trainer->write([&] {
      const at::Tensor weight = model->blocks->ptr<BlockImpl>(0)->up->weight;
      move_storage(weight);
      const at::NoGradGuard no_grad;
      weight.mul_(0.5);
    });
    train(scene, *trainer, model, 2, 4);
    scene.note(*trainer, *model);
  });
}

// Making a view reads no number, so it gathers no unit, and the view has no memory. A view with memory would show other
// numbers after another unit gets this memory.
TEST(Parameters, ViewOfAReleasedParameterHasNoMemory) {
  for_each_cell([](const Cell& cell) {
    run_ranks({.ranks = cell.ranks}, [&](const Mesh& mesh) {
      Session session(mesh, strategy_for(cell.placed));
      session.train(0);
      const at::Tensor& weight = session.model->blocks->ptr<BlockImpl>(1)->up->weight;
      const at::Tensor view = weight.detach().cpu().contiguous().to(at::kFloat);
      EXPECT_EQ(view.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl(), weight.storage().unsafeGetStorageImpl());
      const at::Tensor copy = weight.detach().clone(), sum = view.sum();
      {
        const Gathered guard(session.engine);
        EXPECT_TRUE(copy.equal(weight.detach())) << cell.name();
        EXPECT_TRUE(sum.equal(copy.sum())) << cell.name();
      }
      const bool is_there = session.engine.traffic().gathers == 0;
      session.train(1);
      if (is_there) return;
      const std::string refused = error_of([&] { static_cast<void>(weight.detach().cpu().data_ptr()); });
      EXPECT_NE(refused.find("not gathered"), std::string::npos) << cell.name() << ": " << refused;
    });
  });
}

/// A module with two linear layers and a buffer.
struct SharingImpl : torch::nn::Module {
  SharingImpl() {
    a = register_module("a", torch::nn::Linear(4, 4));
    b = register_module("b", torch::nn::Linear(4, 4));
    copy = register_buffer("copy", at::zeros({4, 4}));
  }
  at::Tensor forward(const at::Tensor& x) { return b->forward(a->forward(x)).add(copy.sum()); }
  torch::nn::Linear a = nullptr, b = nullptr;
  at::Tensor copy;
};
TORCH_MODULE(Sharing);

TEST(Parameters, TwoTrainableTensorsInOneMemoryAreRefused) {
  for_each_cell([](const Cell& cell) {
    run_ranks({.ranks = cell.ranks}, [&](const Mesh& mesh) {
      const Strategy strategy = strategy_for(cell.placed, linear_units);
      const auto refusal_of = [&](Sharing& module) {
        return usage_error_of([&] { const Engine engine(module.ptr(), strategy, mesh); });
      };
      Sharing tied;
      tied->b->weight.set_data(tied->a->weight.detach());
      EXPECT_NE(refusal_of(tied).find("parameter a.weight and parameter b.weight share memory"), std::string::npos);
      Sharing buffer;
      buffer->copy.set_data(buffer->b->weight.detach());
      EXPECT_NE(refusal_of(buffer).find("share memory"), std::string::npos);
      // Parts of one tensor may share memory, and so may parameters that do not train.
      Sharing parts;
      const at::Tensor both = at::randn({8, 4});
      parts->a->weight.set_data(both.narrow(0, 0, 4));
      parts->b->weight.set_data(both.narrow(0, 4, 4));
      EXPECT_EQ(refusal_of(parts), "");
      Sharing columns;
      columns->a->weight.set_data(both.t().narrow(1, 0, 4));
      columns->b->weight.set_data(both.t().narrow(1, 4, 4));
      EXPECT_EQ(refusal_of(columns), "");
      Sharing frozen;
      frozen->a->weight.requires_grad_(false);
      frozen->copy.set_data(frozen->a->weight.detach());
      EXPECT_EQ(refusal_of(frozen), "");
    });
  });
}

TEST(Parameters, IntegerAndBoolParametersAreRefusedWithAHint) {
  for (const at::ScalarType type : {at::kChar, at::kBool, at::kShort}) {
    run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
      auto module = std::make_shared<SharingImpl>();
      module->register_parameter("mask", at::ones({5}, type), /*requires_grad=*/false);
      const std::string text =
          error_of([&] { const Engine engine(module, strategy_for(ShardingStrategy::kNoShard), mesh); });
      EXPECT_NE(text.find("mask"), std::string::npos) << text;
      EXPECT_NE(text.find("make it a buffer"), std::string::npos) << text;
    });
  }
}

TEST(Parameters, ParametersThatCannotTrainAreRefusedWithTheirWayOut) {
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    const Strategy strategy = strategy_for(ShardingStrategy::kFullShard, linear_units);
    const auto refusal_of = [&](const std::shared_ptr<SharingImpl>& module) {
      return error_of([&] { const Engine engine(module, strategy, mesh); });
    };
    const auto with = [&](const at::Tensor& extra) {
      const auto module = std::make_shared<SharingImpl>();
      module->register_parameter("extra", extra);
      return refusal_of(module);
    };
    EXPECT_THAT(with(at::ones({5}, at::kComplexFloat)),
                AllOf(HasSubstr("extra has dtype ComplexFloat"),
                      HasSubstr("complex(x.select(-1, 0), x.select(-1, 1)) in forward")));
    EXPECT_THAT(with(at::empty({5}, at::kMeta)),
                AllOf(HasSubstr("parameter extra is on the meta device"), HasSubstr("deferred_init")));
    std::shared_ptr<SharingImpl> module;
    {
      const c10::InferenceMode inference;
      module = std::make_shared<SharingImpl>();
    }
    EXPECT_THAT(refusal_of(module), AllOf(HasSubstr("parameter a.weight was made under"), HasSubstr("outside of it")));
  });
}

// The error for a complex parameter recommends this form of the parameter.
TEST(Parameters, ComplexNumbersMadeOfRealOnesTrain) {
  struct OfComplex : torch::nn::Module {
    OfComplex() {
      before = register_parameter("before", at::ones({3}));  // so a complex view of `pairs` would not be aligned
      pairs = register_parameter("pairs", at::linspace(-1, 1, 10).view({5, 2}));
      out = register_module("out", torch::nn::Linear(5, 3));
    }
    at::Tensor loss() {
      const at::Tensor numbers = at::complex(pairs.select(-1, 0), pairs.select(-1, 1));
      return out->forward(numbers.abs().unsqueeze(0)).add(before).square().mean();
    }
    at::Tensor before, pairs;
    torch::nn::Linear out{nullptr};
  };
  expect_like_plain(
      [](Scene& scene) {
        const auto model = seeded([] { return std::make_shared<OfComplex>(); });
        const auto trainer = scene.trainer(model);
        for (int step = 0; step < 3; ++step) {
          trainer->backward(model->loss());
          trainer->step();
        }
        scene.note(*trainer, *model);
      },
      {.adjust = linear_units});
}

TEST(Parameters, ExpandedBuffersAreBroadcast) {
  expect_like_plain(
      [](Scene& scene) {
        Mlp model = mlp(5, 9, 3);
        model->register_buffer("scale", at::full({}, 0.5).expand({4}));
        const auto trainer = scene.trainer(model);
        train(scene, *trainer, model, 0, 3);
        scene.note(model->named_buffers()["scale"].sum().item<double>());
        scene.note(*trainer, *model);
      },
      {linear_units});
}

TEST(Parameters, WritesInPlaceOutsideGatheredAreNoticed) {
  const Refusal wanted{{"blocks.1.up.weight", "written in place", "Gathered::kWrite"}};
  const auto weight_of = [](Tiny& model) { return model->blocks->ptr<BlockImpl>(1)->up->weight; };
  const auto mul = [&](Tiny& model) {
    const at::NoGradGuard no_grad;
    weight_of(model).mul_(0.5);
  };
  expect_noticed(mul, wanted);
  expect_noticed([&](Tiny& model) { torch::nn::init::normal_(weight_of(model)); }, wanted);
  const auto through_view = [&](Tiny& model) {
    const at::NoGradGuard no_grad;
    weight_of(model).narrow(0, 3, 4).zero_();
  };
  expect_noticed(through_view, wanted);
  expect_noticed([&](Tiny& model) { weight_of(model).detach().clamp_(-0.01, 0.01); }, wanted);
}

// These aliases of a parameter have version counters of their own in plain LibTorch. If ranks hold shards, the operator
// that writes is refused; otherwise the write is noticed at the next backward. Python's untyped_storage().fill_() does
// the last of these writes.
TEST(Parameters, WriteThroughATensorThatWasSetOverItsMemoryIsNoticed) {
  const Refusal wanted{{"blocks.1.", "Gathered"}, std::nullopt};
  const auto weight_of = [](Tiny& model) { return model->blocks->ptr<BlockImpl>(1)->up->weight.detach(); };
  expect_noticed([&](Tiny& model) { at::empty({0}).set_(weight_of(model)).fill_(7); }, wanted);
  const auto over_its_part = [&](Tiny& model) {
    const at::Tensor weight = weight_of(model);
    at::empty({0}).set_(weight.storage(), weight.storage_offset() + 3, {2, 2}, {2, 1}).fill_(7);
  };
  expect_noticed(over_its_part, wanted);
  expect_noticed([&](Tiny& model) { at::empty({0}, at::kByte).set_(weight_of(model).storage()).fill_(7); }, wanted);
  const auto by_its_data = [&](Tiny& model) {
    at::Tensor alias = at::empty({0});
    alias.set_data(weight_of(model));
    alias.fill_(7);
  };
  expect_noticed(by_its_data, wanted);
}

TEST(Parameters, WritesOfOperatorsOverListsAndIntoOutAreNoticed) {
  const Refusal wanted{{"blocks.1.up.weight", "written in place", "Gathered::kWrite"}};
  const auto weight_of = [](Tiny& model) { return model->blocks->ptr<BlockImpl>(1)->up->weight.detach(); };
  expect_noticed([&](Tiny& model) { at::_foreach_mul_({at::ones({2}), weight_of(model)}, 0.5); }, wanted);
  const auto into_out = [&](Tiny& model) {
    at::Tensor out = weight_of(model);
    at::add_out(out, at::ones_like(out), at::ones_like(out));
  };
  expect_noticed(into_out, wanted);
}

TEST(Parameters, ReadThroughATensorThatWasSetOverItsMemoryIsNoWrite) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    train(scene, *trainer, model, 0, 1);
    at::Tensor reader = at::empty({0});
    scene.note(reader.set_(model->head.detach()).sum().item<double>());
    scene.note(reader.set_(model->blocks->ptr<BlockImpl>(1)->up->weight.detach()).sum().item<double>());
    // A tensor that was moved to other memory (set_, set_data) has left the parameters' memory, so a later write of it
    // is no write of a parameter.
    reader.set_(at::zeros({2})).fill_(7);
    at::Tensor data = model->head.data();
    data.set_(at::zeros({2})).fill_(7);
    at::Tensor emptied = model->head.data();
    emptied.set_().resize_({2}).fill_(7);
    at::Tensor replaced = model->head.data();
    replaced.set_data(at::zeros({2}));
    replaced.fill_(7);
    train(scene, *trainer, model, 1, 2);
    scene.note(*trainer, *model);
  });
}

TEST(Parameters, WriteBetweenBackwardAndStepIsNoticed) {
  on_matrix([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    train(scene, *trainer, model, 0, 1);
    trainer->backward(loss_of(scene, model, 1));
    {
      const at::NoGradGuard no_grad;
      model->head.mul_(0.5);
    }
    scene.refused([&] { trainer->step(); }, {{"head", "written in place", "kWrite"}});
  });
}

TEST(Parameters, WriteOutsideAGuardOfSomeUnitsIsNoticed) {
  const Mistake write = [](Scene& scene, Trainer& trainer, Tiny& model) {
    Gathered guard(*trainer.engine(), {model->blocks->ptr<BlockImpl>(1)->up->weight}, Gathered::kWrite);
    {
      const at::NoGradGuard no_grad;
      model->blocks->ptr<BlockImpl>(1)->up->weight.mul_(0.5);
      model->blocks->ptr<BlockImpl>(2)->up->weight.mul_(0.5);
    }
    guard.close();
    trainer.backward(loss_of(scene, model, 1));
  };
  expect_refused(write, {{"blocks.2.up.weight", "written in place", "kWrite"}});
}

// A write through a pointer does not change the version of the parameter, so the guard compares the values themselves
// at its end.
TEST(Parameters, PointerWriteUnderAReadingGuardIsNoticed) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Mistake write = [](Scene& scene, Trainer& trainer, Tiny& model) {
      Gathered guard(*trainer.engine());
      const at::Tensor weight = model->blocks->ptr<BlockImpl>(1)->up->weight;
      std::memset(weight.mutable_data_ptr(), 0x41, 2 * weight.element_size());
      guard.close();
      // If ranks share one copy, another rank may write before this rank's guard begins. This rank's guard then sees no
      // change, and this rank gets the other rank's error in the next step.
      train(scene, trainer, model, 1, 2);
    };
    expect_refused(write, {{"parameter blocks.1.up.weight of unit blocks.1", "only reads", "Gathered::kWrite"}},
                   {.dtype = dtype});
  }
}

TEST(Parameters, PointerWriteOnOneRankUnderAReadingGuardEndsAllRanks) {
  const Mistake write = [](Scene& scene, Trainer& trainer, Tiny& model) {
    Gathered guard(*trainer.engine(), {model->head});
    if (scene.rank() == scene.mesh().world_size() - 1) *model->head.mutable_data_ptr<float>() = 7;
    guard.close();
    train(scene, trainer, model, 1, 2);
  };
  expect_refused(write, {{"parameter head", "only reads", "Gathered::kWrite"}});
}

TEST(Parameters, GuardThatWritesUnderAReadingGuardIsRefusedAndHarmless) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    train(scene, *trainer, model, 0, 1);
    if (!scene.is_plain()) {
      Gathered guard(*trainer->engine());
      scene.refused([&] { Gathered(*trainer->engine(), Gathered::kWrite).close(); },
                    {{"only reads", "close that guard"}});
      guard.close();
    }
    // A guard that reads may lie inside a guard that writes.
    trainer->write([&] {
      trainer->read([&] { model->head.detach().mutable_data_ptr<float>()[0] = 0.5F; });
      model->head.mul_(0.5);
    });
    train(scene, *trainer, model, 1, 2);
    scene.note(*trainer, *model);
  });
}

TEST(Parameters, ManualWeightClippingUnderGatheredCounts) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    for (std::int64_t step = 0; step < 4; ++step) {
      train(scene, *trainer, model, step, step + 1);
      trainer->write([&] {
        for (at::Tensor& parameter : model->parameters()) parameter.clamp_(-0.3, 0.3);
        model->head.detach().mul_(0.9);
        model->embedding->weight.copy_(model->embedding->weight * 0.5 + model->head * 0.5);
      });
    }
    scene.note(*trainer, *model);
  });
}

// An exponential mean of the weights replaces the weights for an evaluation, and the weights are then restored.
TEST(Parameters, WeightsSwappedForAnEvaluationComeBack) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    std::vector<at::Tensor> mean;
    const auto parameters = model->parameters();
    trainer->read([&] {
      for (const at::Tensor& parameter : parameters) mean.push_back(parameter.detach().clone());
    });
    const auto swap = [&] {
      trainer->write([&] {
        for (std::size_t i = 0; i < mean.size(); ++i) {
          const at::Tensor own = parameters[i].detach().clone();
          parameters[i].detach().copy_(mean[i]);
          mean[i] = own;
        }
      });
    };
    for (std::int64_t step = 0; step < 3; ++step) {
      train(scene, *trainer, model, step, step + 1);
      trainer->read([&] {
        for (std::size_t i = 0; i < mean.size(); ++i) mean[i].lerp_(parameters[i].detach(), 0.5);
      });
      swap();
      const at::NoGradGuard no_grad;
      scene.note(model->forward(batch_of(5).tokens, batch_of(5).targets).item<double>());
      swap();
    }
    scene.note(*trainer, *model);
  });
}

TEST(Parameters, EmbeddingThatWritesInForwardIsRefusedByName) {
  struct Normed : torch::nn::Module {
    Normed() {
      table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(19, 6).max_norm(1.0)));
      out = register_module("out", torch::nn::Linear(6, 3));
    }
    torch::nn::Embedding table{nullptr};
    torch::nn::Linear out{nullptr};
  };
  on_matrix(
      [](Scene& scene) {
        const auto model = seeded([] { return std::make_shared<Normed>(); });
        scene.refused([&] { scene.trainer(model); }, {{"table", "max_norm", "hint"}});
      },
      {.adjust = linear_units});
}

}  // namespace
}  // namespace tessera::testing
