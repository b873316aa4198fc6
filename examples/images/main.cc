// Trains a ResNet on pictures, on one rank or many, and measures accuracy, speed and latency.
//
//   tessera launch -n 2 -- images train --data digits:digits.csv --out runs/digits
//   torchrun --no-python --nnodes 1:4 ... images train --data cifar10:cifar-10-batches-bin --out runs/cifar
//   images latency --data digits:digits.csv --out runs/digits
//   tessera launch -n 2 -- images sweep --data digits:digits.csv --out runs/digits
//
// `train` goes on from the folder's last checkpoint, on any number of ranks. --batch counts the samples of a step over
// all ranks, so the learning rate does not depend on the number of ranks. Each epoch is a row of epochs.csv.

#include <ATen/Functions.h>
#include <tessera/checkpoint.h>
#include <tessera/metrics_file.h>
#include <tessera/rank_sampler.h>
#include <tessera/seed_for_rank.h>
#include <tessera/sync_batch_norm.h>
#include <tessera/tessera.h>
#include <torch/data/dataloader.h>
#include <torch/data/datasets/map.h>
#include <torch/data/transforms/stack.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <stdexcept>

#include "examples/images/pictures.h"
#include "workshop/models/resnet.h"

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

struct Options {
  std::string data, strategy;
  fs::path out;
  int layers = 18, epochs = 10, microbatches = 2, steps = 20;
  std::int64_t side = 224, width = 64, batch = 96;
  std::uint64_t seed = 1;
  double rate = 5e-4, weight_decay = 1e-4;
  std::vector<double> buckets = {0.5, 1, 2, 4, 8, 25};
};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

tessera::Strategy strategy_of(const Options& options) {
  auto strategy = options.strategy.empty() ? tessera::Strategy::from_json(R"({"strategy": "FULL_SHARD"})")
                                           : tessera::Strategy::from_file(options.strategy);
  if (options.strategy.empty()) {
    strategy.optimizer.lr = options.rate;
    strategy.optimizer.weight_decay = options.weight_decay;
  }
  strategy.gradient_accumulation = options.microbatches;
  return strategy;
}

tessera::models::ResNet model_of(const Options& options, const PictureData& data) {
  auto config = (options.layers == 50 ? tessera::models::resnet50 : tessera::models::resnet18)(data.side, data.channels,
                                                                                               data.classes);
  config.width = options.width;
  at::manual_seed(options.seed);
  return tessera::models::ResNet(config);
}

/// Returns the number of samples in a rank's microbatch.
std::size_t microbatch_of(const Options& options, const tessera::Mesh& mesh) {
  const std::int64_t parts = mesh.world_size() * options.microbatches;
  if (options.batch % parts != 0)
    throw tessera::Error(tessera::ExitCode::kUsage,
                         "--batch " + std::to_string(options.batch) + " is no multiple of " + std::to_string(parts) +
                             ", which is ranks * microbatches. hint: choose one that all numbers of ranks divide, such "
                             "as " +
                             std::to_string(12 * options.microbatches));
  return static_cast<std::size_t>(options.batch / parts);
}

auto loader_of(const PictureData& data, bool held_out, tessera::RankSampler sampler, std::size_t batch) {
  return torch::data::make_data_loader(
      PictureDataset(data, held_out, /*augments=*/!held_out).map(torch::data::transforms::Stack<>()),
      std::move(sampler), batch);
}

/// Returns a loader of the held-out pictures, in their order.
auto held_out_loader(const PictureData& data, const tessera::Mesh& mesh, std::size_t batch) {
  const auto count = static_cast<std::size_t>(data.held_out->count());
  return loader_of(data, /*held_out=*/true, tessera::RankSampler(count, mesh, {.shuffle = false}), batch);
}

/// Returns the share of held-out pictures that the model classifies correctly. It is the same on any number of ranks.
double accuracy_of(tessera::Engine& engine, tessera::models::ResNet& model, const PictureData& data,
                   const tessera::Mesh& mesh) {
  auto loader = held_out_loader(data, mesh, /*batch=*/64);
  model->eval();
  const auto wrong = engine.evaluate(*loader, [&](auto& batch) {
    const at::Tensor misses = model->forward(batch.data).argmax(1).ne(batch.target).to(at::kFloat).mean();
    return tessera::WeightedLoss{misses, static_cast<double>(batch.data.size(0))};
  });
  return 1 - wrong.loss;
}

/// Leaves only the rows of the first `epochs` epochs in the table, for a run that goes on after them. A row is written
/// before the epoch's checkpoint. If a run is killed between the two, the next run trains an epoch again that has a row
/// already.
void keep_epochs(const fs::path& table, std::int64_t epochs) {
  if (epochs == 0) {
    fs::remove(table);
    return;
  }
  std::string kept, line;  // rows begin with their epoch; the first line has the columns' names
  std::ifstream file(table);
  for (bool is_head = true; std::getline(file, line) && !file.eof(); is_head = false)  // drops a partial line
    if (is_head || std::atoll(line.c_str()) <= epochs) kept += line + '\n';
  const fs::path renewed = table.string() + ".new";
  std::ofstream out(renewed);
  out << kept;
  out.close();
  if (!out) throw std::runtime_error(renewed.string() + " cannot be written; " + table.string() + " stays as it was");
  fs::rename(renewed, table);
}

/// Sums over the steps of an epoch.
struct Epoch {
  std::int64_t steps = 0, samples = 0;
  double loss = 0, seconds = 0, communication = 0;
};

void train(const Options& options) {
  const tessera::Strategy strategy = strategy_of(options);
  tessera::Mesh mesh = tessera::init(strategy);
  const PictureData data = open_pictures(options.data, options.side);
  const auto count = static_cast<std::size_t>(data.training->count());
  const std::size_t microbatch = microbatch_of(options, mesh);
  auto model = model_of(options, data);
  tessera::convert_sync_batchnorm(model, mesh);
  tessera::Engine engine(model, strategy, mesh);
  at::manual_seed(tessera::seed_for_rank(options.seed, mesh.rank()));  // so that augmentation differs between ranks

  tessera::RankSampler place(count, mesh, {.seed = options.seed});
  const fs::path folder = options.out / "checkpoints";
  if (fs::exists(folder / "latest")) place.resume(*tessera::load_checkpoint(engine, folder).items.data);
  if (strategy.lr_schedule.epoch_samples == 0) engine.set_epoch_samples(data.training->count());
  std::optional<tessera::MetricsFile> rows;
  if (mesh.is_main()) {
    keep_epochs(options.out / "epochs.csv", place.epoch());
    rows.emplace(options.out / "epochs.csv", tessera::MetricsFile::Start::kAppend);
  }

  auto loader = loader_of(data, /*held_out=*/false, place, microbatch);
  while (place.epoch() < options.epochs) {
    const std::int64_t epoch = place.epoch();
    model->train();
    Epoch sums;
    int begun = 0;  // microbatches of the step under way
    const auto end_step = [&](bool partial) {
      const tessera::StepResult result = engine.step(partial);
      begun = 0;
      ++sums.steps;
      sums.loss += result.loss;
      sums.seconds += result.seconds;
      sums.communication += result.communication_seconds;
    };
    for (const auto& batch : *loader) {
      const std::int64_t samples = batch.data.size(0);
      engine.backward(model->forward(batch.data, batch.target),
                      {.samples = samples, .weight = static_cast<double>(samples) / static_cast<double>(microbatch)});
      place.next(microbatch);
      sums.samples += samples;
      if (++begun == options.microbatches) end_step(/*partial=*/false);
    }
    if (begun > 0) end_step(/*partial=*/true);  // the epoch's last samples
    place.reset();
    const double accuracy = accuracy_of(engine, model, data, mesh);
    const double share = sums.seconds > 0 ? sums.communication / sums.seconds : 0.0;
    const double speed = static_cast<double>(sums.samples * mesh.world_size()) / sums.seconds;
    const double loss = sums.loss / static_cast<double>(sums.steps);
    if (rows)
      rows->write(epoch + 1, {{"ranks", std::int64_t{mesh.world_size()}},
                              {"loss", loss},
                              {"accuracy", accuracy},
                              {"seconds", sums.seconds},
                              {"pictures_per_second", speed},
                              {"communication_share", share}});
    tessera::save_checkpoint(engine, folder, {.tensors = {}, .json = {}, .data = place.cursor()}, {.keep = 2});
    if (!mesh.is_main()) continue;
    std::printf("epoch %3d  loss %.4f  right %.2f %%  %.1f s  %.0f pictures/s  s %.3f\n", static_cast<int>(epoch + 1),
                loss, 100 * accuracy, sums.seconds, speed, share);
    std::fflush(stdout);
  }
}

/// Sorts `values`, and returns their percentile `p`. `p` is a number from 0 to 1.
double percentile(std::vector<double>& values, double p) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(p * static_cast<double>(values.size() - 1) + 0.5)];
}

void latency(const Options& options) {
  const tessera::Strategy strategy = strategy_of(options);
  tessera::Mesh mesh = tessera::init(strategy);
  const PictureData data = open_pictures(options.data, options.side);
  auto model = model_of(options, data);
  tessera::Engine engine(model, strategy, mesh);
  tessera::load_checkpoint(engine, options.out / "checkpoints");
  model->eval();
  const at::NoGradGuard no_grad;
  for (const std::int64_t batch : {1, 32}) {
    std::vector<at::Tensor> pictures;
    PictureDataset held_out(data, /*held_out=*/true, /*augments=*/false);
    for (std::int64_t i = 0; i < batch; ++i)
      pictures.push_back(held_out.get(static_cast<std::size_t>(i % data.held_out->count())).data);
    const at::Tensor input = at::stack(pictures);
    std::vector<double> each;
    for (int i = -3; i < options.steps; ++i) {
      const auto start = Clock::now();
      model->forward(input);
      if (i >= 0) each.push_back(1e3 * seconds_since(start) / static_cast<double>(batch));
    }
    const double p50 = percentile(each, 0.5), p95 = percentile(each, 0.95);
    if (mesh.is_main())
      std::printf("batch %2d  p50 %.3f ms a picture  p95 %.3f ms\n", static_cast<int>(batch), p50, p95);
  }
}

/// The results of steps with gradients in buckets of `megabytes`, on one batch: the median of their seconds, the share
/// of communication, and the last loss.
struct Bucket {
  double seconds = 0, share = 0, loss = 0;
};

Bucket run_bucket(const Options& options, const PictureData& data, const tessera::Mesh& mesh, double megabytes) {
  tessera::Strategy strategy = strategy_of(options);
  strategy.strategy = tessera::ShardingStrategy::kNoShard;
  strategy.units.bucket_cap_mb = megabytes;
  auto model = model_of(options, data);
  tessera::convert_sync_batchnorm(model, mesh);
  tessera::Engine engine(model, strategy, mesh);
  const std::size_t microbatch = microbatch_of(options, mesh);
  auto loader = held_out_loader(data, mesh, microbatch);
  const auto batch = *loader->begin();
  std::vector<double> seconds, shares;
  Bucket found;
  for (int step = -3; step < options.steps; ++step) {
    for (int i = 0; i < options.microbatches; ++i) engine.backward(model->forward(batch.data, batch.target));
    const tessera::StepResult result = engine.step();
    found.loss = result.loss;
    if (step < 0) continue;
    seconds.push_back(result.seconds);
    shares.push_back(result.communication_share());
  }
  found.seconds = percentile(seconds, 0.5);
  found.share = percentile(shares, 0.5);
  return found;
}

void sweep(const Options& options) {
  tessera::Mesh mesh = tessera::init(strategy_of(options));
  const PictureData data = open_pictures(options.data, options.side);
  std::optional<tessera::MetricsFile> rows;
  if (mesh.is_main()) rows.emplace(options.out / "buckets.csv", tessera::MetricsFile::Start::kReplace);
  std::optional<double> loss;
  std::int64_t row = 0;
  for (const double megabytes : options.buckets) {
    const Bucket found = run_bucket(options, data, mesh, megabytes);
    if (loss.value_or(found.loss) != found.loss)
      throw tessera::Error(
          tessera::ExitCode::kInternal,
          "buckets of " + std::to_string(megabytes) + " MB train to another loss, and must not. hint: report it");
    loss = found.loss;
    if (!mesh.is_main()) continue;
    rows->write(++row, {{"bucket_mb", megabytes},
                        {"seconds", found.seconds},
                        {"communication_share", found.share},
                        {"loss", found.loss}});
    std::printf("buckets of %5.1f MB  %.4f s a step  s %.3f  loss %.6f\n", megabytes, found.seconds, found.share,
                found.loss);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Trains a ResNet on pictures.", "images");
  app.require_subcommand(1);
  const auto add = [&](const char* name, const char* text) {
    CLI::App* command = app.add_subcommand(name, text);
    command->add_option("--data", options.data, "cifar10:FOLDER, digits:FILE or folder:FOLDER")->required();
    command->add_option("--out", options.out, "folder of checkpoints/, epochs.csv and buckets.csv")->required();
    command->add_option("--strategy", options.strategy, "strategy file; default: FULL_SHARD, AdamW");
    command->add_option("--layers", options.layers, "of the ResNet")
        ->capture_default_str()
        ->check(CLI::IsMember({18, 50}));
    command->add_option("--side", options.side, "pixels of a folder's pictures")->capture_default_str();
    command->add_option("--width", options.width, "channels of the first stage")->capture_default_str();
    command->add_option("--seed", options.seed, "of weights, order and augmentation")->capture_default_str();
    command->add_option("--microbatches", options.microbatches, "of a step")
        ->capture_default_str()
        ->check(CLI::Range(1, 1024));
    return command;
  };
  const auto* training = add("train", "train, from the last checkpoint if there is one");
  const auto* times = add("latency", "the time that a picture takes in a checkpoint's model");
  const auto* buckets = add("sweep", "the step and its communication for sizes of buckets");
  for (CLI::App* command : app.get_subcommands({})) {
    const std::string name = command->get_name();
    if (name != "latency")
      command->add_option("--batch", options.batch, "samples of a step, all ranks")->capture_default_str();
    if (name != "train")
      command->add_option("--steps", options.steps, "that are measured")
          ->capture_default_str()
          ->check(CLI::PositiveNumber);
    if (name == "sweep") command->add_option("--buckets", options.buckets, "sizes in MB")->delimiter(',');
    if (name != "train") continue;
    command->add_option("--epochs", options.epochs, "")->capture_default_str();
    command->add_option("--rate", options.rate, "without --strategy")->capture_default_str();
    command->add_option("--weight-decay", options.weight_decay, "without --strategy")->capture_default_str();
  }
  CLI11_PARSE(app, argc, argv);
  return tessera::run([&] {
    if (*training) train(options);
    if (*times) latency(options);
    if (*buckets) sweep(options);
  });
}
