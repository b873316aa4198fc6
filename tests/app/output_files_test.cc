#include "app/output_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <fstream>
#include <iterator>

#include "runtime/base/status.h"

namespace tessera::app {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class OutputFiles : public ::testing::Test {
 protected:
  OutputFiles() {
    std::string name = ::testing::TempDir() + "/tessera-outputs-XXXXXX";
    folder_ = mkdtemp(name.data());
    write("data", "words");
  }
  ~OutputFiles() override { fs::remove_all(folder_); }

  void write(const std::string& name, const std::string& text) const { std::ofstream(folder_ / name) << text; }
  std::string read(const std::string& name) const {
    std::ifstream file(folder_ / name);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  ExitCode check(const std::string& name, Existing existing = Existing::kKept) const {
    return exit_code_of(check_outputs({{"--out", folder_ / name}}, {{"--data", folder_ / "data"}}, existing));
  }

  fs::path folder_;
};

TEST_F(OutputFiles, CheckingLeavesNothingBehind) {
  EXPECT_EQ(check("new/folder/file"), ExitCode::kOk);
  EXPECT_TRUE(fs::is_directory(folder_ / "new/folder"));
  EXPECT_TRUE(fs::is_empty(folder_ / "new/folder"));
}

TEST_F(OutputFiles, InputsAreRefusedUnderEveryName) {
  fs::create_hard_link(folder_ / "data", folder_ / "hard");
  fs::create_directory_symlink(folder_, folder_ / "here");
  for (const char* name : {"data", "./data", "hard", "here/data", "new/../data"})
    EXPECT_NE(check(name, Existing::kReplaced), ExitCode::kOk) << name;
  EXPECT_EQ(read("data"), "words");
}

TEST_F(OutputFiles, ExistingFilesAreKeptUnlessTheyMayBeReplaced) {
  write("old", "results");
  EXPECT_EQ(check("old"), ExitCode::kCannotCreate);
  EXPECT_EQ(check("old", Existing::kReplaced), ExitCode::kOk);
  EXPECT_EQ(read("old"), "results");  // until it is written
  EXPECT_EQ(write_output(folder_ / "old", "new", Existing::kReplaced, "test"), absl::OkStatus());
  EXPECT_EQ(read("old"), "new");
}

TEST_F(OutputFiles, AFileThatAppearsMeanwhileIsKeptAndNothingIsLost) {
  EXPECT_EQ(check("out"), ExitCode::kOk);
  write("out", "somebody else's");
  const absl::Status status = write_output(folder_ / "out", "ours", Existing::kKept, "test");
  EXPECT_EQ(exit_code_of(status), ExitCode::kCannotCreate);
  EXPECT_THAT(message_of(status), HasSubstr("out.partial"));
  EXPECT_EQ(read("out"), "somebody else's");
  EXPECT_EQ(read("out.partial"), "ours");
  EXPECT_EQ(check("out2"), ExitCode::kOk);
}

TEST_F(OutputFiles, LinksDevicesAndFoldersAreNoOutputs) {
  fs::create_symlink(folder_ / "data", folder_ / "link");
  fs::create_symlink(folder_ / "nowhere", folder_ / "dangling");
  for (const std::string name : {"link", "dangling", ".", "folder/"})
    EXPECT_EQ(check(name, Existing::kReplaced), ExitCode::kCannotCreate) << name;
  EXPECT_EQ(exit_code_of(check_outputs({{"--out", "/dev/full"}}, {}, Existing::kReplaced)), ExitCode::kCannotCreate);
  EXPECT_FALSE(fs::exists(folder_ / "nowhere"));
}

TEST_F(OutputFiles, AFolderOfInputsTakesNoOutputThatWouldBeReadAgain) {
  const auto check_in = [&](const char* name, std::vector<std::string> extensions) {
    return check_outputs({{"--out", folder_ / name}}, {{"--data", folder_, std::move(extensions)}}, Existing::kKept)
        .ok();
  };
  EXPECT_FALSE(check_in("metrics", {}));
  EXPECT_FALSE(check_in("runs/a.txt", {".txt"}));
  EXPECT_TRUE(check_in("runs/a.jsonl", {".txt"}));
}

}  // namespace
}  // namespace tessera::app
