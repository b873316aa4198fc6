// Tests safetensors files of other programs: a written file can be read again, and damaged or hostile files are refused
// with an error that names them.

#include "checkpoint/tensor_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "checkpoint/tensor_files_writer.h"
#include "runtime/base/status.h"
#include "tests/checkpoint/made_up.h"
#include "tests/offload/scratch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& place) {
  return "\"" + name + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + place + "}";
}

class TensorFilesTest : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(scratch_.file(name), std::ios::binary) << bytes;
    return scratch_.file(name);
  }
  /// Returns the error of opening a file with these bytes. It is empty if there is no error.
  std::string refusal(const std::string& bytes) const {
    const auto files = TensorFiles::open(write("f.safetensors", bytes), "who");
    if (files.ok()) return "";
    EXPECT_EQ(exit_code_of(files.status()), ExitCode::kCorruptData) << files.status();
    EXPECT_THAT(message_of(files.status()), HasSubstr("f.safetensors"));
    return message_of(files.status());
  }
  static std::vector<FileTensor> some_tensors() {
    return {{.name = "a", .dtype = "F32", .shape = {2, 3}},
            {.name = "b \"\n", .dtype = "BF16", .shape = {5}},
            {.name = "none", .dtype = "F32", .shape = {0, 7}},
            {.name = "one", .dtype = "I64", .shape = {}}};
  }
  ScratchFolder scratch_;
};

TEST_F(TensorFilesTest, WrittenTensorsReadBackFromOneOrSeveralFiles) {
  std::vector<std::byte> bytes(24 + 10 + 8);
  fill_pattern(bytes, 1);
  for (const std::int64_t most : {std::int64_t{1} << 30, std::int64_t{30}, std::int64_t{1}}) {
    const std::string folder = scratch_.file("model" + std::to_string(most));
    auto writer = TensorFilesWriter::create(folder, some_tensors(), most, Existing::kKept, "who");
    ASSERT_TRUE(writer.ok()) << writer.status();
    for (std::size_t begin = 0; begin < bytes.size(); begin += 5)
      ASSERT_TRUE(writer->append(std::span(bytes).subspan(begin, std::min<std::size_t>(5, bytes.size() - begin))).ok());
    const absl::Status finished = writer->finish();
    ASSERT_TRUE(finished.ok()) << finished;
    EXPECT_EQ(std::filesystem::exists(folder + "/" + kModelFile), most > 100);
    EXPECT_EQ(std::filesystem::exists(folder + "/" + kIndexFile), most <= 100);
    auto files = TensorFiles::open(folder, "who");
    ASSERT_TRUE(files.ok()) << files.status();
    ASSERT_EQ(files->tensors().size(), 4u);
    EXPECT_EQ(files->tensors().at("a").tensor.shape, (std::vector<std::int64_t>{2, 3}));
    EXPECT_EQ(files->tensors().at("none").tensor.bytes, 0);
    std::vector<std::byte> read(8);
    ASSERT_TRUE(files->read(files->tensors().at("b \"\n"), 2, read).ok());
    EXPECT_EQ(std::memcmp(read.data(), bytes.data() + 26, 8), 0);
    ASSERT_TRUE(files->read(files->tensors().at("one"), 0, read).ok());
    EXPECT_EQ(std::memcmp(read.data(), bytes.data() + 34, 8), 0);
  }
}

TEST_F(TensorFilesTest, ExistingModelIsKeptOrReplacedWhole) {
  const std::string folder = scratch_.file("model");
  const auto write_model = [&](std::int64_t most, Existing existing) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(auto writer, TensorFilesWriter::create(folder, some_tensors(), most, existing, "who"));
    TESSERA_RETURN_IF_ERROR(writer.append(std::vector<std::byte>(42)));
    return writer.finish();
  };
  ASSERT_TRUE(write_model(1, Existing::kKept).ok());
  const absl::Status kept = write_model(1000, Existing::kKept);
  EXPECT_EQ(exit_code_of(kept), ExitCode::kCannotCreate);
  ASSERT_TRUE(write_model(1000, Existing::kReplaced).ok());
  std::vector<std::string> names;
  for (const auto& each : std::filesystem::directory_iterator(folder)) names.push_back(each.path().filename());
  EXPECT_EQ(names, std::vector<std::string>{kModelFile});
  auto short_of = TensorFilesWriter::create(folder, some_tensors(), 1000, Existing::kReplaced, "who");
  ASSERT_TRUE(short_of.ok());
  EXPECT_EQ(exit_code_of(short_of->finish()), ExitCode::kInternal);
}

// Each of these headers has enough bytes, so only the check of its contents refuses it.
TEST_F(TensorFilesTest, HostileHeadersAreRefused) {
  const std::string good = "{" + entry("a", "F32", "[2]", "[0,8]") + "}", data(8, 'x');
  ASSERT_EQ(refusal(head_of(good) + data), "");
  ASSERT_EQ(refusal(head_of(good + "   ") + data), "");
  ASSERT_EQ(refusal(head_of("{}")), "");
  for (std::size_t bytes = 0; bytes < 8; ++bytes) EXPECT_NE(refusal(std::string(bytes, '\0')), "") << bytes;
  for (const std::uint64_t length : {std::uint64_t{1} << 63, ~std::uint64_t{0}, std::uint64_t{9}}) {
    std::string text = head_of("{}      ");
    std::memcpy(text.data(), &length, 8);
    EXPECT_THAT(refusal(text), HasSubstr("no safetensors file")) << length;
  }
  EXPECT_THAT(refusal(head_of(" " + good) + data), HasSubstr("'{'"));
  EXPECT_NE(refusal(head_of("{\"\xff\":1}")), "");
  EXPECT_NE(refusal(head_of(good + "x") + data), "");
  EXPECT_NE(refusal(head_of(std::string(1'000'000, '['))), "");
  EXPECT_NE(refusal(head_of("{\"a\":" + std::string(1'000'000, '['))), "");
  const auto one = [&](const std::string& tensor) { return refusal(head_of("{" + tensor + "}") + data); };
  const std::string a = entry("a", "F32", "[2]", "[0,8]");
  EXPECT_THAT(one(a + "," + a), HasSubstr("given twice"));
  EXPECT_THAT(one(R"("__metadata__":{"x":1},)" + a), HasSubstr("__metadata__"));
  EXPECT_THAT(one(R"("__metadata__":[],)" + a), HasSubstr("__metadata__"));
  EXPECT_THAT(one(R"("__metadata__":{"x":{}},)" + a), HasSubstr("__metadata__"));
  EXPECT_THAT(one(entry("a", "F7", "[2]", "[0,8]")), HasSubstr("F7"));
  EXPECT_THAT(one(entry("a", "F4", "[3]", "[0,1]")), HasSubstr("do not fit"));
  EXPECT_THAT(one(entry("a", "F32", "[2]", "[8,0]")), HasSubstr("before"));
  EXPECT_THAT(one(entry("a", "F32", "[2]", "[0,8,8]")), HasSubstr("data_offsets"));
  EXPECT_THAT(one(entry("a", "F32", "[3]", "[0,8]")), HasSubstr("do not fit"));
  EXPECT_THAT(one(entry("a", "F32", "[4294967296,4294967296]", "[0,0]")), HasSubstr("do not fit"));
  EXPECT_THAT(one(entry("a", "F32", "[4611686018427387904,4,0]", "[0,0]")), HasSubstr("do not fit"));
  for (const char* shape : {"[-2]", "[2.0]", "[2e0]", "[\"2\"]", "2", "null", "{}"})
    EXPECT_NE(one(entry("a", "F32", shape, "[0,8]")), "") << shape;
  for (const char* place : {"[-8,0]", "[0.0,8]", "[0,8.0]", "8", "[18446744073709551608,0]"})
    EXPECT_NE(one(entry("a", "F32", "[2]", place)), "") << place;
  EXPECT_THAT(
      one(entry("a", "U8", "[" + std::string(33, '1').replace(1, 32, ",1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1") + ",8]",
                "[0,8]")),
      HasSubstr("dimensions"));
  EXPECT_THAT(one(entry("a", "U8", "[4]", "[0,4]")), HasSubstr("4 bytes, the file has 8"));
  EXPECT_THAT(one(entry("a", "U8", "[4]", "[4,8]")), HasSubstr("leave a hole"));
  EXPECT_THAT(one(entry("a", "U8", "[6]", "[0,6]") + "," + entry("b", "U8", "[6]", "[2,8]")), HasSubstr("overlap"));
  EXPECT_THAT(one(entry("a", "F32", "[2]", "[0,8]") + "," + entry("b", "F32", "[2]", "[0,8]")), HasSubstr("overlap"));
  EXPECT_THAT(one(R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1})"), HasSubstr("other members"));
  EXPECT_THAT(one(R"("a":{"dtype":"F32","shape":[2]})"), HasSubstr("data_offsets"));
  EXPECT_THAT(one(R"("a":[])"), HasSubstr("wanted an object"));
  EXPECT_THAT(one(entry("a\\u0000b", "F32", "[2]", "[0,8]")), HasSubstr("no NUL"));
  EXPECT_THAT(one(entry(std::string(5000, 'n'), "F32", "[2]", "[0,8]")), HasSubstr("at most 4096 bytes"));
}

TEST_F(TensorFilesTest, PicklesLinksAndFoldersWithoutAModelAreRefusedWithAHint) {
  for (const char* head : {"PK\x03\x04 a zip", "\x80\x02}q of a pickle"}) {
    EXPECT_THAT(refusal(head), HasSubstr("scripts/to_safetensors.py"));
  }
  const std::string file = write("real.safetensors", head_of("{}")), link = scratch_.file("link.safetensors");
  ASSERT_EQ(::symlink(file.c_str(), link.c_str()), 0);
  EXPECT_THAT(message_of(TensorFiles::open(link, "who").status()), HasSubstr("is a link"));
  EXPECT_EQ(exit_code_of(TensorFiles::open(scratch_.file("none"), "who").status()), ExitCode::kNoInput);
  EXPECT_EQ(exit_code_of(TensorFiles::open(scratch_.path(), "who").status()), ExitCode::kNoInput);
  // This is a checkpoint of torch.distributed.checkpoint: a pickle, and files that hold archives of torch.save.
  EXPECT_THAT(message_of(TensorFiles::open(write("__0_0.distcp", "PK\x03\x04 a zip"), "who").status()),
              AllOf(HasSubstr("__0_0.distcp is a pickle"), HasSubstr("scripts/to_safetensors.py")));
  write(".metadata", "\x80\x04 of a pickle");
  EXPECT_THAT(message_of(TensorFiles::open(scratch_.path(), "who").status()),
              AllOf(HasSubstr(".metadata"), HasSubstr("DCP")));
  write("pytorch_model.bin", "PK");
  EXPECT_THAT(message_of(TensorFiles::open(scratch_.path(), "who").status()), HasSubstr("scripts/to_safetensors.py"));
}

TEST_F(TensorFilesTest, IndexNamesOnlyFilesOfItsOwnFolder) {
  const std::string folder = scratch_.path() + "/";
  write("a.safetensors", head_of("{" + entry("a", "U8", "[1]", "[0,1]") + "}") + "x");
  write("b.safetensors", head_of("{" + entry("b", "U8", "[1]", "[0,1]") + "}") + "y");
  write("again.safetensors", head_of("{" + entry("b", "U8", "[1]", "[0,1]") + "}") + "y");
  const auto error_of = [&](const std::string& map) {
    write(kIndexFile, R"({"metadata":{"total_size":2},"weight_map":)" + map + "}");
    const auto files = TensorFiles::open(scratch_.path(), "who");
    return files.ok() ? "" : message_of(files.status());
  };
  EXPECT_EQ(error_of(R"({"a":"a.safetensors","b":"b.safetensors"})"), "");
  for (const char* name :
       {"../a.safetensors", "/etc/passwd", "sub/a.safetensors", "..", "a.safetensors\\u0000", "a.bin", ""})
    EXPECT_THAT(error_of(std::string(R"({"a":")") + name + "\"}"), HasSubstr("of this folder")) << name;
  EXPECT_THAT(error_of(R"({"a":1})"), HasSubstr("of this folder"));
  EXPECT_THAT(error_of(R"({"a":"missing.safetensors"})"), HasSubstr("No such file"));
  EXPECT_THAT(error_of(R"({"a":"b.safetensors"})"), HasSubstr("is not in"));
  EXPECT_THAT(error_of(R"({"c":"b.safetensors"})"), HasSubstr("is not in"));
  EXPECT_THAT(error_of(R"({"a":"again.safetensors","b":"b.safetensors"})"), HasSubstr("and so does"));
  EXPECT_NE(error_of("{}"), "");
  EXPECT_NE(error_of("[]"), "");
}

}  // namespace
}  // namespace tessera
