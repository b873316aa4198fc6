// Tests the checks of output files: an input or an existing file is never overwritten unless replacing it is allowed.

#include "workshop/app/output_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/base/status.h"
#include "tests/support/test_folder.h"

namespace tessera::app {
namespace output_files_test {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class OutputFiles : public ::testing::Test {
 protected:
  OutputFiles() { folder_.write("data", "words"); }

  ExitCode check(const std::string& name, Existing existing = Existing::kKept) const {
    return exit_code_of(check_outputs({{"--out", folder_ / name}}, {{"--data", folder_ / "data"}}, existing));
  }

  TestFolder folder_;
};

TEST_F(OutputFiles, CheckMakesFoldersButNoFile) {
  EXPECT_EQ(check("new/folder/file"), ExitCode::kOk);
  EXPECT_TRUE(fs::is_directory(folder_ / "new/folder"));
  EXPECT_TRUE(fs::is_empty(folder_ / "new/folder"));
}

TEST_F(OutputFiles, InputFileIsRefusedAsOutputUnderEveryName) {
  fs::create_hard_link(folder_ / "data", folder_ / "hard");
  fs::create_directory_symlink(folder_.path(), folder_ / "here");
  for (const char* name : {"data", "./data", "hard", "here/data", "new/../data"})
    EXPECT_NE(check(name, Existing::kReplaced), ExitCode::kOk) << name;
  EXPECT_EQ(folder_.read("data"), "words");
}

TEST_F(OutputFiles, ExistingFileIsKeptUnlessItMayBeReplaced) {
  folder_.write("old", "results");
  EXPECT_EQ(check("old"), ExitCode::kCannotCreate);
  EXPECT_EQ(check("old", Existing::kReplaced), ExitCode::kOk);
  EXPECT_EQ(folder_.read("old"), "results");  // the old content stays until the new file is written
  EXPECT_EQ(write_output(folder_ / "old", "new", Existing::kReplaced, "test"), absl::OkStatus());
  EXPECT_EQ(folder_.read("old"), "new");
}

TEST_F(OutputFiles, FileThatAppearsMeanwhileIsKeptBesideTheOutput) {
  EXPECT_EQ(check("out"), ExitCode::kOk);
  folder_.write("out", "somebody else's");
  const absl::Status status = write_output(folder_ / "out", "ours", Existing::kKept, "test");
  EXPECT_EQ(exit_code_of(status), ExitCode::kCannotCreate);
  EXPECT_THAT(message_of(status), HasSubstr("out.partial"));
  EXPECT_EQ(folder_.read("out"), "somebody else's");
  EXPECT_EQ(folder_.read("out.partial"), "ours");
  EXPECT_EQ(check("out2"), ExitCode::kOk);
}

TEST_F(OutputFiles, LinksDevicesAndFoldersAreRefusedAsOutput) {
  fs::create_symlink(folder_ / "data", folder_ / "link");
  fs::create_symlink(folder_ / "nowhere", folder_ / "dangling");
  for (const std::string name : {"link", "dangling", ".", "folder/"})
    EXPECT_EQ(check(name, Existing::kReplaced), ExitCode::kCannotCreate) << name;
  EXPECT_EQ(exit_code_of(check_outputs({{"--out", "/dev/full"}}, {}, Existing::kReplaced)), ExitCode::kCannotCreate);
  EXPECT_FALSE(fs::exists(folder_ / "nowhere"));
}

TEST_F(OutputFiles, OutputIntoTheInputFolderIsRefusedIfItWouldBeRead) {
  const auto check_in = [&](const char* name, std::vector<std::string> extensions) {
    return check_outputs({{"--out", folder_ / name}}, {{"--data", folder_.path(), std::move(extensions)}},
                         Existing::kKept)
        .ok();
  };
  EXPECT_FALSE(check_in("metrics", {}));
  EXPECT_FALSE(check_in("runs/a.txt", {".txt"}));
  EXPECT_TRUE(check_in("runs/a.jsonl", {".txt"}));
}

}  // namespace output_files_test
}  // namespace tessera::app
