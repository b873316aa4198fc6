// Tests files that programs write and read, including reads that the Engine cannot notice.

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/serialize.h>

#include <sstream>

#include "tests/programs/models.h"

namespace tessera::testing {
namespace {

/// Loads the first values of Tiny from a file, in fp32.
void load_first_values(Tiny& model) {
  std::stringstream file;
  torch::save(tiny(), file);
  torch::load(model, file);
}

TEST(Parameters, SaveAndLoadUnderGatheredRestoreValues) {
  for (bool tied : {false, true}) {
    expect_like_plain([&](Scene& scene) {
      Tiny model = tiny({.tied_head = tied, .frozen_first_block = tied});
      const auto trainer = scene.trainer(model);
      train(scene, *trainer, model, 0, 2);
      std::stringstream file;
      trainer->read([&] { torch::save(model, file); });
      train(scene, *trainer, model, 2, 4);
      trainer->write([&] { torch::load(model, file); });
      scene.note(*trainer, *model);
      train(scene, *trainer, model, 4, 6);
      scene.note(*trainer, *model);
    });
  }
}

TEST(Parameters, LoadBetweenBackwardAndStepCounts) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    std::stringstream file;
    trainer->read([&] { torch::save(model, file); });
    train(scene, *trainer, model, 0, 2);
    trainer->backward(loss_of(scene, model, 2));
    trainer->write([&] { torch::load(model, file); });
    trainer->step();
    train(scene, *trainer, model, 3, 5);
    scene.note(*trainer, *model);
  });
}

// torch::load copies the file's bytes into a parameter, whatever dtype the parameter has. Plain LibTorch then trains on
// noise, without an error.
TEST(Parameters, LoadOfAFileOfAWiderDtypeIsRefused) {
  const Mistake load = [](Scene&, Trainer& trainer, Tiny& model) { trainer.write([&] { load_first_values(model); }); };
  expect_refused(load, {{"BFloat16", "wider dtype", "hint"}}, {.dtype = DType::kBF16});
}

TEST(Parameters, LoadOutsideGatheredIsNoticed) {
  expect_noticed(load_first_values, {{"parameter ", "was given other memory", "Gathered"}});
}

TEST(Parameters, LoadUnderAGuardOfSomeUnitsIsNoticed) {
  const Mistake load = [](Scene& scene, Trainer& trainer, Tiny& model) {
    Gathered guard(*trainer.engine(), {model->blocks->ptr<BlockImpl>(1)->up->weight}, Gathered::kWrite);
    load_first_values(model);
    guard.close();
    trainer.backward(loss_of(scene, model, 1));
  };
  expect_refused(load, {{"was given other memory", "Gathered"}});
}

TEST(Parameters, LoadUnderAReadingGuardIsNoticed) {
  const Mistake load = [](Scene&, Trainer& trainer, Tiny& model) {
    Gathered guard(*trainer.engine());
    load_first_values(model);
    guard.close();
  };
  expect_refused(load, {{"was given other memory", "kWrite"}});
}

TEST(Parameters, LoadOfAnotherModelUnderGatheredIsRefused) {
  on_matrix([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    std::stringstream file;
    torch::save(tiny({.hidden = 30}), file);
    scene.refused([&] { trainer->write([&] { torch::load(model, file); }); },
                  {{"blocks.0.up.weight", "[31, 12]", "[30, 12]"}});
  });
}

TEST(Parameters, ReadingReleasedMemorySaysShardedAndGathered) {
  on_matrix([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    train(scene, *trainer, model, 0, 1);
    const std::vector<Trainer::Action> reads = {
        [&] { (void)model->head.data_ptr<float>(); },
        [&] { (void)model->head.const_data_ptr<float>(); },
        [&] { (void)model->head.mutable_data_ptr<float>(); },
        [&] { (void)model->head.accessor<float, 2>(); },
        [&] { (void)model->blocks->ptr<BlockImpl>(1)->up->bias.data_ptr<float>(); },
        [&] {
          std::stringstream file;
          torch::save(model, file);
        },
        [&] {
          std::stringstream file;
          torch::save(model->head, file);
        }};
    for (const auto& read : reads) {
      train(scene, *trainer, model, 1, 2);  // a step releases all gathered units
      // the last two reads save: one through operators, which gather units, and the other through a pointer
      const bool saves = &read - reads.data() >= 5;
      if (scene.is_sharded() && saves) {
        try {
          read();
        } catch (const c10::Error& error) {
          EXPECT_NE(std::string(error.what()).find("tessera::Gathered"), std::string::npos) << error.what();
        }
      } else if (scene.is_sharded()) {
        scene.refused(read, {{"sharded", "tessera::Gathered", "unit "}, std::nullopt});
      } else {
        EXPECT_NO_THROW(read());
      }
      trainer->read([&] { EXPECT_NO_THROW(read()); });
    }
    train(scene, *trainer, model, 1, 2);
  });
}

}  // namespace
}  // namespace tessera::testing
