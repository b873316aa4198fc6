// Tests `tessera replay`: a step of a run on several ranks is repeated on one rank and on two, with the same bits. If
// something went wrong in the step, the replay names it.

#include <gmock/gmock.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>

#include "tests/support/workplace.h"

namespace tessera::testing {
namespace replay_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Several ranks make and record four steps of two microbatches a rank. A checkpoint follows each step.
class ReplayedRun : public Workplace {
 protected:
  std::string recording() const {
    return strategy("FULL_SHARD",
                    R"(, "reproducible": true, "record_hashes": {"every": 1, "file": ")" + path("hashes") + "\"}");
  }
  Words arguments(const std::string& strategy, const Words& more = {}) const {
    return train(strategy, "metrics.jsonl",
                 Words{"--steps", "4", "--checkpoint-dir", path("saved"), "--every-steps", "1"} + more);
  }
  /// Returns the command line that replays step `step` of the run with the command line `of`, from the checkpoint
  /// `from`.
  static Words replay(const std::string& from, int step, const Words& options, const Words& of) {
    return Words{TESSERA_PROGRAM, "replay", "--from", from, "--step", std::to_string(step)} + options + Words{"--"} +
           of;
  }
  std::string saved(int step) const { return path("saved/step-00000000000" + std::to_string(step)); }
  Ended fail(const Words& command, int code) const {
    Ended ended = run_program(command, path("run"));
    EXPECT_EQ(ended.code, code) << ended.out << ended.err;
    return ended;
  }
};

/// Returns the last `count` lines of a text.
std::string last_lines(const std::string& text, int count) {
  std::size_t begin = text.size();
  for (int i = 0; i < count && begin > 0; ++i) begin = text.rfind('\n', begin - 2) + 1;
  return text.substr(begin);
}

/// Replaces a token's row of the embedding by NaN, in a file of safetensors. The word 0x7fc07fc0 is NaN in fp32, and
/// each of its halves is NaN in bf16.
void plant_nan(const std::string& file, unsigned char token) {
  std::string bytes = read_file(file);
  std::uint64_t length = 0;
  ASSERT_GT(bytes.size(), sizeof length);
  std::memcpy(&length, bytes.data(), sizeof length);
  const auto header = nlohmann::json::parse(bytes.substr(sizeof length, length), nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(header.is_object() && header.contains("transformer.wte.weight")) << header.dump();
  const nlohmann::json& embedding = header.at("transformer.wte.weight");
  const std::size_t begin = embedding.at("data_offsets").at(0), end = embedding.at("data_offsets").at(1);
  const std::size_t row = (end - begin) / embedding.at("shape").at(0).get<std::size_t>();
  const std::size_t first = sizeof length + length + begin + row * token;
  for (std::size_t i = 0; i < row; ++i) bytes[first + i] = static_cast<char>(i % 2 == 0 ? 0xc0 : 0x7f);
  write_file(file, bytes);
}

/// Returns the place that an error names, such as "in step 2, microbatch 5 (of 0 to 7)".
std::string place_in(const std::string& text) {
  const std::size_t begin = text.find("in step "), end = text.find(" is the first that goes wrong");
  return begin < end && end != std::string::npos ? text.substr(begin, end - begin) : "no place in: " + text;
}

TEST_F(ReplayedRun, StepOfEightRanksHasTheSameBitsOnOneAndOnTwo) {
  const Words run_again = arguments(recording());
  run(launch(8) + run_again);
  const std::string recorded = read_file(path("hashes"));
  ASSERT_EQ(std::ranges::count(recorded, '\n'), 4);
  const std::string metrics = read_file(path("metrics.jsonl"));
  const Ended last = run(replay(path("saved"), 4, {}, run_again));
  EXPECT_THAT(last.out, HasSubstr(last_lines(recorded, 1)));
  EXPECT_THAT(last.err, AllOf(HasSubstr("step 4 is made again from " + saved(3)),
                              HasSubstr("step 4 has the recorded loss, norm and hashes of all")));
  const Ended two = run(replay(saved(2), 4, {"--ranks", "2", "--find", "divergence"}, run_again));
  EXPECT_THAT(two.out, AllOf(HasSubstr(last_lines(recorded, 1)), HasSubstr("\n{\"step\":3,")));
  EXPECT_THAT(two.err, AllOf(HasSubstr("step 3 has the recorded loss"), HasSubstr("step 4 has the recorded loss")));
  // The words `tessera train` may be left out, and a replay may begin at the run's start.
  const Ended start = run(replay("none", 1, {}, Words(run_again.begin() + 2, run_again.end())));
  EXPECT_THAT(start.err, HasSubstr("step 1 has the recorded loss"));
  // The checkpoint and the hashes have the number of threads of a rank.
  const std::string threads = std::to_string(read_lines(path("hashes"))[0].at("threads").get<int>() + 1);
  const Words with_more = {"env", "OMP_NUM_THREADS=" + threads};
  EXPECT_THAT(fail(with_more + replay(saved(3), 4, {}, run_again), 78).err,
              HasSubstr("threads " + threads + ", the run before has "));
  const Ended allowed =
      run_program(with_more + replay(saved(3), 4, {"--allow-other-processor"}, run_again), path("run"));
  EXPECT_THAT(allowed.err, HasSubstr("Its bits are others from here on"));
  EXPECT_EQ(read_file(path("hashes")), recorded);
  EXPECT_EQ(read_file(path("metrics.jsonl")), metrics) << "a replay writes nothing";
}

TEST_F(ReplayedRun, FirstStepThatDiffersIsNamed) {
  const std::string file = recording();
  run(launch(4) + arguments(file));
  std::string text = read_file(file);
  const auto at = text.find(R"("lr": 0.01)");
  ASSERT_NE(at, std::string::npos);
  const std::string other = path("other.json");
  write_file(other, text.replace(at, 10, R"("lr": 0.02)"));
  const Ended ended = fail(replay(saved(2), 4, {"--find", "divergence"}, arguments(other)), 65);
  EXPECT_THAT(ended.err, AllOf(HasSubstr("step 3 differs from " + path("hashes")), HasSubstr("hint:")));
}

// Every 200th byte of the text is a token whose row of the embedding is NaN. Some microbatches therefore go wrong, and
// other microbatches do not.
TEST_F(ReplayedRun, PlantedNaNIsNamedWithItsMicrobatchAndOperator) {
  std::string text = read_file(path("text"));
  for (std::size_t i = 0; i < text.size(); i += 200) text[i] = '~';
  write_file(path("text"), text);
  const std::string plain = strategy("NO_SHARD");
  run(train(plain, "first.jsonl", {"--steps", "1", "--export-hf", path("hf")}));
  ASSERT_NO_FATAL_FAILURE(plant_nan(path("hf/model.safetensors"), '~'));
  const Words from_hf = {"--init-from", path("hf"), "--tokenizer", "bytes"};
  run(launch(4) + arguments(recording(), from_hf));
  const std::vector<nlohmann::json> records = read_lines(path("hashes"));
  const auto wrong =
      std::ranges::find_if(records, [](const nlohmann::json& line) { return line.at("loss").is_null(); });
  ASSERT_NE(wrong, records.end());
  const int step = wrong->at("step").get<int>();
  const std::string from = step == 1 ? "none" : path("saved");
  // If a run recorded nothing, the checkpoint or --microbatches determines how the run is replayed.
  std::filesystem::remove(path("hashes"));
  Words options = {"--find", "nonfinite"};
  if (step == 1) options = options + Words{"--microbatches", "8"};
  const Words command = arguments(recording(), from_hf);
  const Ended one = fail(replay(from, step, options, command), 65);
  EXPECT_THAT(one.err,
              AllOf(HasSubstr("in step " + std::to_string(step) + ", microbatch "), HasSubstr("(of 0 to 7)"),
                    ::testing::ContainsRegex("that of aten::(index_select|embedding)"), HasSubstr("reads unit")));
  const Ended two = fail(replay(from, step, options + Words{"--ranks", "2"}, command), 65);
  EXPECT_EQ(place_in(two.err), place_in(one.err));
}

TEST_F(ReplayedRun, RequestsThatCannotBeMetAreRefusedWithWhatToDo) {
  const Words of = arguments(recording());
  const auto refused = [&](const Words& command, int code, const std::string& wanted) {
    EXPECT_THAT(fail(command, code).err, AllOf(HasSubstr(wanted), HasSubstr("hint:")));
  };
  refused({TESSERA_PROGRAM, "replay", "--from", "none", "--step", "1"}, 64, "behind \"--\"");
  refused(replay("none", 1, {"--fnd", "nonfinite"}, of), 64, "has no option --fnd");
  refused(replay("none", 1, {}, of + Words{"--stratgy", "x"}), 64, "`tessera train` has no option --stratgy");
  refused(replay("none", 5, {}, of), 64, "the run ends with --steps 4");
  refused(replay("none", 1, {}, arguments(strategy("NO_SHARD"))), 78, "\"reproducible\": true");
  refused(replay("none", 1, {"--find", "divergence"}, of), 64, "nothing to compare with");
  refused(replay("none", 1, {}, of), 64, "--microbatches");
  refused(replay(path("missing"), 1, {}, of), 66, path("missing"));
  refused(replay("none", 1, {"--hashes", path("missing")}, of), 66, path("missing"));
  run(train(path("FULL_SHARD.json"), "saved.jsonl", {"--steps", "2", "--checkpoint-dir", path("saved")}));
  refused(replay(path("saved"), 2, {}, of), 66, "there are: step-000000000002");
  refused(replay(saved(2), 2, {}, of), 64, "holds step 2 already");
  refused(replay("none", 2, {}, of + Words{"--resume", saved(2)}), 64, "--resume " + saved(2) + " holds step 2");
}

}  // namespace replay_test
}  // namespace tessera::testing
