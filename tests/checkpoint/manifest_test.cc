// Tests the manifest of a checkpoint: it is read back as it was written, damaged and hostile manifests are refused, and
// versions are distinguished.

#include "checkpoint/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "checkpoint/files/hash.h"
#include "checkpoint/manifest_line.h"
#include "runtime/base/status.h"
#include "tests/checkpoint/made_up.h"
#include "tests/offload/scratch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string some_text() {
  const ScratchFolder folder;
  return write_made_up_checkpoint(folder.path());
}

TEST(Manifest, WrittenManifestReadsBackTheSame) {
  const std::string text = some_text();
  const auto manifest = read_manifest("manifest.json", text);
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_EQ(write_manifest(*manifest), text);
  EXPECT_EQ(manifest->progress.rates, (std::vector<std::optional<double>>{1e-3, std::nullopt, 0.1 + 0.2}));
  EXPECT_EQ(manifest->progress.options, (std::vector<std::map<std::string, double>>{{{"eps", 0.1 + 0.2}}, {}}));
  EXPECT_EQ(manifest->progress.losses->window, (std::vector<double>{2.5, 0.1 + 0.2, 0}));
  EXPECT_EQ(manifest->progress.losses->spikes_in_a_row, 1);
  EXPECT_EQ(manifest->progress.samples_seen, 704);
  EXPECT_EQ(manifest->progress.noise_scale->square, -0.1 - 0.2);
  EXPECT_EQ(manifest->progress.noise_scale->variance, 7.5);
  EXPECT_EQ(manifest->progress.noise_scale->weight, 0.875);
  EXPECT_EQ(manifest->progress.noise_scale->batch, 64);
  EXPECT_EQ(manifest->residuals->microbatches, 3);
  EXPECT_EQ(manifest->residuals->momentum, 0.9);
  EXPECT_EQ(manifest->processor, (SavedProcessor{4, "AVX2", "avx512", "NVIDIA H200"}));
  for (const SavedProcessor& processor : {*manifest->processor, SavedProcessor{2, "DEFAULT", "generic", ""}})
    EXPECT_EQ(read_processor(to_json(processor)), processor);
  EXPECT_EQ(manifest->data, (SamplerCursor{1, 4000, 5000, 0xfedcba9876543210u, true}));
  EXPECT_EQ(manifest->parameters[0].numel, 700 * 512);
  EXPECT_EQ(manifest->parameters[2].strides, (std::vector<std::int64_t>{1, 5}));
  EXPECT_EQ(manifest->json_items.at("best"), R"({"loss": 1.5})");
  EXPECT_EQ(manifest->strategy, R"({"strategy": "FULL_SHARD"})");
}

TEST(Manifest, MissingNoiseKeyMeansTheFirstNoiseVersion) {
  const std::string text = some_text();
  EXPECT_EQ(read_manifest("manifest.json", text)->noise_version, kNoiseVersion);
  EXPECT_EQ(read_manifest("manifest.json", changed_manifest(text, "\"noise\"", "\"old\""))->noise_version, 1);
}

TEST(Manifest, MissingDefaultsKeyMeansTheFirstDefaults) {
  const std::string text = some_text();
  const auto version_in = [&](const std::string& from, const std::string& to) {
    return read_manifest("manifest.json", changed_manifest(text, from, to))->defaults_version;
  };
  EXPECT_EQ(version_in("\"defaults\": 1", "\"defaults\": 2"), 2);
  EXPECT_EQ(version_in("\"defaults\"", "\"old\""), 1);
}

TEST(Manifest, MissingProcessorKeyMeansThatNobodyKnowsIt) {
  const std::string text = changed_manifest(some_text(), "\"processor\"", "\"old\"");
  EXPECT_FALSE(read_manifest("manifest.json", text)->processor.has_value());
}

// Another program reads the manifest without knowing Tessera.
TEST(Manifest, ManifestIsPlainJson) {
  const auto json = nlohmann::json::parse(some_text());
  EXPECT_EQ(json.at("tessera_checkpoint"), 2);
  EXPECT_EQ(json.at("files").size(), 2u);
}

// This test covers fault F30 (docs/faults.md).
TEST(Manifest, EveryFlippedBitIsNoticed) {
  const std::string text = some_text();
  for (std::size_t i = 0; i < text.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = text;
      changed[i] = static_cast<char>(changed[i] ^ (1 << bit));
      const auto read = read_manifest("manifest.json", changed);
      ASSERT_FALSE(read.ok()) << "byte " << i << " bit " << bit;
      EXPECT_EQ(exit_code_of(read.status()), ExitCode::kCorruptData);
    }
  }
}

// This test covers fault F31 (docs/faults.md).
TEST(Manifest, EveryTruncationIsNoticed) {
  const std::string text = some_text();
  for (std::size_t size = 0; size < text.size(); ++size)
    ASSERT_FALSE(read_manifest("m", text.substr(0, size)).ok()) << size;
  EXPECT_FALSE(read_manifest("m", text + "\n").ok());
  EXPECT_FALSE(read_manifest("m", text + std::string(1, '\0')).ok());
}

// This test covers fault F35 (docs/faults.md).
TEST(Manifest, AnotherVersionIsNamed) {
  const std::string text = some_text(), lines = text.substr(text.find('\n') + 1);
  for (const std::int64_t version : {0, 3, 17}) {
    const auto read = read_manifest("m", manifest_line(version, checkpoint_hash(lines)) + lines);
    ASSERT_FALSE(read.ok());
    EXPECT_THAT(message_of(read.status()),
                AllOf(HasSubstr("version " + std::to_string(version)), HasSubstr("reads versions 1 to 2")));
  }
}

// A manifest that Tessera 0.1 can read is written in the form of Tessera 0.1.
TEST(Manifest, ManifestWithoutFrozenStatesHasTheOldVersion) {
  Manifest manifest = *read_manifest("manifest.json", some_text());
  EXPECT_TRUE(manifest.parameters[2].keeps_states());
  EXPECT_TRUE(manifest.parameters[2].has_state("exp_avg"));
  manifest.parameters[2].keeps_master = false;
  EXPECT_EQ(manifest.version(), 2);
  manifest.parameters[2].states.reset();
  const std::string text = write_manifest(manifest);
  EXPECT_EQ(nlohmann::json::parse(text).at("tessera_checkpoint"), 1);
  const Manifest read = *read_manifest("manifest.json", text);
  EXPECT_FALSE(read.parameters[2].keeps_states());
  EXPECT_FALSE(read.parameters[2].has_state("exp_avg"));
  EXPECT_TRUE(read.parameters[0].has_state("exp_avg"));
}

// Fault F37 (docs/faults.md): these manifests have the right hash.
TEST(Manifest, HostileManifestsAreRefused) {
  const std::string text = some_text();
  ASSERT_TRUE(read_manifest("m", changed_manifest(text, R"("step":)", R"("step":)")).ok());
  struct Change {
    std::string from, to, what;
  };
  const std::string step = "\"step\": ";
  const Change changes[] = {
      {"\"name\":\"rank-00000.safetensors\"", "\"name\":\"../rank-00000.safetensors\"", "plain file name"},
      {"\"name\":\"rank-00000.safetensors\"", "\"name\":\"/etc/passwd\"", "plain file name"},
      {"\"name\":\"rank-00000.safetensors\"", "\"name\":\"..\"", "plain file name"},
      {"\"name\":\"rank-00000.safetensors\"", "\"name\":\"\"", "plain file name"},
      {"\"name\":\"rank-00000.safetensors\"", "\"name\":\"a\\u0000b\"", "plain file name"},
      {"\"name\":\"rank-00000.safetensors\"", "\"name\":\"rank-00001.safetensors\"", "given twice"},
      {"\"name\":\"a.weight\"", "\"name\":\"frozen\"", "given twice"},
      {"\"name\":\"count\"", "\"name\":\"running_mean\"", "given twice"},
      {"\"shape\":[700,512]", "\"shape\":[3037000500,3037000500]", "too large"},
      {"\"shape\":[700,512]", "\"shape\":[-700,512]", "/shape"},
      {"\"shape\":[700,512]", "\"shape\":700", "/shape"},
      {"\"shape\":[700,512]", "\"shape\":[700,512],\"state_shapes\":{\"exp_avg\":[3037000500,3037000500]}",
       "too large"},
      {"\"shape\":[700,512]", "\"shape\":[700,512],\"state_shapes\":{\"exp_avg\":[-1]}", "/state_shapes/exp_avg"},
      {"\"shape\":[700,512]", "\"shape\":[700,512],\"state_shapes\":{\"sums\":[1]}", "not among \"states\""},
      {"\"shape\":[700,512]", "\"shape\":[700,512],\"state_shapes\":[[1]]", "wanted an object"},
      {"\"keeps_master\":true", "\"keeps_master\":1", "/keeps_master"},
      {"\"states\":[\"exp_avg\"", "\"states\":[\"sums\"", "not among \"states\""},
      {"\"step\": 12", "\"step\": -12", "/step"},
      {"\"noise\": " + std::to_string(kNoiseVersion), "\"noise\": 0", "/noise"},
      {"\"step\": 12", "\"step\": 1.2e1", "/step"},
      {"\"samples_seen\": 704", "\"samples_seen\": -704", "/samples_seen"},
      {"\"step\": 12", "\"step\": 99999999999999999999", "/step"},
      {"\"step\": 12", "\"step\": 12, \"step\": 13", "given twice"},
      {"\"step\": 12", "\"steps\": 12", "/step"},
      {"\"ranks\": 2", "\"ranks\": 3", "/mesh"},
      {"\"ranks\":[1]", "\"ranks\":[2]", "/ranks"},
      {"\"generators\": 2", "\"generators\": 3", "/generators"},
      {"\"format\":\"8bit\"", "\"format\":\"4bit\"", "/format"},
      {"\"name\":\"exp_avg\"", "\"name\":\"exp|avg\"", "'|'"},
      {"\"dtype\":\"I64\"", "\"dtype\":\"C64\"", "/dtype"},
      {"\"scale\":1024.5", "\"scale\":-1", "/loss_scale/scale"},
      {"\"rates\": [0.001", "\"rates\": [\"x\"", "/rates"},
      {"\"options\": [", "\"options\": [7, ", "/options"},
      {"\"window\":[2.5", "\"window\":[-1", "/losses/window"},
      {"\"spikes_in_a_row\":1", "\"spikes_in_a_row\":1.5", "/losses/spikes_in_a_row"},
      {"\"variance\":7.5", "\"variance\":\"x\"", "/noise_scale/variance"},
      {"\"weight\":0.875", "\"weight\":1.5", "/noise_scale/weight"},
      {"\"batch\":64", "\"batch\":-1", "/noise_scale/batch"},
      {"\"threads\":4", "\"threads\":-4", "/processor/threads"},
      {"\"libtorch\":\"AVX2\"", "\"libtorch\":2", "/processor/libtorch"},
      {"\"shuffle\":true", "\"shuffle\":1", "/data/shuffle"},
      {"\"chunk_bytes\":1048576", "\"chunk_bytes\":0", "/chunk_bytes"},
      {"\"header_bytes\":", "\"header_bytes\":-", "/header_bytes"},
      {"\"chunk_hashes\":[\"", "\"chunk_hashes\":[\"0", "/chunk_hashes"},
      {"\"chunk_hashes\":[", "\"chunk_hashes\":[\"0123456789abcdef\",", "hashes for"},
      {"\"json_items\": {\"best\":", "\"json_items\": {\"best\":{},\"worst\":", "/json_items"},
      {"\"units\": [\"(root)\"", "\"units\": [1", "/units"},
      {"\"mesh\": {", "\"mesh\": [], \"net\": {", "/mesh"}};
  for (const Change& change : changes) {
    const auto read = read_manifest("there/manifest.json", changed_manifest(text, change.from, change.to));
    ASSERT_FALSE(read.ok()) << change.to;
    EXPECT_EQ(exit_code_of(read.status()), ExitCode::kCorruptData) << change.to;
    EXPECT_THAT(message_of(read.status()), AllOf(HasSubstr("there/manifest.json"), HasSubstr(change.what)))
        << change.to;
  }
  const std::string deep = std::string(1000000, '[');
  EXPECT_FALSE(read_manifest("m", changed_manifest(text, "\"units\": [", "\"units\": [" + deep)).ok());
}

TEST(Manifest, EveryRequiredKeyIsNeeded) {
  const std::string text = some_text();
  const auto json = nlohmann::ordered_json::parse(text);
  for (const auto& [key, value] : json.items()) {
    // A checkpoint need not have these keys.
    if (key == "data" || key == "rates" || key == "options" || key == "losses" || key == "loss_scale" ||
        key == "noise_scale" || key == "noise" || key == "defaults" || key == "residuals" || key == "samples_seen" ||
        key == "processor" || key.starts_with("tessera") || key.starts_with("xxh3"))
      continue;
    const std::string at = "\"" + key + "\": ";
    EXPECT_FALSE(read_manifest("m", changed_manifest(text, at, "\"x" + key + "\": ")).ok()) << key;
  }
}

TEST(Manifest, OnlyPlainFileNamesAreAccepted) {
  for (const char* name : {"rank-00000.safetensors", "a", "A_9.-"}) EXPECT_TRUE(is_plain_name(name)) << name;
  for (const char* name : {"", ".", "..", ".a", "a/b", "/a", "a b", "a\\b", "\xc3\xa9"})
    EXPECT_FALSE(is_plain_name(name)) << name;
  EXPECT_FALSE(is_plain_name(std::string(256, 'a')));
}

}  // namespace
}  // namespace tessera
