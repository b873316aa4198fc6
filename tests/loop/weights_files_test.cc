// Tests the kinds of weights files that people have. Each way in which PyTorch's programs write weights gives the
// module the same bits. If a file has no weights, the error says what the file is, and has its own remedy. Names that
// do not fit are explained.

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>

#include <filesystem>

#include "engine/weights/weights_kind.h"
#include "tessera/error.h"
#include "tessera/weights.h"
#include "tests/oracle/child.h"
#include "tests/support/session.h"
#include "tests/support/stderr_of.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// Returns a model with other values than make_tiny's.
Tiny other_values(const TinyOptions& options = {}) {
  const at::NoGradGuard no_grad;
  Tiny model = make_tiny(options, false);
  for (const at::Tensor& parameter : model->parameters()) parameter.mul_(1.5).add_(0.125);
  return model;
}

class WeightsFiles : public ::testing::Test {
 protected:
  /// Returns the text of the error that loading a file throws, or "accepted". Checks that the error has exit code 65
  /// and the file's name, and that the model keeps its values.
  std::string refusal(const fs::path& path, const LoadOptions& options = {}) {
    Tiny model = make_tiny({}, false);
    const Values before = values_of(*model);
    try {
      load_weights(model, path, options);
      return "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kCorruptData) << error.message();
      EXPECT_THAT(error.message(), AllOf(HasSubstr(path.filename().string()), HasSubstr("hint: ")));
      EXPECT_TRUE(all_same_bits(values_of(*model), before));
      return error.message();
    }
  }

  TestFolder folder_;
};

struct Way {
  const char* file;
  LoadOptions options = {};
};

/// The files that tests/oracle/rewrite_weights.py writes in one run.
class WeightsOfPython : public WeightsFiles {
 protected:
  static void SetUpTestSuite() {
    if (!oracle::python_has_torch()) return;
    folder_of_python = new TestFolder;
    written = new Tiny(other_values());
    const fs::path path = *folder_of_python / "source.pt";
    c10::Dict<std::string, at::Tensor> weights;
    for (const auto& item : (*written)->named_parameters()) weights.insert(item.key(), item.value().detach());
    const std::vector<char> bytes = torch::pickle_save(weights);
    folder_of_python->write("source.pt", {bytes.begin(), bytes.end()});
    const auto said = oracle::run_python("rewrite_weights.py", {path.string(), folder_of_python->path().string()},
                                         folder_of_python->path(), 120);
    ASSERT_TRUE(said.ok()) << said.status();
  }
  static void TearDownTestSuite() {
    delete written;
    delete folder_of_python;
  }
  void SetUp() override {
    if (!oracle::python_has_torch()) GTEST_SKIP() << "Python without torch";
  }
  static fs::path file(const std::string& name) { return *folder_of_python / name; }

  static inline TestFolder* folder_of_python = nullptr;
  static inline Tiny* written = nullptr;
};

TEST_F(WeightsOfPython, FilesOfEveryPythonFormatAreRead) {
  const std::vector<Way> ways = {{"plain.pt"},
                                 {"protocol_4.pt"},
                                 {"model.pt"},
                                 {"trainer.pt"},
                                 {"trainer.pt", {.part = "state_dict"}},
                                 {"deep.pt"},
                                 {"deep.pt", {.part = "runs/0/checkpoint/weights"}},
                                 {"tree.pt"},
                                 {"views.pt"},
                                 {"parallel.pt", {.without = {"module."}}},
                                 {"parallel.pt", {.without = {"module"}}},
                                 {"compiled.pt", {.without = {"_orig_mod."}}},
                                 {"prefixed.pt", {.without = {"net.inner."}}},
                                 {"averaged.pt", {.part = "ema"}},
                                 {"beside.pt", {.ignored = {"epoch"}}},
                                 {"one.safetensors"},
                                 {"safetensors"},
                                 {"safetensors/model.safetensors.index.json"},
                                 {"bin"},
                                 {"bin/pytorch_model.bin.index.json"}};
  const Values wanted = values_of(**written);
  for (const Way& way : ways) {
    SCOPED_TRACE(way.file);
    Tiny model = make_tiny({}, false);
    load_weights(model, file(way.file), way.options);
    EXPECT_TRUE(all_same_bits(values_of(*model), wanted));
    const Placed placements[] = {{ShardingStrategy::kFullShard}, {ShardingStrategy::kFullShard, /*shared=*/true}};
    on_placements(placements, 2, [&](const Mesh& mesh, const Strategy& strategy) {
      Session session(mesh, strategy);
      session.train(0);
      load_weights(session.engine, file(way.file), way.options);
      EXPECT_TRUE(all_same_bits(session.values(), wanted));
    });
  }
}

TEST_F(WeightsOfPython, OtherKindsOfFilesAreNamedWithTheirRemedy) {
  for (const char* name : {"legacy.pt", "legacy_4.pt"}) {
    EXPECT_THAT(refusal(file(name)),
                AllOf(HasSubstr("PyTorch before 1.6"), HasSubstr("torch.load(path, weights_only=True)")));
  }
  EXPECT_THAT(refusal(file("pickled_module.pt")),
              AllOf(HasSubstr("the class Linear"), HasSubstr("model.state_dict()")));
  EXPECT_THAT(refusal(file("tensor.pt")), HasSubstr("it holds a tensor"));
  EXPECT_THAT(refusal(file("script.pt")),
              AllOf(HasSubstr("TorchScript"), HasSubstr("torch.jit.load(path).state_dict()")));
  EXPECT_THAT(refusal(file("frozen.pt")), HasSubstr("TorchScript"));
  EXPECT_THAT(refusal(file("arrays.npz")), HasSubstr("numpy.savez"));
  EXPECT_THAT(refusal(file("array.npy")), HasSubstr("one array of numpy"));
  EXPECT_THAT(refusal(file("short.pt")), HasSubstr("cut short"));
  EXPECT_THAT(refusal(file("of_files.zip")), HasSubstr("unpack it with unzip"));
}

TEST_F(WeightsOfPython, PrefixedNamesAreExplainedWithTheirRemedy) {
  EXPECT_THAT(refusal(file("parallel.pt")),
              HasSubstr("hint: leave \"module.\" out of all names by LoadOptions::without"));
  EXPECT_THAT(refusal(file("compiled.pt")), HasSubstr("leave \"_orig_mod.\" out of all names"));
  EXPECT_THAT(refusal(file("prefixed.pt")), HasSubstr("leave \"net.inner.\" out of all names"));
  EXPECT_THAT(refusal(file("misspelt.pt")),
              HasSubstr("\"blocks.0.norm.weight\": missing in the file, and it has \"blocks.0.norm.wieght\""));
  EXPECT_THAT(refusal(file("beside.pt")),
              AllOf(HasSubstr("\"epoch\": a number, and no tensor"), HasSubstr("LoadOptions::ignored")));
  EXPECT_THAT(refusal(file("averaged.pt")),
              AllOf(HasSubstr("more than one of them has names of the model"), HasSubstr("\"model\": 20 tensors"),
                    HasSubstr("\"ema\": 20 tensors"), HasSubstr("LoadOptions::part")));
  EXPECT_THAT(refusal(file("averaged.pt"), {.part = "average"}),
              AllOf(HasSubstr("no set of weights \"average\""), HasSubstr("\"ema\": 20 tensors")));
  EXPECT_THAT(refusal(file("trainer.pt"), {.part = "epoch"}), HasSubstr("no set of weights \"epoch\""));
  EXPECT_THAT(refusal(file("parallel.pt"), {.without = {"module.blocks.0.norm", "module.blocks.1.norm"}}),
              HasSubstr("twice"));
}

TEST_F(WeightsFiles, FilesOfTorchSaveInCppAreRead) {
  const Tiny plain = other_values();
  const Values wanted = values_of(*plain);
  const auto expect_read = [&](const fs::path& path, const LoadOptions& options = {}) {
    Tiny model = make_tiny({}, false);
    const std::string said = stderr_of([&] {
      set_log_level(LogLevel::kInfo);
      load_weights(model, path, options);
    });
    EXPECT_TRUE(all_same_bits(values_of(*model), wanted));
    return said;
  };
  const std::string path = (folder_ / "file.pt").string();
  torch::save(plain, path);
  EXPECT_THAT(expect_read(path), Not(HasSubstr("not used")));
  // This is a checkpoint of a C++ program: the model, its optimizer and a number in one archive.
  torch::optim::AdamW optimizer(plain->parameters(), torch::optim::AdamWOptions().weight_decay(0));
  for (const at::Tensor& parameter : plain->parameters()) parameter.mutable_grad() = at::zeros_like(parameter);
  optimizer.step();
  torch::serialize::OutputArchive archive, of_model(archive.compilation_unit()),
      of_optimizer(archive.compilation_unit());
  plain->save(of_model);
  optimizer.save(of_optimizer);
  archive.write("model", of_model);
  archive.write("optimizer", of_optimizer);
  archive.write("step", c10::IValue(std::int64_t{7}));
  archive.save_to(path);
  const auto tells_the_rest = AllOf(HasSubstr("not used: "), HasSubstr("optimizer"));
  EXPECT_THAT(expect_read(path), tells_the_rest);
  EXPECT_THAT(expect_read(path, {.part = "model"}), tells_the_rest);
  EXPECT_THAT(refusal(path, {.part = "optimizer"}), HasSubstr("missing in the file"));
  // The archive also has the model's tensors.
  torch::serialize::OutputArchive mixed, beside(mixed.compilation_unit());
  plain->save(mixed);
  optimizer.save(beside);
  mixed.write("optimizer", beside);
  mixed.save_to(path);
  EXPECT_THAT(refusal(path), HasSubstr("the model has no such tensor"));
  EXPECT_THAT(expect_read(path, {.ignored = {"optimizer.*"}}), tells_the_rest);
}

TEST_F(WeightsFiles, FilesOfUnnamedTensorsAreRead) {
  const std::vector<at::Tensor> tensors = {at::arange(3, at::kFloat), at::ones({2, 2}, at::kBFloat16)};
  const std::string path = (folder_ / "tensors.pt").string();
  for (const bool pickled : {false, true}) {
    if (pickled) {
      const std::vector<char> bytes = torch::pickle_save(tensors);
      folder_.write("tensors.pt", {bytes.begin(), bytes.end()});
    } else {
      torch::save(tensors, path);
    }
    std::vector<std::pair<std::string, at::Tensor>> into = {{"0", at::zeros({3})}, {"1", at::zeros({2, 2})}};
    load_weights(into, path);
    EXPECT_TRUE(at::equal(into[0].second, tensors[0]));
    EXPECT_TRUE(at::equal(into[1].second, tensors[1]));
    EXPECT_EQ(into[1].second.scalar_type(), at::kBFloat16);
  }
  torch::save(tensors[0], path);
  const std::vector<std::pair<std::string, at::Tensor>> one = {{"0", at::zeros({3})}};
  load_weights(one, path);
  EXPECT_TRUE(at::equal(one[0].second, tensors[0]));
}

TEST_F(WeightsFiles, OtherKindsAreNamedByTheirFirstBytes) {
  using std::string_literals::operator""s;
  const std::pair<std::string, const char*> rows[] = {
      {"", "is empty"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"},
      {"\n<!DOCTYPE html><html>", "web page"},
      {"<HTML><body>", "web page"},
      {std::string(257, '\0') + "ustar" + std::string(250, '\0'), "tar archive"},
      {"\x1f\x8b\x08\x00"s, "gunzip"},
      {"BZh91AY", "bzip2"},
      {"\xfd\x37zXZ\x00\x00"s, "unxz"},
      {"\x28\xb5\x2f\xfd\x00"s, "unzstd"},
      {"\x89HDF\r\n\x1a\n\x00"s, "HDF5"},
      {"GGUF\x03\x00\x00\x00"s, "GGUF"},
      {"\x08\x07\x12\x07pytorch"s, "ONNX"},
      {"\x1c\x00\x00\x00TFL3"s, "TensorFlow Lite"},
      {"\x80\x04\x95\x00"s, "pickle that torch.save did not write"},
      {R"({"a": 1})", "JSON"},
      {"hello", "is a text"},
      {"\x01\x02\x03\x04"s, "of no kind that is known here"},
      {"PK\x05\x06"s + std::string(18, '\0'), "zip archive that torch.save did not write"},
      {"\x10\x00\x00\x00\x00\x00\x00\x00{}"s, "safetensors"},
  };
  for (const auto& [bytes, what] : rows) EXPECT_THAT(refusal(folder_.write("file.pt", bytes)), HasSubstr(what));
}

TEST_F(WeightsFiles, FoldersAndIndexesAreNamed) {
  const auto refused = [&](const std::string& name) { return refusal(folder_.path() / name); };
  for (const auto& [file, what] :
       {std::pair(".metadata", "torch.distributed.checkpoint"), std::pair("manifest.json", "checkpoint of Tessera"),
        std::pair("latest", "checkpoints"), std::pair("saved_model.pb", "TensorFlow"),
        std::pair("data.pkl", "unpacked"), std::pair("adapter_config.json", "peft")}) {
    folder_.write(std::string("d/") + file, "{}");
    EXPECT_THAT(refused("d"), HasSubstr(what));
    fs::remove_all(folder_ / "d");
  }
  fs::create_directory(folder_ / "d");
  Tiny model = make_tiny({}, false);
  EXPECT_THAT(error_of(ExitCode::kNoInput, [&] { load_weights(model, folder_ / "d"); }), HasSubstr("without weights"));
  // An index may name only files in its own folder, and the files must exist.
  torch::save(model, (folder_ / "a.bin").string());
  const auto with = [&](const std::string& map) {
    folder_.write("pytorch_model.bin.index.json", R"({"weight_map":)" + map + "}");
    return refused("pytorch_model.bin.index.json");
  };
  EXPECT_THAT(with(R"({"head": "../a.bin"})"), HasSubstr("of this folder"));
  EXPECT_THAT(with(R"({"tail": "a.bin"})"), HasSubstr("\"tail\" is in a.bin, and it is not"));
  EXPECT_EQ(with(R"({"head": "a.bin"})"), "accepted");
  fs::copy_file(folder_ / "a.bin", folder_ / "b.bin");
  EXPECT_THAT(with(R"({"head": "a.bin", "embedding.weight": "b.bin"})"), HasSubstr(" in b.bin and in a.bin"));
}

TEST_F(WeightsFiles, PrefixesThatMergeTwoNamesAreRefused) {
  const std::vector<std::pair<std::string, at::Tensor>> into = {{"a.w", at::zeros({1})},
                                                                {"module.a.w", at::zeros({1})}};
  const std::string path = (folder_ / "w.pt").string();
  torch::save(at::ones({1}), path);
  EXPECT_THAT(usage_error_of([&] { load_weights(into, path, {.without = {"module."}}); }),
              HasSubstr("a.w and module.a.w of the model are both a.w"));
}

TEST(WeightsKind, DamagedZipDirectoryIsReadWithinItsBounds) {
  const auto names_of = [](const std::string& bytes) {
    return names_in_zip(
        [&](std::uint64_t place, std::size_t count, char* to) {
          if (place > bytes.size() || count > bytes.size() - place) return false;
          bytes.copy(to, count, place);
          return true;
        },
        bytes.size());
  };
  TestFolder folder;
  const std::string path = (folder / "w.pt").string();
  torch::save(at::ones({1}), path);
  const std::string bytes = TestFolder::content_of(path);
  ASSERT_TRUE(names_of(bytes));
  EXPECT_THAT(*names_of(bytes), ::testing::Contains(::testing::EndsWith("/data.pkl")));
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    std::string changed = bytes;
    changed[i] = static_cast<char>(changed[i] ^ (1 << (i % 8)));
    static_cast<void>(names_of(changed));
    EXPECT_FALSE(names_of(bytes.substr(0, i))) << i;
  }
}

}  // namespace
}  // namespace tessera::testing
