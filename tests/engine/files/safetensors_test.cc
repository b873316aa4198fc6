// Tests that weights are read from safetensors files and written to them, under every strategy. Files that do not fit
// are an error on all ranks.

#include "tessera/safetensors.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>

#include "checkpoint/saved_checkpoint.h"
#include "checkpoint/tensor_files.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/span.h"
#include "tessera/weights.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace safetensors_test {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

/// Returns names for a file whose matrices are transposed. All names differ from the model's names.
NameInFile other_names(const std::string& name) {
  return {{"net." + name, "old." + name}, name.ends_with(".weight") || name == "head"};
}

class Safetensors : public ::testing::Test {
 protected:
  Safetensors() {
    std::string name = ::testing::TempDir() + "/tessera-safetensors-XXXXXX";
    folder_ = mkdtemp(name.data());
  }
  ~Safetensors() override { fs::remove_all(folder_); }
  static std::string bytes_of(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  fs::path folder_;
};

TEST_F(Safetensors, ExportAndImportKeepValuesUnderEveryStrategy) {
  for (const int ranks : {1, 2, 3}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const Placed& placed : kOnePerPlacement) {
        SCOPED_TRACE(name_of(placed));
        fs::remove_all(folder_);
        run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
          const TinyOptions options{.tied_head = true, .frozen_first_block = true};
          const Strategy strategy = strategy_for(placed, nullptr, dtype);
          Values wanted;
          {
            Session session(mesh, strategy, options);
            session.train(0);
            export_safetensors(session.engine, folder_ / "out", {.names = other_names, .most_bytes = 1500});
            wanted = session.values();
            session.train(1);  // the Engine continues to train after the export
          }
          Session other(mesh, strategy, options);
          other.train(2);
          import_safetensors(other.engine, folder_ / "out", {.names = other_names});
          EXPECT_TRUE(all_same_bits(other.values(), wanted));
          export_safetensors(other.engine, folder_ / "again", {.names = other_names, .most_bytes = 1500});
          other.train(3);
          Tiny plain = make_tiny(options, false);
          if (dtype == DType::kBF16) plain->to(at::kBFloat16);
          import_safetensors(*plain, folder_ / "out", {.names = other_names});
          EXPECT_TRUE(all_same_bits(values_of(*plain), wanted));
        });
        std::size_t files = 0;
        for (const auto& each : fs::directory_iterator(folder_ / "out")) {
          ++files;
          EXPECT_EQ(bytes_of(each.path()), bytes_of(folder_ / "again" / each.path().filename())) << each.path();
        }
        EXPECT_GT(files, 2u);
      }
    }
  }
}

TEST_F(Safetensors, ImportedMastersEqualTheFilesValues) {
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    {
      Session exact(mesh, strategy_for(ShardingStrategy::kFullShard), {});
      exact.train(0);
      export_safetensors(exact.engine, folder_ / "exact");
    }
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard, nullptr, DType::kBF16), {});
    import_safetensors(session.engine, folder_ / "exact");
    const std::string saved = save_checkpoint(session.engine, folder_ / "checkpoints");
    if (!mesh.is_main()) return;
    auto files = *TensorFiles::open((folder_ / "exact").string(), "test");
    auto checkpoint = *SavedCheckpoint::open(saved, "test");
    for (const auto& [name, place] : files.tensors()) {
      std::vector<std::byte> wanted(static_cast<std::size_t>(place.tensor.bytes)), got(wanted.size());
      ASSERT_TRUE(files.read(place, 0, wanted).ok());
      ASSERT_TRUE(checkpoint->read(kMaster, name, 0, got).ok());
      EXPECT_EQ(got, wanted) << name;
    }
  });
}

struct WithBuffersImpl : torch::nn::Module {
  WithBuffersImpl() {
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    linear = register_module("linear", torch::nn::Linear(4, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return linear(norm(x)); }
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(WithBuffers);

TEST_F(Safetensors, ExportedBuffersAreRankZerosAndKeepTheirDtype) {
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
    strategy.units.classes = {};
    WithBuffers model, other;
    Engine engine(model, strategy, mesh), second(other, strategy, mesh);
    model->norm->running_mean.fill_(mesh.rank() + 1.0);
    model->norm->num_batches_tracked.fill_(7);
    export_safetensors(engine, folder_ / "out", {.dtype = DType::kBF16});
    import_safetensors(second, folder_ / "out");
    EXPECT_TRUE(at::equal(other->norm->running_mean, at::ones({4})));
    EXPECT_EQ(other->norm->num_batches_tracked.item<std::int64_t>(), 7);
  });
}

TEST_F(Safetensors, MismatchedFileIsNamedOnAllRanksAndChangesNothing) {
  run_ranks({.ranks = 3}, [&](const Mesh& mesh) {
    {
      Session wide(mesh, strategy_for(ShardingStrategy::kFullShard), {.width = 16, .blocks = 4});
      export_safetensors(wide.engine, folder_ / "wide");
      EXPECT_THAT(error_of([&] { export_safetensors(wide.engine, folder_ / "wide"); }), HasSubstr("exists already"));
    }
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard), {});
    const Values before = session.values();
    const std::string error = error_of([&] {
      import_safetensors(session.engine, folder_ / "wide", {.names = [](const std::string& name) {
                           return NameInFile{{name == "embedding.weight" ? "wte.weight" : name}};
                         }});
    });
    EXPECT_THAT(error, HasSubstr("\"embedding.weight\": missing; the file would call it wte.weight"));
    EXPECT_THAT(error, HasSubstr("\"blocks.1.norm.weight\": the model wants the shape [12], the file has [16]"));
    EXPECT_THAT(error, HasSubstr("\"blocks.3.norm.bias\": the model has no such tensor"));
    if (mesh.is_main()) std::ofstream(folder_ / "weights.pt") << "PK\x03\x04";
    EXPECT_THAT(error_of([&] { import_safetensors(session.engine, folder_ / "missing"); }), HasSubstr("No such file"));
    EXPECT_THAT(error_of([&] { import_safetensors(session.engine, folder_ / "weights.pt"); }),
                HasSubstr("scripts/to_safetensors.py"));
    EXPECT_TRUE(all_same_bits(session.values(), before));
    session.engine.backward(session.loss(0));
    EXPECT_THAT(usage_error_of([&] { import_safetensors(session.engine, folder_ / "wide"); }),
                HasSubstr("between backward and step"));
    EXPECT_THAT(usage_error_of([&] { export_safetensors(session.engine, folder_ / "x"); }),
                HasSubstr("between backward and step"));
    EXPECT_FALSE(fs::exists(folder_ / "x"));
  });
}

/// Returns `name` as the name in the file. The file may contain the embedding's tensor a second time, as "old_head".
NameInFile with_a_copy(const std::string& name) {
  NameInFile in_file{{name}};
  if (name == "embedding.weight") in_file.copies = {"old_head"};
  return in_file;
}

// A model ties its head. The file may have the same bits in one place or in two, but it must not have other bits.
TEST_F(Safetensors, TiedTensorStoredTwiceMustHaveOneValue) {
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    const Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
    for (const bool equal : {false, true}) {
      Tiny twice = make_tiny({}, false);
      {
        const at::NoGradGuard no_grad;
        if (equal) twice->head.copy_(twice->embedding->weight);
      }
      const at::Tensor wanted = twice->head.detach().clone();
      const std::string name = equal ? "equal" : "other";
      {
        Engine engine(twice, strategy, mesh);
        export_safetensors(engine, folder_ / name);
        export_safetensors(engine, folder_ / (name + "_renamed"), {.names = [](const std::string& own) {
                             return NameInFile{{own == "head" ? "old_head" : own}};
                           }});
      }
      const auto refused = ::testing::AllOf(HasSubstr("it has other values than"), HasSubstr("hint:"));
      Session tied(mesh, strategy, {.tied_head = true});
      Tiny plain = make_tiny({.tied_head = true}, false);
      const auto import_both = [&](const std::string& from, const TensorNames& names) {
        const Values before = tied.values(), plain_before = values_of(*plain);
        const std::string of_engine =
            error_of([&] { import_safetensors(tied.engine, folder_ / from, {.names = names}); });
        const std::string of_module = error_of([&] { import_safetensors(*plain, folder_ / from, {.names = names}); });
        if (equal) {
          EXPECT_EQ(of_engine + of_module, "");
          EXPECT_TRUE(at::equal(plain->head, wanted));
          EXPECT_TRUE(all_same_bits(tied.values(), values_of(*plain)));
        } else {
          EXPECT_THAT(of_engine, refused);
          EXPECT_THAT(of_module, refused);
          EXPECT_TRUE(all_same_bits(tied.values(), before));
          EXPECT_TRUE(all_same_bits(values_of(*plain), plain_before));
        }
      };
      import_both(name, {});
      import_both(name + "_renamed", with_a_copy);
    }
    // The file has one of the two names, and each of them is accepted.
    Session tied(mesh, strategy, {.tied_head = true});
    tied.train(0);
    const Values wanted = tied.values();
    for (const char* name : {"head", "embedding.weight"}) {
      export_safetensors(tied.engine, folder_ / (std::string("only_") + name),
                         {.names = [name](const std::string& own) {
                           return NameInFile{{own == "head" || own == "embedding.weight" ? name : own}};
                         }});
      Session other(mesh, strategy, {.tied_head = true});
      other.train(1);
      import_safetensors(other.engine, folder_ / (std::string("only_") + name));
      EXPECT_TRUE(all_same_bits(other.values(), wanted)) << name;
    }
  });
}

// No code of the program runs under the guards that an export and a save make.
TEST_F(Safetensors, GuardsOfTheEngineItselfHashNothing) {
  const auto spans_of = [](const std::function<void()>& body) {
    Trace::start();
    body();
    Trace::stop();
    return Trace::events_as_json(0);
  };
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard));
    session.train(0);
    constexpr char kHashes[] = "checks Gathered";
    EXPECT_THAT(spans_of([&] { session.values(); }), HasSubstr(kHashes));
    EXPECT_THAT(spans_of([&] { export_safetensors(session.engine, folder_ / "out"); }), Not(HasSubstr(kHashes)));
    EXPECT_THAT(spans_of([&] { save_weights(session.engine, folder_ / "weights.pt"); }), Not(HasSubstr(kHashes)));
  });
}

TEST_F(Safetensors, TwoTensorsOfOneNameAreNotExported) {
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard), {});
    const ExportOptions same{.names = [](const std::string&) { return NameInFile{{"x"}}; }};
    EXPECT_THAT(usage_error_of([&] { export_safetensors(session.engine, folder_ / "out", same); }), HasSubstr("\"x\""));
  });
}

}  // namespace safetensors_test
}  // namespace tessera::testing
