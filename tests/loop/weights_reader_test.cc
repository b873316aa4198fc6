// Tests archives of PyTorch: archives that PyTorch writes can be read, and parts that do not fit together are an error
// before a value is read.

#include <ATen/Functions.h>
#include <caffe2/serialize/inline_container.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "engine/weights/open_weights.h"
#include "runtime/base/status.h"
#include "tests/oracle/child.h"
#include "tests/support/test_folder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Returns a number in the form in which pickle writes it.
std::string number(std::int64_t value) {
  std::string text = "\x8a\x08";
  for (int i = 0; i < 8; ++i) text += static_cast<char>(static_cast<std::uint64_t>(value) >> (8 * i));
  return text;
}

std::string text(const std::string& value) { return std::string("\x8c") + static_cast<char>(value.size()) + value; }

std::string tuple(const std::vector<std::int64_t>& values) {
  std::string all = "(";
  for (const std::int64_t value : values) all += number(value);
  return all + "t";
}

struct Entry {
  std::int64_t storage_numel = 6, offset = 0;
  std::vector<std::int64_t> sizes = {2, 3}, strides = {3, 1};
  std::string attributes = "";  ///< pickled
};

/// Returns a dictionary with the tensor "w", whose storage is the record "0".
std::string pickle_of(const Entry& entry) {
  return "\x80\x02}" + text("w") + "ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") +
         "ctorch\nFloatStorage\n" + text("0") + text("cpu") + number(entry.storage_numel) + "tQ" +
         number(entry.offset) + tuple(entry.sizes) + tuple(entry.strides) + "\x89" + "ccollections\nOrderedDict\n)R" +
         entry.attributes + "tRs.";
}

using Tensors = std::map<std::string, at::Tensor>;

absl::StatusOr<Tensors> read_weights(const fs::path& path, const WeightsRequest& request = {}) {
  TESSERA_ASSIGN_OR_RETURN(const auto source, open_weights(path, request));
  Tensors tensors;
  for (const auto& [name, stored] : source->tensors()) {
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor flat, source->read(name, 0, c10::multiply_integers(stored.sizes)));
    tensors.emplace(name, flat.view(stored.sizes));
  }
  return tensors;
}

class WeightsReader : public ::testing::Test {
 protected:
  fs::path archive(const std::map<std::string, std::string>& records) const {
    std::string bytes;
    caffe2::serialize::PyTorchStreamWriter writer([&](const void* more, std::size_t size) {
      bytes.append(static_cast<const char*>(more), size);
      return size;
    });
    for (const auto& [name, content] : records) writer.writeRecord(name, content.data(), content.size());
    writer.writeEndOfFile();
    return folder_.write("w.pt", bytes);
  }
  fs::path with(const Entry& entry, std::size_t floats = 6) const {
    std::string values;
    for (std::size_t i = 0; i < floats; ++i) {
      const auto value = static_cast<float>(i);
      values.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
    return archive({{"data.pkl", pickle_of(entry)}, {"data/0", values}});
  }
  std::string refusal(const fs::path& path) const {
    const auto read = read_weights(path);
    if (read.ok()) return "accepted";
    EXPECT_EQ(exit_code_of(read.status()), ExitCode::kCorruptData) << read.status();
    EXPECT_THAT(message_of(read.status()), HasSubstr(path.string()));
    return message_of(read.status());
  }

  TestFolder folder_;
};

TEST_F(WeightsReader, StridedTensorsAreReadFromTheirStorages) {
  const auto read = read_weights(with({.offset = 1, .sizes = {2, 2}, .strides = {1, 3}}));
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ(read->size(), 1u);
  EXPECT_TRUE(at::equal(read->at("w"), at::tensor({1.f, 4.f, 2.f, 5.f}).view({2, 2})));
}

TEST_F(WeightsReader, CutStorageIsRefusedWithItsTensor) {
  for (const std::size_t floats : {0, 3, 5, 7})
    EXPECT_THAT(refusal(with({}, floats)),
                AllOf(HasSubstr("w: its storage 0 wants 24 bytes, and the file has " + std::to_string(4 * floats))));
  EXPECT_THAT(refusal(archive({{"data.pkl", pickle_of({})}})), HasSubstr("w: its storage 0 is missing"));
}

TEST_F(WeightsReader, TensorBeyondItsStorageIsRefused) {
  const std::int64_t far = std::int64_t{1} << 62;
  for (const Entry& entry : std::vector<Entry>{{.offset = 1},
                                               {.offset = -1},
                                               {.sizes = {2, 4}},
                                               {.strides = {4, 1}},
                                               {.strides = {-3, 1}},
                                               {.sizes = {-1, 3}},
                                               {.sizes = {far, far}},
                                               {.strides = {far, far}},
                                               {.offset = far, .sizes = {far}, .strides = {2}}})
    EXPECT_THAT(refusal(with(entry)), HasSubstr("w: the tensor reaches beyond its storage"));
  EXPECT_THAT(refusal(with({.storage_numel = far})), HasSubstr("elements"));
  EXPECT_THAT(refusal(with({.storage_numel = -6})), HasSubstr("elements"));
  // a tensor without elements reads nothing
  EXPECT_EQ(refusal(with({.storage_numel = 6, .offset = 7, .sizes = {0, 3}})), "accepted");
}

TEST_F(WeightsReader, TensorMarkedAsNegatedIsRefused) {
  EXPECT_EQ(refusal(with({.attributes = "}"})), "accepted");
  EXPECT_THAT(refusal(with({.attributes = "}" + text("neg") + "\x88s"})), HasSubstr("not a file of weights"));
}

TEST_F(WeightsReader, TensorsOfOtherKindsAreSaidByTheirKind) {
  for (const auto& [function, what] :
       {std::pair("_rebuild_sparse_tensor", "a sparse tensor"), std::pair("_rebuild_qtensor", "a quantized tensor"),
        std::pair("_rebuild_meta_tensor_no_storage", "on device meta")}) {
    std::string pickle = pickle_of({});
    pickle.pop_back();  // the end of the pickle
    pickle += text("s") + "ctorch._utils\n" + function + "\n(" + number(1) + "tRs.";
    const auto source = open_weights(archive({{"data.pkl", pickle}, {"data/0", std::string(24, '\0')}}), {});
    ASSERT_TRUE(source.ok()) << source.status();
    ASSERT_EQ((*source)->others().size(), 1u);
    EXPECT_EQ((*source)->others()[0].first, "s");
    EXPECT_THAT((*source)->others()[0].second, HasSubstr(what));
  }
}

TEST_F(WeightsReader, PickleWithoutTensorsIsNamed) {
  const auto pickled = [&](const std::string& pickle) { return refusal(archive({{"data.pkl", "\x80\x02" + pickle}})); };
  EXPECT_THAT(pickled("}" + text("epoch") + number(3) + "s."),
              HasSubstr("holds no tensor, but a dictionary of 1 entry"));
  EXPECT_THAT(pickled("}" + text("model") + "}s."), AllOf(HasSubstr("holds no tensor"), HasSubstr("state_dict()")));
  EXPECT_THAT(pickled("]."), HasSubstr("holds no tensor, but a list of 0 entries"));
  EXPECT_THAT(pickled("N."), HasSubstr("it holds None, not a dictionary"));
  EXPECT_THAT(pickled("cos\nsystem\n(" + text("true") + "tR."),
              AllOf(HasSubstr("an object of the class system, not a dictionary"), HasSubstr("model.state_dict()")));
  EXPECT_THAT(pickled("}"), HasSubstr("cut short"));
  EXPECT_THAT(pickled("I1\n."), HasSubstr("instruction 0x49"));
  std::string nested = "}" + text("w") + ")";
  for (int i = 0; i < 100'000; ++i) nested += "\x85";
  EXPECT_THAT(pickled(nested + "s."), HasSubstr("deeper"));
  EXPECT_THAT(refusal(archive({{"constants.pkl", "x"}})), HasSubstr("zip archive that torch.save did not write"));
}

/// Returns a pickle of `deep` nested dictionaries, with a tensor in the innermost.
std::string nested(int deep) {
  std::string all = "\x80\x02}";
  for (int i = 1; i < deep; ++i) all += text("d") + "}";
  all += pickle_of({}).substr(3);
  all.pop_back();
  for (int i = 1; i < deep; ++i) all += "s";
  return all + ".";
}

TEST_F(WeightsReader, DictionariesNestUpToABound) {
  const std::string values(24, '\0');
  EXPECT_EQ(refusal(archive({{"data.pkl", nested(32)}, {"data/0", values}})), "accepted");
  EXPECT_THAT(refusal(archive({{"data.pkl", nested(33)}, {"data/0", values}})), HasSubstr("deeper than 32"));
  // The cases are a dictionary that contains itself, a module that is its own state, and a tensor that dictionaries
  // hold under 2^30 names.
  EXPECT_THAT(refusal(archive(
                  {{"data.pkl", "\x80\x02}q" + std::string(1, '\0') + text("d") + "h" + std::string(1, '\0') + "s."}})),
              HasSubstr("deeper than 32"));
  const std::string own_state = std::string("\x80\x02") + "c__torch__\nModule\n)\x81q" + '\0' + "h" + '\0' + "b.";
  EXPECT_THAT(refusal(archive({{"data.pkl", own_state}})), HasSubstr("holds no tensor"));
  std::string doubled = pickle_of({});
  doubled.pop_back();
  for (int i = 0; i < 30; ++i) {
    const std::string place(1, static_cast<char>(i));
    doubled += "q" + place + "0}" + text("a") + "h" + place + "s" + text("b") + "h" + place + "s";
  }
  EXPECT_THAT(refusal(archive({{"data.pkl", doubled + "."}, {"data/0", values}})),
              HasSubstr("more than 1048576 entries"));
}

TEST_F(WeightsReader, ExpandedTensorTakesNoMemoryUntilItIsRead) {
  const std::int64_t many = std::int64_t{1} << 40;
  const auto source = open_weights(with({.sizes = {many}, .strides = {0}}), {});
  ASSERT_TRUE(source.ok()) << source.status();
  EXPECT_EQ((*source)->tensors().at("w").sizes, (std::vector<std::int64_t>{many}));
}

// The archive's directory gives two names to the same bytes of the file.
TEST_F(WeightsReader, OverlappingRecordsThatExceedTheFileAreRefused) {
  const std::string values(std::size_t{1} << 16, 'v');
  const std::int64_t floats = static_cast<std::int64_t>(values.size() / 4);
  std::string pickle = "\x80\x02}";
  std::map<std::string, std::string> records;
  for (const char* name : {"a", "b", "c"}) {
    pickle += text(name) + "ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + "ctorch\nFloatStorage\n" +
              text(name) + text("cpu") + number(floats) + "tQ" + number(0) + tuple({floats}) + tuple({1}) + "\x89" +
              "ccollections\nOrderedDict\n)RtRs";
    records[std::string("data/") + name] = name == std::string("a") ? values : "";
  }
  records["data.pkl"] = pickle + ".";
  const fs::path path = archive(records);
  std::string bytes = TestFolder::content_of(path);
  // The entries of b and c have the checksum, sizes and offset of a's entry.
  const auto entry_of = [&](const std::string& name) {
    std::size_t place = bytes.rfind("archive/data/" + name);
    return place - 46;
  };
  const std::string of_a = bytes.substr(entry_of("a"), 46);
  for (const char* name : {"b", "c"}) {
    bytes.replace(entry_of(name) + 16, 12, of_a.substr(16, 12));
    bytes.replace(entry_of(name) + 42, 4, of_a.substr(42, 4));
  }
  EXPECT_THAT(refusal(folder_.write("laid_over.pt", bytes)), HasSubstr("more than the file"));
}

TEST_F(WeightsReader, ChangedBytesAndCutTailsAreReadSafely) {
  const fs::path path = with({});
  const std::string bytes = TestFolder::content_of(path);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    std::string changed = bytes;
    changed[i] = static_cast<char>(changed[i] ^ (1 << (i % 8)));
    const auto read = read_weights(folder_.write("changed.pt", changed));
    if (read.ok()) {
      // the changed byte may belong to the name
      for (const auto& [name, value] : *read) static_cast<void>(value.clone());
    }
    EXPECT_FALSE(read_weights(folder_.write("cut.pt", bytes.substr(0, i))).ok()) << i;
  }
}

TEST_F(WeightsReader, StateDictOfPythonIsRead) {
  if (!oracle::python_has_torch()) GTEST_SKIP() << "Python without torch";
  const std::string second = (folder_ / "protocol_2.pt").string(), fourth = (folder_ / "protocol_4.pt").string();
  const auto printed = oracle::run_python("write_weights.py", {second, "2", fourth, "4"}, folder_.path(), 60);
  ASSERT_TRUE(printed.ok()) << printed.status();
  for (const std::string& path : {second, fourth}) {
    const auto read = read_weights(path);
    ASSERT_TRUE(read.ok()) << read.status();
    double sum = 0;
    for (const auto& [name, value] : *read) sum += value.to(at::kDouble).abs().sum().item<double>();
    EXPECT_EQ(std::to_string(sum) + "\n", *printed);
    EXPECT_EQ(read->size(), 10u);
    EXPECT_TRUE(at::equal(read->at("linear.weight"), read->at("tied.weight")));
    EXPECT_TRUE(at::equal(read->at("strided"), at::arange(6, at::kLong).view({2, 3}).t()));
    EXPECT_EQ(read->at("empty").sizes(), (std::vector<std::int64_t>{0, 3}));
  }
}

}  // namespace
}  // namespace tessera
